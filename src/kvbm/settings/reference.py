"""Writes the settings page of the docs from the schema.

`python -m kvbm.settings.reference > docs/reference/settings.md` writes it; a test checks that it is current.
"""

from __future__ import annotations

import sys

from kvbm.present.numbers import format_bytes
from kvbm.settings.ineffective import INEFFECTIVE, REMOVED
from kvbm.settings.parse import FALSE_WORDS, TRUE_WORDS
from kvbm.settings.schema import SCHEMA, Settings
from kvbm.settings.setting import COUNT_MAX, Kind, Setting

_HEAD = f"""\
# Settings

<!-- Generated from the schema by `python -m kvbm.settings.reference`; do not edit by hand. -->

Each setting has a variable and a key of the settings file; those that `kvbm manager` acts on have a flag too.
The command line wins over an engine's configuration, that over the environment, the environment over the file, and the
file over the default. `kvbm config show` prints every value with its origin.

- **Sizes**: the `…_GB` variables are a number of GB (1 GB is 1,000,000,000 bytes), such as `4` or `0.5`. All
  others, flags and the file take a unit: `4GB`, `512MB`, `1.5GiB`, or plain bytes, `4096`. 0 switches a tier off.
- **Switches**: `{" ".join(TRUE_WORDS)}` or `{" ".join(FALSE_WORDS)}`, in any case, blanks around them ignored.
- An empty variable counts as unset. A value that cannot be used ends the start with one line, which names the
  variable, the value and what is accepted. A `DYN_KVBM_…` name that is not listed here draws a warning.
- With no tier set at all, the host tier takes 4 GB, or a quarter of the available memory if that is less.
- A number of blocks wins over a size, unless the size comes from a source of higher precedence.

The settings file is TOML, named by `DYN_KVBM_CONFIG` or `--config`. When none is named, a `kvbm.toml` in the working
directory is read, if it is your own or root's and nobody else can write to it. `kvbm config check FILE` names every
fault of a file:

```toml
host_bytes = "4GB"
disk_bytes = "100GB"
disk_dir = "/mnt/nvme/kvbm"
metrics = true
```

An engine's configuration has the same keys, under `kvbm` in `kv_connector_extra_config`:

```
--kv-transfer-config '{{"kv_connector": "DynamoConnector", "kv_role": "kv_both",
  "kv_connector_module_path": "kvbm.vllm_integration.connector",
  "kv_connector_extra_config": {{"kvbm": {{"host_bytes": "20GB"}}}}}}'
```

"""

_EFFECTIVE = """\
## Variables

| Variable | Flag | Key | Type | Default | Meaning |
| --- | --- | --- | --- | --- | --- |
"""

_INEFFECTIVE = """
## Accepted without effect

Variables of NVIDIA Dynamo's KVBM that set nothing here. They are accepted, with a line in the log.

| Variable | Why |
| --- | --- |
"""

_REMOVED = """
## Removed

Settings of earlier versions. They are accepted and ignored, with a line in the log.

| Variable | Key | Instead |
| --- | --- | --- |
"""


def page() -> str:
    """The whole page."""
    rows = "".join(_row(setting) for setting in SCHEMA if not setting.no_effect)
    inert = [(setting.variable, setting.no_effect) for setting in SCHEMA if setting.no_effect]
    inert += [(row.variable, row.reason) for row in INEFFECTIVE]
    removed = "".join(f"| `{row.variable}` | `{row.field}` | {row.instead} |\n" for row in REMOVED)
    return (
        _HEAD
        + _EFFECTIVE
        + rows
        + _INEFFECTIVE
        + "".join(f"| `{name}` | {why} |\n" for name, why in inert)
        + (_REMOVED + removed if removed else "")
    )


def _row(setting: Setting) -> str:
    cells = (
        f"`{setting.variable}`" + (" (not in the original)" if setting.ours else ""),
        f"`{setting.flag}`" if setting.flag else "",
        f"`{setting.field}`",
        describe_type(setting),
        describe_default(setting),
        setting.meaning + ("; the variable says the opposite" if setting.inverted else ""),
    )
    return "| " + " | ".join(cells) + " |\n"


def describe_type(setting: Setting) -> str:
    """What a setting takes, in Markdown."""
    if setting.choices:
        return " ".join(f"`{choice}`" for choice in setting.choices)
    if setting.kind in (Kind.COUNT, Kind.PORT, Kind.SECONDS):
        upper = f"to {setting.maximum}" if setting.maximum < COUNT_MAX else "or more"
        return f"{setting.kind.value}, {setting.minimum} {upper}"
    return str(setting.kind.value)


def describe_default(setting: Setting) -> str:
    """The value of a setting that no source names, in Markdown."""
    if setting.default_text:
        return setting.default_text
    value: object = getattr(Settings(), setting.field)
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and setting.kind is Kind.SIZE:
        return format_bytes(value)
    return f"`{value}`"


if __name__ == "__main__":
    sys.stdout.write(page())
