"""Five sources, one precedence; the settings file, and all that is wrong with one."""

from __future__ import annotations

import pytest

from kvbm.errors import SettingsError
from kvbm.settings import FIELDS, GB, SCHEMA, Kind, file_faults, load_settings

HOST = {"DYN_KVBM_CPU_CACHE_GB": "4"}

WORDS = {
    Kind.SIZE: ("5GB", "3", "7GB", "9GB"),
    Kind.SWITCH: ("false", "true", "false", "true"),
    Kind.PART: ("0.1", "1", "0", ".25"),
    Kind.TEXT: ("b", "a", "c", "d"),
    Kind.PATH: ("/b", "/a", "/c", "/d"),
    Kind.SOCKET: ("/b", "/a", "/c", "/d"),
    Kind.LOG: ("warn", "error", "debug", "trace"),
    Kind.USERS: ("2,3", "1", "4", "5"),
    Kind.ENDPOINT: ("tcp://*:2", "tcp://127.0.0.1:1", "tcp://[::1]:3", "ipc:///a"),
    Kind.ADDRESS: ("b:2", "a:1", "[::1]:3", "d:4"),
    Kind.ADDRESSES: ("b:2,c:2", "a:1", "[::1]:3", "d:4"),
    Kind.URLS: ("http://b:2", "http://a:1", "https://c:3", "http://d:4,http://e:5"),
    Kind.STORE: ("file:///b", "file:///a", "redis://c", "s3://ddd/d"),
    Kind.LISTEN: ("127.0.0.1:2", "127.0.0.1:1", "localhost:3", "unix:/a"),
}
"""A value for the file, the environment, an engine's configuration and the command line."""


@pytest.mark.parametrize("setting", SCHEMA, ids=lambda setting: setting.field)
def test_each_field_has_five_sources_and_one_precedence(setting, tmp_path):
    """A setting that is added to the schema is set here, from every source that it can come from."""
    choices = setting.choices and [setting.choices[i % len(setting.choices)] for i in range(4)]
    in_file, in_environment, in_engine, on_line = choices or WORDS.get(setting.kind, ("31", "32", "33", "34"))
    base = dict(HOST) if not setting.field.startswith("host") else {"DYN_KVBM_DISK_CACHE_GB": "1"}
    file = tmp_path / "settings.toml"
    file.write_text(f'{setting.field} = "{in_file}"\n')
    in_gb = setting.kind is Kind.SIZE and not setting.variable.endswith("_GB")
    environ = {**base, setting.variable: f"{in_environment}GB" if in_gb else in_environment}
    steps = [
        (load_settings(base), "default", None),
        (load_settings(base, file=file), f"file {file}", in_file),
        (load_settings(environ, file=file), f"environment {setting.variable}", in_environment),
        (
            load_settings(environ, file=file, extra_config={setting.field: in_engine}),
            "kv_connector_extra_config",
            in_engine,
        ),
        (
            load_settings(
                environ, {setting.field: on_line}, file=file, extra_config={setting.field: in_engine}
            ),
            "command line",
            on_line,
        ),
    ]
    for loaded, origin, text in steps:
        assert loaded.origins[setting.field] == origin
        assert set(loaded.origins) == set(FIELDS)
        if text is not None:
            inverted = setting.inverted and origin.startswith("environment")
            assert getattr(loaded.settings, setting.field) == value_of(setting, text, inverted)


def value_of(setting, text, inverted):
    """What a text of `WORDS` means, worked out here in another way."""
    if setting.kind is Kind.SIZE:
        return int(text.removesuffix("GB")) * GB
    if setting.kind is Kind.SWITCH:
        return (text == "true") != inverted
    if setting.kind is Kind.PART:
        return float(text)
    if setting.kind is Kind.USERS:
        return tuple(map(int, text.split(",")))
    return int(text) if setting.kind in (Kind.COUNT, Kind.PORT, Kind.SECONDS) else text


def test_a_file_in_the_working_directory_is_read_when_none_is_named(tmp_path):
    file, named = tmp_path / "kvbm.toml", tmp_path / "named.toml"
    file.write_text("metrics_port = 7001\n")
    named.write_text("metrics_port = 7002\n")
    for environ, options, port, origin in (
        (HOST, {}, 7001, f"file {file}"),
        ({**HOST, "DYN_KVBM_CONFIG": str(named)}, {}, 7002, f"file {named}"),
        (HOST, {"file": named}, 7002, f"file {named}"),
    ):
        loaded = load_settings(environ, directory=tmp_path, **options)
        assert (loaded.settings.metrics_port, loaded.origins["metrics_port"]) == (port, origin)
        assert loaded.warnings == []
    file.unlink()
    assert load_settings(HOST, directory=tmp_path).origins["metrics_port"] == "default"


def test_a_file_that_others_could_have_written_is_not_read_unless_it_is_named(tmp_path):
    file = tmp_path / "kvbm.toml"
    file.write_text("metrics_port = 7001\n")
    file.chmod(0o666)
    loaded = load_settings(HOST, directory=tmp_path)
    assert loaded.origins["metrics_port"] == "default"
    (line,) = loaded.warnings
    assert line.startswith(f"{file} is ignored: user ")
    assert "mode 666" in line
    assert "DYN_KVBM_CONFIG" in line
    assert load_settings(HOST, directory=tmp_path, file=file).settings.metrics_port == 7001
    file.chmod(0o644)
    file.unlink()
    file.mkdir()
    assert "ignored" in load_settings(HOST, directory=tmp_path).warnings[0]


def test_the_configuration_of_an_engine_must_be_a_table():
    for found in ("host_bytes=4GB", ["host_bytes"], 3):
        with pytest.raises(SettingsError, match=r"^kv_connector_extra_config\.kvbm="):
            load_settings({}, extra_config=found)


def test_all_faults_of_a_file_are_found(tmp_path):
    file = tmp_path / "kvbm.toml"
    file.write_text('host_bytes = "4G"\nmetrics_port = 0\nmetric = true\ndisk_dir = ["/a"]\n[disk]\nx = 1\n')
    lines = file_faults(file)
    assert [line.removeprefix(f"{file}: ").split("=")[0].split()[0] for line in lines] == [
        "host_bytes",
        "metrics_port",
        "disk_dir",
        "metric",
        "disk",
    ]
    assert not any("\n" in line for line in lines)
    file.write_text("host_bytes = 0\n")
    (line,) = file_faults(file)
    assert "a size above 0, as there is no disk tier either" in line
    file.write_text("host_bytes = [\n")
    (line,) = file_faults(file)
    assert "TOML" in line
    file.write_text('host_bytes = "4GB"\n')
    assert file_faults(file) == []
    assert "readable" in file_faults(tmp_path / "none.toml")[0]
