"""Reads a file or directory into a `Trace`: finds its format, numbers its blocks, places its requests in time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec

from kvbm.errors import SettingsError
from kvbm.sim.traces.formats.recording import read_recording
from kvbm.sim.traces.formats.records import (
    MOONCAKE_BLOCK_TOKENS,
    QWEN_BLOCK_TOKENS,
    MooncakeRecord,
    QwenRecord,
    SessionRecord,
)
from kvbm.sim.traces.formats.sessions import ChainedNames, Source, regroup, start_times_s
from kvbm.sim.traces.formats.text import (
    TraceError,
    decode,
    lines,
    not_json,
    starts_as_json,
    unusable,
    whole,
    whole_lines,
)
from kvbm.sim.traces.trace import Trace, TraceBuilder

SESSION_HOURS = 4.0

_ACCEPTED = (
    "a recording of kvbm (kvbm_trace), Mooncake lines (timestamp, hash_ids), Qwen-Bailian lines (chat_id, "
    "timestamp, hash_ids) or agentic sessions (block_size, requests)"
)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a file becomes a trace.

    `chunk_tokens`: size of the trace's blocks, a multiple of the file's; None keeps those. `seed`, `session_hours`:
    sessions start in a shuffled order as a Poisson process, all within so many hours on average. `time_scale`
    multiplies the times between arrivals. `limit`: only so many requests, the first to arrive.
    """

    chunk_tokens: int | None = None
    seed: int = 0
    session_hours: float = SESSION_HOURS
    time_scale: float = 1.0
    limit: int | None = None


def read_trace(path: Path, options: ReadOptions = ReadOptions()) -> Trace:
    """The trace in a file, or in a directory of session files. `TraceError` says where it cannot be read."""
    source = _read_directory(path) if path.is_dir() else _read_file(path)
    return _build(path, source, options)


def _read_directory(path: Path) -> Source:
    # Such directories also hold notes and tables beside the sessions.
    files = [file for file in sorted(path.iterdir()) if file.is_file() and starts_as_json(file)]
    source = Source(0)
    for file in files:
        first = next(lines(file))
        if not _keys_of(file, first) >= {"block_size", "requests"}:
            raise TraceError(
                f"{file}: in a directory every file that begins with {{ must be an agentic session"
            )
        _add_sessions(file, source)
    if not source.sessions:
        raise TraceError(f"{path}: no sessions: a directory must hold agentic sessions, a file each")
    return source


def _read_file(path: Path) -> Source:
    numbered = lines(path)
    first = next(numbered, None)
    if first is None:
        raise TraceError(f"{path}: empty; accepted: {_ACCEPTED}")
    keys = _keys_of(path, first)
    again: Iterator[tuple[int, bytes]] = chain([first], numbered)
    if "kvbm_trace" in keys:
        return read_recording(path, whole_lines(path))
    if "requests" in keys:
        source = Source(0)
        _add_sessions(path, source)
        return source
    if "chat_id" in keys:
        names = ChainedNames()
        return Source(
            QWEN_BLOCK_TOKENS,
            [[decode(f"{path}:{number}", text, QwenRecord).request(names) for number, text in again]],
        )
    if keys & {"hash_ids", "timestamp"}:
        return Source(
            MOONCAKE_BLOCK_TOKENS,
            [[decode(f"{path}:{number}", text, MooncakeRecord).request() for number, text in again]],
        )
    raise TraceError(
        f"{path}:{first[0]}: no format has the fields {', '.join(sorted(keys))}; accepted: {_ACCEPTED}"
    )


def _keys_of(path: Path, first: tuple[int, bytes]) -> set[str]:
    """Names of the fields of the first object, be it one line or the whole file."""
    number, text = first
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        # An object that is spread over lines is a session with a file of its own.
        everything = whole(path)
        try:
            value = msgspec.json.decode(everything)
        except msgspec.DecodeError:
            raise not_json(f"{path}:{number}", text, error) from None
    if not isinstance(value, dict):
        raise unusable(f"{path}:{number}", "line", value, _ACCEPTED)
    return set(value)


def _add_sessions(path: Path, source: Source) -> None:
    """Append the sessions of a file: one a line, or one over the whole file."""
    source.has_sessions = True
    texts: Iterable[tuple[str, bytes]] = ((f"{path}:{number}", text) for number, text in lines(path))
    if not _is_json(next(lines(path))[1]):
        texts = [(str(path), whole(path))]
    for place, text in texts:
        record = decode(place, text, SessionRecord)
        if source.block_tokens not in (0, record.block_size):
            accepted = f"{source.block_tokens}, as in the sessions before it"
            raise unusable(place, "block_size", record.block_size, accepted)
        source.block_tokens = record.block_size
        record.add_to(source, place)


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True


def _build(path: Path, source: Source, options: ReadOptions) -> Trace:
    block_tokens = options.chunk_tokens or source.block_tokens
    if block_tokens % source.block_tokens:
        accepted = f"a multiple of the {source.block_tokens} tokens of a block in {path}"
        raise SettingsError("--chunk-tokens", block_tokens, accepted)
    per_group = block_tokens // source.block_tokens
    builder = TraceBuilder(path.name.split(".")[0] or path.name, block_tokens)
    starts = [(0, 0.0)]
    if source.has_sessions:
        starts = start_times_s(len(source.sessions), options.seed, options.session_hours)
    for session, start_s in starts:
        for request in source.sessions[session]:
            builder.add(
                start_s + request.at_s,
                regroup(request.prefixes, per_group) if per_group > 1 else request.prefixes,
                request.prompt_tokens,
                request.output_tokens,
                request.seconds,
            )
    trace = builder.build(options.time_scale, options.limit)
    if not trace.requests:
        raise TraceError(f"{path}: no request has a full block of {block_tokens} tokens")
    return trace
