"""Logging: one line per record on stderr, and the lines that summarize a process for its operator."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TYPE_CHECKING, TextIO

from kvbm.observe.metrics import Snapshot
from kvbm.present.numbers import format_bytes

ROOT_LOGGER = "kvbm"

_LEVELS: dict[str, int] = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
_LEVEL_WORDS: dict[int, str] = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warn",
    logging.ERROR: "error",
    logging.CRITICAL: "error",
}


class LineFormatter(logging.Formatter):
    """`time=… level=… logger=… message`, always one line; a traceback follows as one quoted value."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, without its line end."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        level = _LEVEL_WORDS.get(record.levelno, record.levelname.lower())
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = f"time={seconds}.{int(record.msecs):03d}Z level={level} logger={record.name} {message}"
        if record.exc_info:
            line += f" traceback={_value(self.formatException(record.exc_info))}"
        return line


if TYPE_CHECKING:
    _TextHandler = logging.StreamHandler[TextIO]
else:
    # Python 3.10 has no subscript for it at run time.
    _TextHandler = logging.StreamHandler


class _Handler(_TextHandler):
    """A class of our own, so that a second `configure` recognizes the handler of the first."""


def configure(level: str, stream: TextIO | None = None) -> None:
    """Log records of `level` (a word of `DYN_LOG`) and above to `stream`, stderr if None.

    Only the `kvbm` logger is changed: inside an engine all other logging is the engine's. May be called again; the last
    call counts.
    """
    assert level in _LEVELS, f"no level is called {level}"
    logger = logging.getLogger(ROOT_LOGGER)
    for handler in list(logger.handlers):
        if isinstance(handler, _Handler):
            logger.removeHandler(handler)
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(LineFormatter())
    logger.addHandler(handler)
    logger.setLevel(_LEVELS[level])
    logger.propagate = False


def key_values(**fields: object) -> str:
    """`key=value` pairs in the given order. None is left out; a value with blanks or quotes is quoted."""
    return " ".join(f"{name}={_value(value)}" for name, value in fields.items() if value is not None)


def start_line(role: str, **fields: object) -> str:
    """The first line of a process's log: its role, then the values that it was started with."""
    return "start " + key_values(role=role, **fields)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    if text and text.isprintable() and not any(character in ' "=' for character in text):
        return text
    return json.dumps(text, ensure_ascii=False)


_ONBOARDED = {
    "host": "kvbm_onboard_blocks_h2d",
    "disk": "kvbm_onboard_blocks_d2d",
    "remote": "kvbm_onboard_blocks_o2d",
}
_OFFLOADED = ("kvbm_offload_blocks_d2h", "kvbm_offload_blocks_d2d")


def traffic_line(before: Snapshot, after: Snapshot, seconds: float) -> str:
    """A line about the blocks that moved between two snapshots, and how full the tiers are; empty if none moved.

    As in: `last 60 s: stored 128 blocks (402 MB), loaded 64 (201 MB: 40 host, 24 disk), evicted 12 host
    0 disk, failures 0, host 61% full, disk 12% full`. Only tiers that exist are named.
    """

    def rise(*key: str) -> int:
        return int(after.get(key, 0) - before.get(key, 0))

    def rises(name: str) -> int:
        return sum(rise(*key) for key in after if key[0] == name)

    stored = sum(rise(name) for name in _OFFLOADED)
    loaded = {tier: rise(name) for tier, name in _ONBOARDED.items()}
    tiers = [tier for tier in _ONBOARDED if after.get(("kvbm_pool_capacity_blocks", tier), 0) > 0]
    evicted = {tier: rise("kvbm_evicted_blocks_total", tier, "capacity") for tier in tiers}
    failures = rises("kvbm_failures_total")
    if not (stored or any(loaded.values()) or any(evicted.values()) or failures):
        return ""
    stored_bytes = sum(rise(*key) for key in after if key[:2] == ("kvbm_transfer_bytes_total", "device"))
    loaded_bytes = sum(
        rise(*key) for key in after if key[0] == "kvbm_transfer_bytes_total" and key[2] == "device"
    )
    parts = [
        f"stored {stored} blocks ({format_bytes(stored_bytes)})",
        f"loaded {sum(loaded.values())} ({_split(loaded_bytes, loaded, tiers)})",
    ]
    if tiers:
        parts.append("evicted " + " ".join(f"{evicted[tier]} {tier}" for tier in tiers))
    if hit_bytes := rise("kvbm_hit_bytes_total", "disk"):
        written_bytes = rise("kvbm_transfer_bytes_total", "host", "disk")
        parts.append(f"disk wrote {written_bytes / hit_bytes:.2g} bytes per byte of hit")
    if written := rise("kvbm_offload_blocks_d2o"):
        parts.append(
            f"{written} blocks written to remote ({format_bytes(rise('kvbm_transfer_bytes_total', 'host', 'remote'))})"
        )
    parts.append(f"failures {failures}")
    parts.extend(f"{tier} {_fullness(after, tier):.0%} full" for tier in tiers)
    return f"last {seconds:.0f} s: " + ", ".join(parts)


def _split(loaded_bytes: int, loaded: dict[str, int], tiers: list[str]) -> str:
    shown = [f"{blocks} {tier}" for tier, blocks in loaded.items() if blocks or tier in tiers]
    return format_bytes(loaded_bytes) + (f": {', '.join(shown)}" if shown else "")


def _fullness(after: Snapshot, tier: str) -> float:
    used = sum(after.get(("kvbm_pool_blocks", tier, state), 0) for state in ("filling", "resident"))
    return used / after["kvbm_pool_capacity_blocks", tier]
