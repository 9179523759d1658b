"""The command line as a user meets it: help, errors of one line, exit codes."""

from __future__ import annotations

import importlib.machinery
import json
import re
import subprocess
import sys
import types

import msgspec
import pytest
import typer

from kvbm.cli import main as entry
from kvbm.cli import removed
from kvbm.errors import KvbmError
from kvbm.settings import FIELDS, SCHEMA, Settings
from rigs.checkout import ROOT
from rigs.command_tree import commands


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("DYN_LOG", "DYN_KVBM_CONFIG", *(setting.variable for setting in SCHEMA)):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def kvbm(capfd):
    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            entry.main(words)
        out, err = capfd.readouterr()
        return caught.value.code or 0, out, err

    return call


@pytest.fixture
def command(monkeypatch):
    """A command `probe` of our own, as another file of the package would bring it."""

    def add(module: types.ModuleType) -> None:
        monkeypatch.setitem(entry.COMMANDS, "probe", "Look at something.")
        monkeypatch.setitem(sys.modules, "kvbm.cli.probe", module)

    return add


def probe_module(app: typer.Typer) -> types.ModuleType:
    module = types.ModuleType("kvbm.cli.probe")
    module.__spec__ = importlib.machinery.ModuleSpec("kvbm.cli.probe", None)
    module.app = app
    return module


def test_help_lists_the_commands(kvbm):
    for words in (("--help",), ("-h",)):
        code, out, err = kvbm(*words)
        assert (code, err) == (0, "")
        for name in ("manager", "config"):
            assert f"\n  {name}" in out
            assert entry.COMMANDS[name] in out
        assert "kvbm manager --host-memory 20GB" in out


def test_no_word_at_all_is_help(kvbm):
    code, out, err = kvbm()
    assert code in (0, 2)
    assert "Usage: kvbm" in out + err


def test_help_imports_no_command():
    code = (
        "import sys\nfrom kvbm.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "names = [n for n in sys.modules if n.startswith(('kvbm.cli.', 'kvbm.manager', 'torch', 'vllm', 'rich'))]\n"
        "print(names, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "['kvbm.cli.main']"


@pytest.mark.parametrize("name", entry.COMMANDS)
def test_every_command_has_an_example_and_a_plain_usage(kvbm, name):
    code, text, err = kvbm(name, "--help")
    assert (code, err) == (0, "")
    _, _, below = text.partition("\nCommands:\n")
    texts = [kvbm(name, line.split()[0], "--help")[1] for line in below.splitlines() if line] or [text]
    for text in texts:
        assert re.search(rf"^ *(Example: |DYN_\S+ )?kvbm {name} ", text, flags=re.MULTILINE), text
        assert "[[" not in text, "the parser puts brackets around what may be left out"


def test_version(kvbm):
    code, out, _ = kvbm("--version")
    assert code == 0
    assert out.startswith("kvbm ")


def test_a_wrong_command_is_a_usage_error(kvbm):
    code, out, err = kvbm("mnager")
    assert (code, out) == (2, "")
    assert "No such command 'mnager'" in err


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (("rewind", "--far", "4GB"), "kvbm rewind"),
        (("rewind", "--help"), "kvbm rewind"),
        (("disk", "wipe", "/x"), "kvbm disk wipe"),
        (("manager", "--tape=1TB"), "kvbm manager --tape"),
        (("manager", "--tape", "1TB"), "kvbm manager --tape"),
        (("disk", "ls", "/x", "--no-color"), "kvbm disk ls --no-color"),
    ],
)
def test_a_removed_command_or_option_names_the_substitute(kvbm, monkeypatch, words, call):
    unknown = kvbm(*words)
    assert unknown[0] == 2
    assert "No such " in unknown[2]
    monkeypatch.setitem(removed.REMOVED, call, "restart the manager")
    assert kvbm(*words) == (2, "", f"kvbm: {call} was removed: restart the manager\n")


def test_what_is_removed_is_not_there():
    calls = {f"kvbm {call}" for call in commands()}
    calls |= {f"kvbm {call} {flag}" for call, flags in commands().items() for flag in flags}
    assert not removed.REMOVED.keys() & calls


def test_an_operating_error_is_one_line_and_exit_code_two(kvbm, command):
    app = typer.Typer()

    @app.command()
    def probe() -> None:
        raise KvbmError("first\nsecond")

    command(probe_module(app))
    assert kvbm("probe") == (2, "", "kvbm: first second\n")


def test_a_programmers_error_is_not_hidden(command):
    app = typer.Typer()

    @app.command()
    def probe() -> None:
        raise AssertionError("bug")

    command(probe_module(app))
    with pytest.raises(AssertionError, match="bug"):
        entry.main(["probe"])


def test_a_group_keeps_its_sub_commands(kvbm, command):
    app = typer.Typer()

    @app.command()
    def look(path: str) -> None:
        typer.echo(f"looking at {path}")

    @app.command()
    def clear() -> None:
        typer.echo("cleared")

    command(probe_module(app))
    assert kvbm("probe", "look", "/x")[:2] == (0, "looking at /x\n")
    assert kvbm("probe", "clear")[:2] == (0, "cleared\n")
    assert "Look at something." in kvbm("--help")[1]


def test_config_show_names_every_origin(kvbm, monkeypatch, tmp_path):
    file = tmp_path / "kvbm.toml"
    file.write_text("metrics_port = 7001\n")
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "1.5")
    monkeypatch.setenv("DYN_KVBM_CPU_CASH_GB", "1")
    code, out, err = kvbm("config", "show", "--config", str(file))
    assert code == 0
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines()}
    assert list(rows) == list(FIELDS)
    assert rows["host_bytes"].split("  ")[0] == "1.5 GB"
    assert rows["host_bytes"].endswith("environment DYN_KVBM_CPU_CACHE_GB")
    assert rows["metrics_port"].endswith(f"file {file}")
    assert rows["disk_bytes"].startswith("-")
    assert rows["disk_bytes"].endswith("default")
    assert "warning: DYN_KVBM_CPU_CASH_GB is not a setting" in err


def test_config_show_json(kvbm, monkeypatch):
    monkeypatch.setenv("DYN_KVBM_METRICS", "on")
    code, out, err = kvbm("config", "show", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["settings"]["metrics"] == {
        "value": True,
        "origin": "environment DYN_KVBM_METRICS",
        "variable": "DYN_KVBM_METRICS",
    }
    assert set(document["settings"]) == set(FIELDS)
    assert document["notices"]


def test_config_show_with_a_bad_value(kvbm, monkeypatch):
    monkeypatch.setenv("DYN_KVBM_METRICS", "maybe")
    code, out, err = kvbm("config", "show")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("kvbm: DYN_KVBM_METRICS='maybe' cannot be used")


def test_config_show_with_the_configuration_of_an_engine(kvbm, monkeypatch):
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "1.5")
    code, out, _ = kvbm("config", "show", "--extra-config", '{"host_bytes": "20GB"}')
    assert code == 0
    assert out.splitlines()[0].split("  ")[0] == "host_bytes"
    assert out.splitlines()[0].endswith("kv_connector_extra_config")
    for text in ("{", "3", '{"host_byte": 1}'):
        code, out, err = kvbm("config", "show", "--extra-config", text)
        assert (code, out, err.count("\n")) == (2, "", 1)


def one_of(setting):
    """A value of this setting that is not its default, as text."""
    by_kind = {
        "size": "7GB",
        "path": "/p",
        "socket path": "/s",
        "user ids": "7",
        "ZMQ endpoint": "tcp://*:37",
        "log filter": "debug",
        "URL of a store": "file:///p",
        "name": "node-7",
        "address, host:port": "h:37",
        "addresses, host:port": "h:37",
        "URLs": "http://h:37",
        "number, 0 to 1": "0.25",
        "text": "lru",
    }
    if setting.choices:
        return next(
            choice for choice in setting.choices if choice not in (getattr(Settings(), setting.field), "info")
        )
    if setting.kind.value == "switch":
        return "false" if getattr(Settings(), setting.field) else "true"
    return by_kind.get(setting.kind.value, "37")


@pytest.mark.parametrize("source", ["environment", "file", "engine"])
def test_config_show_shows_every_setting_from_every_source(kvbm, monkeypatch, tmp_path, source):
    values = {setting.field: one_of(setting) for setting in SCHEMA}
    words, origins = [], {}
    if source == "environment":
        for setting in SCHEMA:
            opposite = {"true": "false", "false": "true"}
            value = values[setting.field]
            value = opposite[value] if setting.inverted else value
            monkeypatch.setenv(
                setting.variable, value.removesuffix("GB") if setting.variable.endswith("_GB") else value
            )
            origins[setting.field] = f"environment {setting.variable}"
    elif source == "file":
        (tmp_path / "kvbm.toml").write_text(
            "".join(f"{field} = {value!r}\n" for field, value in values.items())
        )
        monkeypatch.chdir(tmp_path)
        origins = dict.fromkeys(FIELDS, f"file {tmp_path / 'kvbm.toml'}")
    else:
        words = ["--extra-config", json.dumps(values)]
        origins = dict.fromkeys(FIELDS, "kv_connector_extra_config")
    code, out, _ = kvbm("config", "show", "--json", *words)
    shown = json.loads(out)["settings"]
    assert code == 0
    differs = {field for field in FIELDS if shown[field]["origin"] != origins[field]}
    assert differs == set()
    default = msgspec.to_builtins(Settings())
    assert {field for field in FIELDS if shown[field]["value"] == default[field]} == set()


def test_config_check(kvbm, monkeypatch, tmp_path):
    monkeypatch.setenv("DYN_KVBM_METRICS", "maybe")  # the file alone is looked at
    file = tmp_path / "kvbm.toml"
    file.write_text('host_bytes = "4GB"\ndisk_dir = "/x"\n')
    code, out, err = kvbm("config", "check", str(file))
    assert (code, out) == (0, f"{file} can be used\n")
    assert err == "note: no effect without a disk tier (DYN_KVBM_DISK_CACHE_GB): DYN_KVBM_DISK_CACHE_DIR\n"
    file.write_text('host_bytes = "4G"\nmetrics_port = 0\nmetric = true\n')
    code, out, err = kvbm("config", "check", str(file))
    assert (code, out) == (2, "")
    assert [line.split()[2].split("=")[0] for line in err.splitlines()] == [
        "host_bytes",
        "metrics_port",
        "metric",
    ]
    code, out, err = kvbm("config", "check", str(file), "--json")
    assert (code, err, len(json.loads(out)["faults"])) == (2, "", 3)
    code, out, err = kvbm("config", "check", str(tmp_path / "none.toml"))
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_the_installed_command_is_this_one():
    text = (ROOT / "pyproject.toml").read_text()
    assert 'kvbm = "openkvbm.entry:main"' in text, "which asks whose files these are, and runs kvbm.cli.main"
