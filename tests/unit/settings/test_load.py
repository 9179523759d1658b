"""Every variable of the original; one line for what cannot be used."""

from __future__ import annotations

import re

import msgspec
import pytest

from kvbm.errors import SettingsError
from kvbm.settings import FIELDS, GB, SCHEMA, Settings, admission_name, load_settings
from kvbm.settings.ineffective import INEFFECTIVE
from kvbm.settings.places import default_runtime_dir, runtime_dir_under

HOST = {"DYN_KVBM_CPU_CACHE_GB": "4"}

# Every variable that the original reads or documents, with a value that its users write.
ORIGINAL = {
    "DYN_KVBM_CPU_CACHE_GB": "20",
    "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "1000",
    "DYN_KVBM_DISK_CACHE_GB": "0.5",
    "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": "2000",
    "DYN_KVBM_DISK_CACHE_DIR": "/mnt/nvme",
    "DYN_KVBM_DISK_ALLOCATOR_TYPE": "open-direct",
    "DYN_KVBM_DISK_ZEROFILL_FALLBACK": "true",
    "DYN_KVBM_DISK_DISABLE_O_DIRECT": "true",
    "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "True",
    "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY": "35",
    "DYN_KVBM_MAX_CONCURRENT_TRANSFERS": "8",
    "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE": "32",
    "DYN_KVBM_DISABLE_WRITE_COMBINED": "true",
    "DYN_KVBM_ENABLE_NUMA": "1",
    "DYN_MEMORY_DISABLE_NUMA": "1",
    "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS": "3600",
    "DYN_KVBM_LEADER_ZMQ_HOST": "127.0.0.1",
    "DYN_KVBM_LEADER_ZMQ_PUB_PORT": "56011",
    "DYN_KVBM_LEADER_ZMQ_ACK_PORT": "56012",
    "DYN_KVBM_TRTLLM_ZMQ_PORT": "20081",
    "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR": "false",
    "DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE": "Passthrough",
    "DYN_KVBM_NCCL_MLA_MODE": "true",
    "DYN_KVBM_NCCL_MAX_CTAS": "4",
    "DYN_KVBM_METRICS": "true",
    "DYN_KVBM_METRICS_PORT": "6881",
    "DYN_KVBM_CACHE_STATS_MAX_REQUESTS": "50",
    "DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS": "0",
    "DYN_KVBM_ENABLE_RECORD": "1",
    "DYN_RUNTIME_ENABLED_KVBM": "1",
    "DYN_FATBIN_PATH": "/x.fatbin",
    "DYN_LOG": "debug",
    "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
    "DYN_KVBM_TRANSFER_BATCH_SIZE": "16",
    "DYN_KVBM_NIXL_BACKEND_GDS_MT": "true",
    "DYN_KVBM_OBJECT_ENABLED": "1",
    "DYN_KVBM_OBJECT_BUCKET": "b",
    "DYN_KVBM_OBJECT_ENDPOINT": "https://minio:9000",
    "DYN_KVBM_OBJECT_REGION": "eu-west-1",
    "DYN_KVBM_OBJECT_ACCESS_KEY": "user",
    "DYN_KVBM_OBJECT_SECRET_KEY": "secret",
    "DYN_KVBM_OBJECT_NUM_BLOCKS": "1000",
}


def refusal(environ: dict[str, str], **options: object) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(environ, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_the_schema_of_the_original():
    settings = load_settings(HOST).settings
    assert settings == Settings(host_bytes=4 * GB, runtime_dir=settings.runtime_dir)
    assert (settings.disk_dir, settings.metrics_host, settings.metrics_port) == ("/tmp/", "0.0.0.0", 6880)
    assert (settings.max_concurrent_transfers, settings.max_transfer_batch_size) == (4, 16)
    assert (settings.init_timeout_s, settings.stats_window_requests, settings.stats_log_interval_s) == (
        1800,
        1000,
        60,
    )
    assert settings.disk_offload_filter
    assert settings.disk_o_direct
    assert not settings.metrics
    assert settings.staging_bytes == 512_000_000
    assert settings.leader_pub_port == 56001


def test_every_variable_of_the_original_is_accepted():
    loaded = load_settings(ORIGINAL)
    settings = loaded.settings
    assert settings == Settings(
        host_bytes=20 * GB,
        host_blocks=1000,
        disk_bytes=500_000_000,
        disk_blocks=2000,
        disk_dir="/mnt/nvme",
        disk_allocator="open-direct",
        disk_zerofill_fallback=True,
        disk_o_direct=False,
        disk_offload_filter=False,
        offload_min_priority=35,
        max_concurrent_transfers=8,
        max_transfer_batch_size=32,
        init_timeout_s=3600,
        leader_pub_port=56011,
        trtllm_events_port=20081,
        consolidator=False,
        consolidator_mode="passthrough",
        dynamo_runtime=True,
        metrics=True,
        metrics_port=6881,
        stats_window_requests=50,
        stats_log_interval_s=0,
        numa=False,
        log_level="debug",
        object_enabled=True,
        object_bucket="b",
        object_endpoint="https://minio:9000",
        object_region="eu-west-1",
        object_access_key="user",
        object_secret_key="secret",
        remote_known_blocks=1000,
        runtime_dir=settings.runtime_dir,
    )
    inert = [setting for setting in SCHEMA if setting.no_effect]
    assert len(loaded.warnings) == len(INEFFECTIVE) + len(inert)
    assert all(" has no effect: " in line for line in loaded.warnings)


@pytest.mark.parametrize("name", ORIGINAL)
def test_each_variable_of_the_original_works_or_one_line_says_why_not(name):
    """Alone, so that none hides behind another: it is the origin of its setting, or there is a line that names it."""
    base = {} if name.startswith("DYN_KVBM_CPU") else HOST
    loaded = load_settings({**base, name: ORIGINAL[name]})
    settings = [field for field, origin in loaded.origins.items() if origin == f"environment {name}"]
    acting = [field for field in settings if not FIELDS[field].no_effect]
    about = [line for line in loaded.warnings if line.startswith(f"{name} has no effect: ")]
    assert loaded.warnings == about
    if name == "DYN_SDK_DISABLE_ANSI_LOGGING":  # it asks for what we always do
        assert about == settings == []
    elif name == "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR":  # off, as it is here
        assert (len(settings), about) == (1, [])
    else:
        assert len(acting) + len(about) == 1, (acting, about)
    for field in acting:
        assert getattr(loaded.settings, field) != getattr(load_settings(base).settings, field)


def test_empty_is_unset():
    loaded = load_settings(
        {**HOST, "DYN_KVBM_METRICS": "", "DYN_KVBM_METRICS_PORT": "  ", "DYN_KVBM_NCCL_MAX_CTAS": ""}
    )
    assert loaded.origins["metrics"] == loaded.origins["metrics_port"] == "default"
    assert loaded.warnings == []


def test_false_is_false_for_the_switches_of_the_original():
    loaded = load_settings(
        {**HOST, "DYN_KVBM_DISK_ZEROFILL_FALLBACK": "false", "DYN_KVBM_DISK_DISABLE_O_DIRECT": "0"}
    )
    assert not loaded.settings.disk_zerofill_fallback
    assert loaded.settings.disk_o_direct


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("DYN_KVBM_METRICS", "maybe", "1 true on yes"),
        ("DYN_KVBM_CPU_CACHE_GB", "nan", "GB"),
        ("DYN_KVBM_CPU_CACHE_GB", "-1", "GB"),
        ("DYN_KVBM_DISK_CACHE_GB", "inf", "GB"),
        ("DYN_KVBM_DISK_STAGING_GB", "0", "above 0"),
        ("DYN_KVBM_METRICS_PORT", "0", "from 1 to 65535"),
        ("DYN_KVBM_METRICS_PORT", "65536", "from 1 to 65535"),
        ("DYN_KVBM_LEADER_ZMQ_PUB_PORT", "65000", "from 1 to 64535"),
        ("DYN_KVBM_MAX_CONCURRENT_TRANSFERS", "0", "from 1"),
        ("DYN_KVBM_MAX_TRANSFER_BATCH_SIZE", "many", "whole number"),
        ("DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS", "0", "seconds"),
        ("DYN_KVBM_CACHE_STATS_MAX_REQUESTS", "0", "from 1"),
        ("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", "-5", "from 0"),
        ("DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY", "101", "from 0 to 100"),
        ("DYN_KVBM_DISK_ALLOCATOR_TYPE", "mmap", "default open-direct"),
        ("DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE", "all", "dedup passthrough"),
        ("DYN_KVBM_ENABLE_NUMA", "perhaps", "1 true on yes"),
        ("DYN_KVBM_MANAGER", "/" + "x" * 200, "107 bytes"),
    ],
)
def test_a_bad_variable_is_one_line(name, value, says):
    text = refusal({**HOST, name: value})
    assert text.startswith(f"{name}=")
    assert value[:20] in text
    assert says in text


def test_a_bad_flag_is_named_as_the_user_wrote_it():
    assert refusal({}, overrides={"host_bytes": "4G"}).startswith("--host-memory='4G' cannot be used")
    assert refusal({}, overrides={"stats_window_requests": "x"}).startswith("stats_window_requests='x'")
    said = refusal({}, extra_config={"host_bytes": "4G"})
    assert said.startswith("host_bytes='4G'")


def test_typed_overrides_follow_the_same_rules():
    loaded = load_settings({}, {"host_bytes": 4096, "metrics": True, "metrics_port": 7000, "disk_dir": None})
    assert (loaded.settings.host_bytes, loaded.settings.metrics, loaded.settings.metrics_port) == (
        4096,
        True,
        7000,
    )
    assert loaded.origins["disk_dir"] == "default"
    refusal({}, overrides={"metrics_port": True})
    refusal({}, overrides={"host_bytes": float("nan")})
    refusal({}, overrides={"host_bytes": [1]})


def test_an_unknown_override_is_one_line_with_the_nearest_name():
    said = refusal({}, extra_config={"host_byte": "1GB"})
    assert said == "host_byte='1GB' cannot be used: no setting has this name; did you mean host_bytes?"


def test_the_configuration_of_an_engine_is_an_origin_of_its_own():
    loaded = load_settings({}, extra_config={"host_bytes": "1GB"})
    assert loaded.origins["host_bytes"] == "kv_connector_extra_config"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("DYN_KVBM_CPU_CACHE_GBS", "DYN_KVBM_CPU_CACHE_GB"),
        ("DYN_KVBM_DISK_DIR", "DYN_KVBM_DISK_CACHE_DIR"),
        ("DYN_KVBM_METRIC_PORT", "DYN_KVBM_METRICS_PORT"),
    ],
)
def test_an_unknown_name_draws_a_warning_with_the_nearest(name, near):
    (line,) = load_settings({**HOST, name: "1"}).warnings
    assert line.startswith(f"{name} is not a setting")
    assert line.endswith(f"did you mean {near}?")


def test_an_unknown_name_near_nothing():
    (line,) = load_settings({**HOST, "DYN_KVBM_ZZZZZ": "1"}).warnings
    assert line == "DYN_KVBM_ZZZZZ is not a setting of kvbm and is ignored"


def test_other_peoples_variables_are_not_ours():
    environ = {"DYN_SYSTEM_PORT": "6880", "DYN_VLLM_KV_EVENT_PORT": "20081", "PATH": "/bin", "KVBM_X": "1"}
    assert load_settings({**HOST, **environ}).warnings == []


def test_a_switch_without_effect_that_is_off_is_no_news():
    assert (
        load_settings({**HOST, "DYN_RUNTIME_ENABLED_KVBM": "false", "DYN_KVBM_ENABLE_NUMA": "0"}).warnings
        == []
    )


def test_a_foreign_log_filter_stops_nobody():
    loaded = load_settings({**HOST, "DYN_LOG": "loud"})
    assert loaded.settings.log_level == "info"
    assert loaded.origins["log_level"] == "default"
    assert loaded.warnings[0].startswith("DYN_LOG='loud'")


def test_no_tier_takes_a_share_of_memory_and_says_so():
    for memory_bytes, expected in ((None, 4 * GB), (64 * GB, 4 * GB), (8 * GB, 2 * GB)):
        loaded = load_settings({}, memory_bytes=memory_bytes)
        assert loaded.settings.host_bytes == expected
        assert loaded.origins["host_bytes"] == "default"
        assert loaded.notices[0].startswith("no cache tier is set: using")
        assert loaded.warnings == []


def test_any_tier_at_all_leaves_the_default_out():
    for name in ("DYN_KVBM_DISK_CACHE_GB", "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS"):
        loaded = load_settings({name: "5"})
        assert loaded.settings.host_bytes is None
        assert not loaded.settings.host_on
        assert loaded.settings.disk_on


def test_zero_is_off():
    settings = load_settings({"DYN_KVBM_CPU_CACHE_GB": "0", "DYN_KVBM_DISK_CACHE_GB": "5"}).settings
    assert settings.host_bytes is None
    assert "DYN_KVBM_CPU_CACHE_GB=0" in refusal({"DYN_KVBM_CPU_CACHE_GB": "0"})
    assert "--host-memory=0" in refusal(HOST, overrides={"host_bytes": "0"})
    # Turning off a tier that was off anyway still leaves the default.
    assert load_settings({"DYN_KVBM_DISK_CACHE_GB": "0"}).settings.host_bytes == 4 * GB


def test_half_a_gigabyte_of_host_memory_is_a_host_tier():
    settings = load_settings({"DYN_KVBM_CPU_CACHE_GB": "0.5", "DYN_KVBM_DISK_CACHE_GB": "5"}).settings
    assert settings.host_bytes == 500_000_000
    assert settings.host_on


def test_a_block_count_wins_over_a_size_but_not_over_a_higher_source():
    environ = {"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "1000", "DYN_KVBM_CPU_CACHE_GB": "4"}
    assert load_settings(environ).settings.host_blocks == 1000
    loaded = load_settings(environ, {"host_bytes": "1GB"})
    assert (loaded.settings.host_bytes, loaded.settings.host_blocks) == (GB, None)
    assert loaded.warnings == ["DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS is overruled by --host-memory"]
    assert load_settings(environ, {"host_bytes": "1GB", "host_blocks": "7"}).settings.host_blocks == 7


def test_asking_for_what_is_not_there_draws_a_warning():
    asking = {"DYN_KVBM_ENABLE_NUMA": "1", "DYN_KVBM_DISK_ALLOCATOR_TYPE": "open-direct"}
    lines = load_settings({**HOST, **asking}).warnings
    assert [line.split(":")[0] for line in sorted(lines)] == [
        f"{name} has no effect" for name in sorted(asking)
    ]
    quiet = {"DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR": "1", "DYN_KVBM_DISK_ALLOCATOR_TYPE": "default"}
    assert load_settings({**HOST, **quiet}).warnings == []


def test_runtime_dir(tmp_path):
    assert runtime_dir_under(str(tmp_path)) == f"{tmp_path}/kvbm"
    fallback = runtime_dir_under("")
    assert re.fullmatch(r"/tmp/kvbm-\d+", fallback)
    assert runtime_dir_under("/does/not/exist") == runtime_dir_under("relative") == fallback
    assert (
        load_settings({**HOST, "XDG_RUNTIME_DIR": str(tmp_path)}).settings.runtime_dir == f"{tmp_path}/kvbm"
    )
    assert Settings().runtime_dir == default_runtime_dir()


def test_file_types_and_faults(tmp_path):
    file = tmp_path / "kvbm.toml"
    file.write_text('host_bytes = "1.5GiB"\nmetrics = true\nmetrics_port = 7001\nhost_byte = 3\n')
    loaded = load_settings({"DYN_KVBM_CONFIG": str(file)})
    assert loaded.settings.host_bytes == 3 * 2**29
    assert loaded.settings.metrics
    assert loaded.warnings == [
        f"{file}: host_byte is not a setting of kvbm and is ignored; did you mean host_bytes?"
    ]

    file.write_text("metrics_port = 0\n")
    assert refusal({}, file=file).startswith(f"{file}: metrics_port='0'")
    file.write_text("metrics_port = [\n")
    assert "TOML" in refusal({}, file=file)
    file.write_bytes(b"\xff\xfe")
    assert "TOML" in refusal({}, file=file)
    assert "readable" in refusal({}, file=tmp_path / "none.toml")
    assert "readable" in refusal({}, file=tmp_path)


def test_settings_cross_a_process_boundary():
    settings = load_settings(ORIGINAL).settings
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=Settings) == settings


# ---- what may enter disk

SWITCH_LOSES = "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER is overruled by DYN_KVBM_DISK_ADMISSION"
FILTER_OFF = {"DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "true"}


@pytest.mark.parametrize(
    ("environ", "overrides", "name", "warned"),
    [
        ({}, {}, "filter", []),
        (FILTER_OFF, {}, "all", []),
        ({"DYN_KVBM_DISK_ADMISSION": "ghost"}, {}, "ghost", []),
        ({**FILTER_OFF, "DYN_KVBM_DISK_ADMISSION": "filter"}, {}, "filter", [SWITCH_LOSES]),
        ({**FILTER_OFF, "DYN_KVBM_DISK_ADMISSION": "all"}, {}, "all", []),
        (
            {"DYN_KVBM_DISK_ADMISSION": "ghost"},
            {"disk_offload_filter": False},
            "all",
            ["DYN_KVBM_DISK_ADMISSION is overruled by --disk-offload-filter"],
        ),
        (
            FILTER_OFF,
            {"disk_admission": "ghost"},
            "ghost",
            ["DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER is overruled by --disk-admission"],
        ),
    ],
)
def test_the_name_of_an_admission_policy_wins_unless_the_switch_has_precedence(
    environ, overrides, name, warned
):
    loaded = load_settings({**HOST, "DYN_KVBM_DISK_CACHE_GB": "1", **environ}, overrides)
    assert admission_name(loaded.settings) == name
    assert loaded.warnings == warned


def test_a_size_that_is_not_named_after_gb_takes_a_unit():
    loaded = load_settings({**HOST, "DYN_KVBM_DISK_WRITE_BUDGET": "500GB"})
    assert loaded.settings.disk_write_budget_bytes == 500 * GB
    assert load_settings(HOST).settings.disk_write_budget_bytes == 0
    assert "DYN_KVBM_DISK_WRITE_BUDGET='much'" in refusal({**HOST, "DYN_KVBM_DISK_WRITE_BUDGET": "much"})
