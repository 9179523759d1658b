"""Sizes as users write them, a model's KV, and rows made of many runs."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import msgspec
import pytest

from kvbm.errors import SettingsError
from kvbm.sim.serving.disk import DiskRules
from kvbm.sim.serving.machine import Machine
from kvbm.sim.serving.model import kv_bytes_per_token
from kvbm.sim.simulate.simulation import Simulation, parse_policies, run
from kvbm.sim.simulate.sizes import parse_sizes
from kvbm.sim.simulate.study import Setup, averaged, hit_row, spread, time_row, with_gaps
from kvbm.sim.traces.synthetic import ChatShape, chats

TRACE = chats(ChatShape(conversations=40))


def ignore(requests: int) -> None:
    pass


# ---- sizes


def test_sizes_are_shares_blocks_or_bytes() -> None:
    sizes = parse_sizes("--host", "5%, 20blocks,1GiB,.5 %")
    assert [size.text for size in sizes] == ["5%", "20blocks", "1GiB", ".5 %"]
    found = [size.blocks_of(TRACE, 1024) for size in sizes]
    unique = TRACE.unique_blocks
    assert found == [int(unique * 0.05), 20, (1 << 30) // (1024 * TRACE.block_tokens), int(unique * 0.005)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5%,x", r"--host='x' cannot be used: a share of all blocks \(5%\), blocks \(20000blocks\) or bytes"),
        ("", r"--host='' cannot be used"),
        ("-5%", r"--host='-5%' cannot be used"),
        ("0%", r"--host='0%' cannot be used: at least one block"),
        ("0blocks", r"--host='0blocks' cannot be used: at least one block"),
        ("1GB", r"--host='1GB' cannot be used: sizes in bytes need --bytes-per-token or --model"),
    ],
)
def test_sizes_that_are_none(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        [size.blocks_of(TRACE, None) for size in parse_sizes("--host", text)]


def test_a_size_below_one_block() -> None:
    with pytest.raises(
        SettingsError, match=r"--disk='1MB' cannot be used: at least one block \(64,000,000 bytes"
    ):
        parse_sizes("--disk", "1MB")[0].blocks_of(TRACE, 1_000_000)


# ---- models

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, 2 * 32 * 8 * 128 * 2),
        ({**LLAMA, "head_dim": 64, "dtype": "float32"}, 2 * 32 * 8 * 64 * 4),
        ({**LLAMA, "num_key_value_heads": None}, 2 * 32 * 32 * 128 * 2),
        ({"text_config": LLAMA}, 2 * 32 * 8 * 128 * 2),
        ({**LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 32 * 576 * 2),
    ],
)
def test_bytes_of_a_models_kv(tmp_path: Path, config: dict[str, object], expected: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_bytes_per_token(tmp_path) == kv_bytes_per_token(tmp_path / "config.json") == expected


@pytest.mark.parametrize(
    "config",
    [
        {},
        [],
        {**LLAMA, "torch_dtype": "int3"},
        {**LLAMA, "layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_models_that_cannot_be_told(tmp_path: Path, config: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingsError, match=r"--model=.* cannot be used: .*or give --bytes-per-token"):
        kv_bytes_per_token(tmp_path)
    with pytest.raises(SettingsError, match=r"No such file"):
        kv_bytes_per_token(tmp_path / "nowhere")


# ---- rows


def test_a_row_says_how_far_from_lru_to_the_optimum() -> None:
    ticks = count()
    rows = with_gaps(
        [
            hit_row(TRACE, 0, policy, "5%", 100, None, ignore, lambda: float(next(ticks)))
            for policy in ("lru", "gittins", "belady")
        ]
    )
    assert [rows[0].gap_closed, rows[2].gap_closed] == [0.0, 1.0]
    distance = rows[2].hit_rate - rows[0].hit_rate
    assert rows[1].gap_closed == pytest.approx((rows[1].hit_rate - rows[0].hit_rate) / distance)
    assert {row.accesses_per_s for row in rows} == {TRACE.accesses}
    assert with_gaps(rows[1:])[0].gap_closed is None


def test_seeds_are_averaged() -> None:
    row = hit_row(TRACE, 0, "lru", "5%", 100, None, ignore)
    other = msgspec.structs.replace(row, seed=1, hit_rate=row.hit_rate + 0.2, blocks=103)
    elsewhere = msgspec.structs.replace(row, policy="gittins")
    means = averaged([row, elsewhere, other])
    assert [mean.policy for mean in means] == ["lru", "gittins"]
    assert means[0].hit_rate == pytest.approx(row.hit_rate + 0.1)
    assert means[0].blocks in (101, 102)
    assert means[0].gap_closed is None
    assert spread([row, elsewhere, other], row) == pytest.approx(0.1)


def test_a_time_row() -> None:
    machine = Machine(64 * 131_072)
    setup = Setup("lru", ("5%", 100), ("50%", 1000), DiskRules("all"))
    row = time_row(TRACE, 0, machine, setup, True, ignore)
    assert row.disk_hit_rate > 0.0
    assert row.disk_written_bytes > 0
    assert row.ttft_p50_s <= row.ttft_p90_s <= row.ttft_p99_s
    nothing = time_row(TRACE, 0, machine, Setup(), True, ignore)
    assert (nothing.policy, nothing.host_hit_rate, nothing.written_per_hit) == ("", 0.0, None)
    assert nothing.ttft_mean_s > row.ttft_mean_s


def test_policies_by_name() -> None:
    assert parse_policies("lru, belady,lru", timed=False) == ["lru", "belady"]
    everything = parse_policies("all", timed=False)
    assert everything[-1] == "belady"
    assert parse_policies("all", timed=True) == everything[:-1]
    with pytest.raises(
        SettingsError,
        match=r"--policy='s3fifo' cannot be used: one of .*, libcachesim:s3fifo, ",
    ):
        parse_policies("lru,s3fifo", timed=False)
    with pytest.raises(SettingsError, match=r"--policy='belady' .*this one has no times"):
        parse_policies("belady", timed=True)
    with pytest.raises(SettingsError, match=r"--policy='libcachesim:arc' .*this one has no times"):
        parse_policies("libcachesim:arc", timed=True)


def test_a_plan_runs_every_policy_at_every_size_for_every_seed() -> None:
    plan = Simulation(
        traces=["synthetic"],
        policies=["lru", "belady"],
        host=parse_sizes("--host", "1%,10%"),
        seeds=[0, 1],
        curve=True,
    )
    watched: list[tuple[str, int]] = []
    document = run(plan, lambda what, total: watched.append((what, total)) or ignore)
    assert len(document.hit_rates) == 8
    assert (
        [facts.seed for facts in document.traces] == [curve.seed for curve in document.lru_curves] == [0, 1]
    )
    assert watched[0] == ("reading synthetic", 0)
    assert watched[1] == ("synthetic: lru, 1%", document.traces[0].requests)
    for row in document.hit_rates:
        assert (row.gap_closed == 1.0) == (row.policy == "belady")
