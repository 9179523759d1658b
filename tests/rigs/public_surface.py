"""What users, engines, routers, dashboards and other nodes rely on, one line each, as the code has it.

`PYTHONPATH=tests python -m rigs.public_surface > tests/unit/public_surface.txt` writes the snapshot, as does
`make reference`; `tests/unit/test_public_surface.py` compares. A line begins with its kind: a diff needs no context.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
from collections.abc import Iterator
from pathlib import PurePath

import msgspec

import kvbm
from kvbm import elsewhere
from kvbm.block import Tier
from kvbm.cli import removed
from kvbm.cli.web.operations import OPERATIONS
from kvbm.dialects import vllm as vllm_hints
from kvbm.events import tier_form, wire
from kvbm.hints import Hint, Retain
from kvbm.observe.metric_table import TABLE
from kvbm.policy import registry
from kvbm.protocol import PROTOCOL_VERSION, RemovedBlocks, StoredRun, TierEvents
from kvbm.settings import SCHEMA
from kvbm.settings.ineffective import INEFFECTIVE, OTHER_VARIABLES, REMOVED
from kvbm.settings.reference import describe_default, describe_type
from kvbm.settings.schema import FILE_VARIABLE
from kvbm.sim.traces.formats import recording
from kvbm.tiers.disk import directory, journal
from kvbm.tiers.peers.wire import WIRE_VERSION
from kvbm.tiers.remote import packs, records
from rigs.checkout import PROJECT, ROOT
from rigs.command_tree import parsers
from rigs.sources import SOURCES, module_name, parse

SNAPSHOT = ROOT / "tests" / "unit" / "public_surface.txt"
REWRITE = "make reference"

_MODULES = {module_name(path): parse(source) for path, source in SOURCES.items()}

PUBLIC_MODULES = (
    "kvbm",
    "kvbm.dialects",
    "kvbm.library",
    "kvbm.policy",
    "kvbm.policy.contract",
    "kvbm.tiers.contract",
    "kvbm.transfer",
    "kvbm.transfer.copier",
    "kvbm.trtllm_integration.connector",
    "kvbm.vllm_integration",
    "kvbm.vllm_integration.connector",
    *sorted(name for name in _MODULES if name.startswith("kvbm.testing.")),
)
"""Modules that others import: public are the names of `__all__`, or else the classes."""

PUBLIC_NAMES = (
    "kvbm.hashing.EngineKeys",
    "kvbm.leader.Leader",
    "kvbm.sglang_integration.linker.KvbmLinker",
    "kvbm.sglang_integration.storage.KvbmStorage",
    "kvbm.testing.tiny_model.make_model",
    "kvbm.trtllm_integration.consolidator_config.get_consolidator_endpoints",
    "kvbm.trtllm_integration.consolidator_config.get_consolidator_mode",
    "kvbm.trtllm_integration.consolidator_config.is_truthy",
    "kvbm.trtllm_integration.consolidator_config.should_enable_consolidator",
    "kvbm.utils.annotate",
    "kvbm.utils.get_consolidator_mode",
    "kvbm.utils.is_dyn_runtime_enabled",
    "kvbm.utils.is_truthy",
    "kvbm.utils.nvtx_annotate",
    "kvbm.vllm_integration.connector.dynamo_connector.DynamoConnector",
    "kvbm.vllm_integration.connector.dynamo_connector.DynamoConnectorMetadata",
    "kvbm.vllm_integration.connector.pd_connector.PdConnector",
    "kvbm.vllm_integration.connector.pd_connector.PdConnectorMetadata",
    "kvbm.vllm_integration.consolidator_config.get_consolidator_endpoints",
    "kvbm.vllm_integration.consolidator_config.get_consolidator_mode",
    "kvbm.vllm_integration.consolidator_config.is_truthy",
    "kvbm.vllm_integration.consolidator_config.should_enable_consolidator",
    "kvbm.vllm_integration.dynamo_connector",
    "kvbm.vllm_integration.hints.Middleware",
    "kvbm.vllm_integration.pd_connector",
    "kvbm.weights.changed_since",
    "kvbm.weights.weights_digest",
    "kvbm.worker.Worker",
)
"""Public names of other modules."""


def list_entry_points() -> Iterator[str]:
    """What an installation brings, and the groups whose entry points of other packages are loaded."""
    for name, target in PROJECT["scripts"].items():
        yield f"script {name} = {target}"
    for group, entries in PROJECT["entry-points"].items():
        yield from (f"entry-point {group}: {name} = {target}" for name, target in entries.items())
    yield from (f"extra {PROJECT['name']}[{name}]" for name in PROJECT["optional-dependencies"])
    for policies in (registry.EVICTION, registry.ADMISSION):
        yield f"loaded-group {policies.entry_point_group}"
        yield from (f"policy {policies.kind} {name}" for name in policies.built_in)


def list_imports() -> Iterator[str]:
    """The import paths, and those of the original that are refused with a line."""
    for path in PUBLIC_MODULES:
        if path in _MODULES:
            yield f"import {path}"
            yield from (f"import {path}.{name}" for name in public_names_of(_MODULES[path]))
    for path in PUBLIC_NAMES:
        module, _, name = path.rpartition(".")
        nodes = ast.walk(_MODULES[module]) if module in _MODULES else ()
        # A definition, an import, an alias of a type, or the text that a module's `__getattr__` knows.
        if any(name in (getattr(node, key, None) for key in ("name", "id", "value")) for node in nodes):
            yield f"import {path}"
    yield from (f"import-refused {path}" for path in elsewhere.WAYS)


def public_names_of(module: ast.Module) -> list[str]:
    """The names of `__all__`; without it the public classes."""
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    classes = (node.name for node in module.body if isinstance(node, ast.ClassDef))
    return [name for name in classes if not name.startswith("_")]


def list_library() -> Iterator[str]:
    """The methods of the library's classes, each with its parameters."""
    for owner in (kvbm.BlockManager, kvbm.Hit):
        for name, member in vars(owner).items():
            if name == "__init__" or not name.startswith("_"):
                yield f"library kvbm.{owner.__name__}.{name}"
                function = inspect.unwrap(getattr(member, "__func__", member))
                parameters = inspect.signature(function).parameters if callable(function) else {}
                for parameter in parameters:
                    if parameter not in ("self", "cls"):
                        yield f"library kvbm.{owner.__name__}.{name} {parameter}"


def list_commands() -> Iterator[str]:
    """Every command, its arguments and options, and the calls that end with the name of a substitute."""
    for call, parser in parsers().items():
        yield f"command kvbm {call}"
        for parameter in parser.params:
            flags = "/".join((*parameter.opts, *parameter.secondary_opts))
            name = flags if parameter.param_type_name == "option" else flags.upper()
            takes = "" if getattr(parameter, "is_flag", True) else " VALUE"
            shown = takes and isinstance(parameter.default, str | int | float | PurePath)
            default = f", default {parameter.default}" if shown and str(parameter.default) else ""
            required = ", required" if parameter.required else ""
            yield f"command kvbm {call} {name}{takes}{required}{default}"
    yield from (f"command-removed {call}" for call in removed.REMOVED)


def list_http_api() -> Iterator[str]:
    """The operations of the admin API."""
    for operation in OPERATIONS:
        fields = ", ".join(operation.given.__struct_fields__)
        yield f"http {operation.method} {operation.path} ({fields})"


def list_settings() -> Iterator[str]:
    """The variables with key, type and default, and the names that set nothing."""
    yield f"setting {FILE_VARIABLE}: the settings file"
    for row in SCHEMA:
        inert = ", no effect" if row.no_effect else ""
        names = f"{row.variable} {row.field}"
        yield f"setting {names}: {describe_type(row)}, default {describe_default(row)}{inert}"
    yield from (f"setting-without-effect {row.variable}" for row in INEFFECTIVE)
    yield from (f"setting-without-effect {variable}" for variable in OTHER_VARIABLES)
    yield from (f"setting-removed {row.variable} {row.field}" for row in REMOVED)


def list_metrics() -> Iterator[str]:
    """The series with type and labels."""
    for row in TABLE:
        labels = [f"{each.name}={'|'.join(each.values)}{'|…' if each.open else ''}" for each in row.labels]
        yield " ".join(("metric", row.name, row.kind.value, *labels))


def list_formats() -> Iterator[str]:
    """What routers, other nodes, later versions and clients read: events, bytes that outlive a process, and hints."""
    run = StoredRun(tier=Tier.HOST, hashes=bytes(32), before=bytes(32), tokens=bytes(64))
    for event in tier_form.tier_fields(
        TierEvents(stored=(run,), removed=(RemovedBlocks(Tier.HOST, bytes(32)),))
    ):
        yield f"event of a manager, {event['type']}: {', '.join(event)}"
    full = wire.Stored(1, 2, (3,), Tier.HOST, "adapter")
    merged = (wire.stored_fields(full, "CPU"), wire.removed_fields(1, "CPU", 1), wire.cleared_fields())
    for event in merged:
        yield f"event of the consolidator, {event['type']}: {', '.join(event)}"
    yield f"event payload: {msgspec.msgpack.decode(wire.encode(0.5, [{'type': 'X'}], 7))}"
    yield from (f"event medium of {Tier(tier).name}: {name}" for tier, name in tier_form.MEDIUMS.items())
    yield f"format disk directory: {directory.DIRECTORY_PREFIX}*, version {directory.FORMAT_VERSION}"
    yield f"format disk meta.json: {', '.join(directory.DirectoryMeta.__struct_fields__)}"
    yield _describe_bytes("disk journal record", journal.MAGIC, journal.VERSION, journal._RECORD.format)
    yield _describe_bytes("remote record", records._MAGIC, records._VERSION, records._HEADER.format)
    yield _describe_bytes("remote pack trailer", packs._MAGIC, packs._VERSION, packs._TRAILER.format)
    yield f"format remote pack name: {packs.pack_name(bytes(32), [])}"
    yield f"format engine to manager: version {PROTOCOL_VERSION}"
    yield f"format node to node: version {WIRE_VERSION}"
    for form in (recording.RecordingHeader, recording.RecordingLine):
        yield f"format trace {recording.VERSION}, {form.__name__}: {', '.join(form.__struct_fields__)}"
    yield f"hint action version {vllm_hints.OWN_ACTION_VERSION}"
    for form in (Hint, Retain):
        yield f"hint {form.__name__}: {', '.join(form.__struct_fields__)}"


def _describe_bytes(name: str, magic: bytes, version: int, layout: str) -> str:
    return f"format {name}: {magic.decode()}, version {version}, struct {layout}"


SECTIONS = (
    list_entry_points,
    list_imports,
    list_library,
    list_commands,
    list_http_api,
    list_settings,
    list_metrics,
    list_formats,
)


def describe() -> str:
    """The snapshot: a section for each kind of name, its lines sorted."""
    head = f"The public surface. Written by `{REWRITE}`; CHANGELOG.md says what a change of it means for users.\n"
    return head + "".join("\n" + "\n".join(sorted(section())) + "\n" for section in SECTIONS)


def list_differences(written: str, built: str) -> list[str]:
    """The lines that only one of two snapshots has: `-` in front of what is gone, `+` of what is new."""
    diff = difflib.unified_diff(written.splitlines(), built.splitlines(), n=0, lineterm="")
    return [line for line in diff if not line.startswith(("---", "+++", "@@"))]


if __name__ == "__main__":
    sys.stdout.write(describe())
