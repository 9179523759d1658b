"""Loads the settings from their sources, in order of precedence.

Command line, `kv_connector_extra_config`, environment, file, default.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvbm.errors import SettingsError
from kvbm.present.numbers import format_bytes
from kvbm.settings import parse, settings_file
from kvbm.settings.advice import DEFAULT_ORIGIN, default_host_bytes, notices
from kvbm.settings.ineffective import INEFFECTIVE, OTHER_VARIABLES, Ineffective, describe_removed_setting
from kvbm.settings.places import runtime_dir_under
from kvbm.settings.schema import FIELDS, FILE_VARIABLE, PREFIX, SCHEMA, Settings
from kvbm.settings.setting import Kind, Setting

COMMAND_LINE_ORIGIN = "command line"
EXTRA_CONFIG_ORIGIN = "kv_connector_extra_config"
ARGUMENT_ORIGIN = "argument"


class LoadedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings and where each came from.

    `origins` maps every field to `command line`, `kv_connector_extra_config`, `environment NAME`, `file PATH` or
    `default`. `warnings` are lines about wishes that are not fulfilled; `notices` are lines about choices that may
    surprise.
    """

    settings: Settings
    origins: dict[str, str]
    warnings: list[str]
    notices: list[str]


class _Found(msgspec.Struct, frozen=True):
    """A value, its origin, and the name that the user gave it there. Of two, the one of higher `rank` counts."""

    value: object
    origin: str
    label: str
    rank: int


def process_environment() -> Mapping[str, str]:
    """A copy of this process's environment: the argument for `load_settings` outside tests."""
    return dict(os.environ)


def load_settings(
    environ: Mapping[str, str],
    overrides: Mapping[str, object] | None = None,
    file: Path | None = None,
    *,
    extra_config: object = None,
    directory: Path = Path(),
    memory_bytes: int | None = None,
) -> LoadedSettings:
    """Read and check every setting; the first that cannot be used is a `SettingsError` of one line.

    `overrides` (the command line) and `extra_config` (`kvbm` in an engine's `kv_connector_extra_config`) map field
    names to values: text as on the command line, or numbers and booleans; None counts as not given. `file` is a TOML
    file of field names; without it, `DYN_KVBM_CONFIG` may name one, or there is a `kvbm.toml` of ours in `directory`.
    `memory_bytes` is the memory that is available: the default size of the host tier depends on it.
    """
    warnings: list[str] = []
    faults: list[SettingsError] = []
    found: dict[str, _Found] = {}
    path = file or _file_named_by(environ) or settings_file.found_in(directory, warnings)
    for rank, source in enumerate(
        (
            _from_file(path, warnings, faults),
            _from_environment(environ, warnings, faults),
            _from_mapping(_mapping(extra_config), EXTRA_CONFIG_ORIGIN, warnings, faults),
            _from_mapping(overrides or {}, COMMAND_LINE_ORIGIN, warnings, faults),
        ),
        start=1,
    ):
        found.update({name: msgspec.structs.replace(item, rank=rank) for name, item in source.items()})
    if faults:
        raise faults[0]
    _drop_outranked_counts(found, warnings)
    _drop_outranked_admission(found, warnings)
    settings = _assemble(found, environ)
    warnings.extend(_remarks_on_values(found))
    origins = {name: found[name].origin if name in found else DEFAULT_ORIGIN for name in FIELDS}
    settings, lines = _with_some_tier(settings, found, memory_bytes)
    return LoadedSettings(
        settings=settings, origins=origins, warnings=warnings, notices=[*lines, *notices(settings, origins)]
    )


def settings_of_arguments(arguments: Mapping[str, object]) -> Settings:
    """The settings that a program gives as arguments of these names, checked as on every other way in; None counts as
    not given. Nothing else is read, neither the environment nor a file. Raises SettingsError, which names the argument.
    """
    removed: list[str] = []
    faults: list[SettingsError] = []
    found = _from_mapping(arguments, ARGUMENT_ORIGIN, removed, faults)
    assert not removed, removed
    if faults:
        raise faults[0]
    return Settings(**{name: item.value for name, item in found.items()})  # type: ignore[arg-type]  # checked above


def file_faults(path: Path) -> list[str]:
    """What is wrong with a settings file, one line for each fault; a name that no setting has is one too."""
    faults: list[SettingsError] = []
    unknown: list[str] = []
    found = _from_file(path, unknown, faults)
    lines = [*map(str, faults), *unknown]
    if not lines:
        try:
            _with_some_tier(_assemble(found, {}), found, None)
        except SettingsError as error:
            lines.append(str(error))
    return lines


def _from_environment(
    environ: Mapping[str, str], warnings: list[str], faults: list[SettingsError]
) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    for setting in SCHEMA:
        text = environ.get(setting.variable, "")
        if not text.strip():
            # Empty is unset: users write `export X=` to take a variable back.
            continue
        try:
            value = _parse(setting, setting.variable, text, in_gb=setting.variable.endswith("_GB"))
        except SettingsError as error:
            if setting.kind is Kind.LOG:
                # All of Dynamo reads DYN_LOG; a filter in a form that we do not know must not stop an engine.
                warnings.append(str(error))
            else:
                faults.append(error)
            continue
        if setting.inverted:
            value = not value
        found[setting.field] = _Found(value, f"environment {setting.variable}", setting.variable, 0)
    _remark_on_names(environ, warnings, faults)
    return found


def _from_mapping(
    values: Mapping[str, object], origin: str, warnings: list[str], faults: list[SettingsError]
) -> dict[str, _Found]:
    """The command line, an engine's configuration or a program's arguments."""
    found: dict[str, _Found] = {}
    for field, value in values.items():
        if line := describe_removed_setting(str(field)):
            warnings.append(f"{origin}: {field} {line}")
        elif field not in FIELDS:
            # The names come from an engine's configuration file: a wrong one is its user's mistake, not a programmer's.
            faults.append(
                parse.reject(str(field), value, f"no setting has this name{_nearest(str(field), FIELDS)}")
            )
        elif value is not None:
            label = (FIELDS[field].flag if origin == COMMAND_LINE_ORIGIN else "") or field
            _take(found, field, label, value, origin, faults)
    return found


def _mapping(extra_config: object) -> Mapping[str, object]:
    """What an engine's user wrote there may be of any type."""
    if extra_config is None:
        return {}
    if isinstance(extra_config, Mapping):
        return extra_config
    accepted = 'names of settings with their values, such as {"host_bytes": "4GB"}'
    raise parse.reject(f"{EXTRA_CONFIG_ORIGIN}.kvbm", extra_config, accepted)


def _take(
    found: dict[str, _Found], field: str, label: str, value: object, origin: str, faults: list[SettingsError]
) -> None:
    """Put one value among those found, or its error among the faults."""
    try:
        found[field] = _Found(_parse_value(FIELDS[field], label, value), origin, label, 0)
    except SettingsError as error:
        faults.append(error)


def _file_named_by(environ: Mapping[str, str]) -> Path | None:
    path = environ.get(FILE_VARIABLE, "").strip()
    return Path(path) if path else None


def _from_file(path: Path | None, warnings: list[str], faults: list[SettingsError]) -> dict[str, _Found]:
    """The values of a settings file. A name that no setting has is a warning: an older release may not know it."""
    found: dict[str, _Found] = {}
    if path is None:
        return found
    try:
        table = settings_file.read_table(path)
    except SettingsError as error:
        faults.append(error)
        return found
    for field, value in table.items():
        if field in FIELDS:
            _take(found, field, f"{path}: {field}", value, f"file {path}", faults)
        else:
            line = describe_removed_setting(field) or _describe_unknown(field, FIELDS)
            warnings.append(f"{path}: {field} {line}")
    return found


def _parse_value(setting: Setting, label: str, value: object) -> object:
    """A value of the command line or a file. Numbers and booleans follow the same rules as text."""
    if isinstance(value, bool):
        value = "true" if value else "false"
    elif isinstance(value, (int, float)):
        value = str(value)
    if not isinstance(value, str):
        raise parse.reject(label, value, f"a {setting.kind.value}")
    return _parse(setting, label, value, in_gb=False)


def _parse(setting: Setting, label: str, text: str, *, in_gb: bool) -> object:
    """The value of a setting from its text. `in_gb`: sizes are a number of GB, as in the `…_GB` variables."""
    kind = setting.kind
    if kind is Kind.SIZE:
        size_bytes = parse.parse_gb(label, text) if in_gb else parse.parse_size(label, text)
        if size_bytes < setting.minimum:
            raise parse.reject(label, text, "a size above 0")
        return size_bytes
    if kind is Kind.CHOICE:
        return parse.parse_choice(label, text, setting.choices)
    if kind in _NUMBERS:
        return parse.parse_count(label, text, setting.minimum, setting.maximum, _NUMBERS[kind])
    return _TEXTS[kind](label, text)


_NUMBERS = {Kind.COUNT: "a whole number", Kind.PORT: "a port", Kind.SECONDS: "a whole number of seconds"}
_TEXTS: dict[Kind, Callable[[str, str], object]] = {
    Kind.SWITCH: parse.parse_bool,
    Kind.PART: parse.parse_part,
    Kind.LOG: parse.parse_log_filter,
    Kind.TEXT: parse.parse_text,
    Kind.PATH: parse.parse_path,
    Kind.SOCKET: parse.parse_socket_path,
    Kind.USERS: parse.parse_user_ids,
    Kind.LISTEN: parse.parse_listen_address,
    Kind.ENDPOINT: parse.parse_endpoint,
    Kind.STORE: parse.parse_store,
    Kind.SECRET: parse.parse_secret,
    Kind.NAME: parse.parse_name,
    Kind.ADDRESS: parse.parse_address,
    Kind.ADDRESSES: parse.parse_addresses,
    Kind.URLS: parse.parse_urls,
}


def _drop_outranked_counts(found: dict[str, _Found], warnings: list[str]) -> None:
    """A block count wins over a size, but not over a size from a source of higher precedence."""
    for size, count in (("host_bytes", "host_blocks"), ("disk_bytes", "disk_blocks")):
        if size in found and count in found and found[count].rank < found[size].rank:
            if found[count].value:
                warnings.append(f"{found[count].label} is overruled by {found[size].label}")
            del found[count]


def _drop_outranked_admission(found: dict[str, _Found], warnings: list[str]) -> None:
    """The name of an admission policy wins over the switch of the original, unless the switch has a higher precedence.

    There is no warning if both ask for the same.
    """
    name, switch = found.get("disk_admission"), found.get("disk_offload_filter")
    if name is None or switch is None:
        return
    winner, loser = (switch, name) if switch.rank > name.rank else (name, switch)
    if name.value != ("filter" if switch.value else "all"):
        warnings.append(f"{loser.label} is overruled by {winner.label}")
    if winner is switch:
        del found["disk_admission"]


def _assemble(found: Mapping[str, _Found], environ: Mapping[str, str]) -> Settings:
    values: dict[str, Any] = {name: item.value for name, item in found.items()}
    for field in ("host_bytes", "host_blocks", "disk_bytes", "disk_blocks"):
        values[field] = values.get(field) or None
    values.setdefault("runtime_dir", runtime_dir_under(environ.get("XDG_RUNTIME_DIR", "")))
    return Settings(**values)


def _with_some_tier(
    settings: Settings, found: Mapping[str, _Found], memory_bytes: int | None
) -> tuple[Settings, list[str]]:
    """The settings with a host tier of default size when no tier was set; an error when all were set to 0."""
    if settings.host_on or settings.disk_on:
        return settings, []
    if "host_bytes" in found:
        raise SettingsError(found["host_bytes"].label, 0, "a size above 0, as there is no disk tier either")
    size_bytes = default_host_bytes(memory_bytes)
    notice = (
        f"no cache tier is set: using {format_bytes(size_bytes)} of host memory"
        " (set DYN_KVBM_CPU_CACHE_GB or DYN_KVBM_DISK_CACHE_GB to choose)"
    )
    return msgspec.structs.replace(settings, host_bytes=size_bytes), [notice]


def _remark_on_names(environ: Mapping[str, str], warnings: list[str], faults: list[SettingsError]) -> None:
    """Warnings about variables without effect, and about unknown names."""
    known = {setting.variable for setting in SCHEMA} | {FILE_VARIABLE, *OTHER_VARIABLES}
    for name in sorted(environ):
        if name in known or not environ[name].strip():
            continue
        row = _ineffective(name)
        if row is not None:
            try:
                asked = not row.switch or parse.parse_bool(name, environ[name])
            except SettingsError as error:
                faults.append(error)
                continue
            if asked:
                warnings.append(f"{name} has no effect: {row.reason}")
        elif line := describe_removed_setting(name):
            warnings.append(f"{name} {line}")
        elif name.startswith(PREFIX):
            warnings.append(f"{name} {_describe_unknown(name, known)}")


def _remarks_on_values(found: Mapping[str, _Found]) -> list[str]:
    """Warnings about settings that this build reads and does not act on, unless they switch something off."""
    defaults = Settings()
    return [
        f"{item.label} has no effect: {FIELDS[field].no_effect}"
        for field, item in found.items()
        if FIELDS[field].no_effect
        and (item.value is True or (item.value is not False and item.value != getattr(defaults, field)))
    ]


def _ineffective(name: str) -> Ineffective | None:
    for row in INEFFECTIVE:
        if row.variable == name or (row.variable.endswith("*") and name.startswith(row.variable[:-1])):
            return row
    return None


def _describe_unknown(name: str, known: Mapping[str, Setting] | set[str]) -> str:
    return f"is not a setting of kvbm and is ignored{_nearest(name, known)}"


def _nearest(name: str, known: Mapping[str, Setting] | set[str]) -> str:
    # With the common prefix, every two names would be similar.
    bare = {candidate.removeprefix(PREFIX): candidate for candidate in sorted(known)}
    near = difflib.get_close_matches(name.removeprefix(PREFIX).upper() if name.isupper() else name, bare, n=1)
    return f"; did you mean {bare[near[0]]}?" if near else ""
