"""What an engine's arguments say: its name, its ranks, and what is not served."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.trtllm_integration import engine_facts
from kvbm.trtllm_integration.engine_facts import facts_of, notices, unsupported_reason


@pytest.fixture(autouse=True)
def first_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_facts, "_instances", {"leader": 0, "worker": 0})


def arguments(ranks: int = 1, rank: int = 0, cache: dict[str, Any] | None = None, **mapping: Any) -> Any:
    known = SimpleNamespace(rank=rank, world_size=ranks, tp_size=ranks, tp_rank=rank, **mapping)
    return SimpleNamespace(
        model="m",
        parallel_config=SimpleNamespace(to_mapping=lambda: known),
        kv_cache_config=SimpleNamespace(**{"tokens_per_block": 32, **(cache or {})}),
        max_seq_len=100,
    )


def test_a_leader_and_its_worker_have_one_name() -> None:
    leaders = [facts_of(arguments(), {}, "leader") for _ in range(2)]
    workers = [facts_of(arguments(), {}, "worker") for _ in range(2)]
    assert [each.engine for each in leaders] == [each.engine for each in workers]
    assert leaders[0].engine != leaders[1].engine, "two engines of one process"
    assert leaders[0].request_blocks == 4


def test_ranks_in_several_processes_have_the_name_of_their_job() -> None:
    job = {"PMIX_NAMESPACE": "prterun-1@1"}
    leader = facts_of(arguments(2), job, "leader")
    assert facts_of(arguments(2, 1), job, "worker").engine == leader.engine
    other = facts_of(arguments(2), {"PMIX_NAMESPACE": "prterun-1@2"}, "worker")
    assert other.engine != leader.engine


def test_ranks_without_a_common_name_are_one_line() -> None:
    with pytest.raises(ValueError, match="2 ranks have no name in common") as raised:
        facts_of(arguments(2), {}, "leader")
    assert "\n" not in str(raised.value)


def test_engines_that_share_a_job_are_not_taken_for_one() -> None:
    job = {"PMIX_NAMESPACE": "prterun-1@1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert facts_of(arguments(2), job, "leader").engine
    with pytest.raises(ValueError, match="2 ranks in an MPI job of 4 ") as raised:
        facts_of(arguments(2), {**job, "OMPI_COMM_WORLD_SIZE": "4"}, "leader")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (arguments(), ""),
        (arguments(cache={"host_cache_size": 0, "max_attention_window": None}), ""),
        (arguments(2, enable_attention_dp=True), "enable_attention_dp"),
        (arguments(2, cp_size=2), "context_parallel_size=2"),
        (arguments(16, gpus_per_node=8), "16 ranks on nodes of 8"),
        (arguments(cache={"host_cache_size": 1 << 30}), "host_cache_size=1073741824"),
        (arguments(cache={"max_attention_window": [512]}), "max_attention_window=[512]"),
    ],
)
def test_what_is_not_served_is_one_line(made: Any, named: str) -> None:
    reason = unsupported_reason(made)
    assert (named in reason and "\n" not in reason) if named else not reason


@pytest.mark.parametrize(("used", "served"), [("true", False), ("false", True)])
def test_a_model_with_a_window(tmp_path: Path, used: str, served: bool) -> None:
    (tmp_path / "config.json").write_text(f'{{"sliding_window": 4096, "use_sliding_window": {used}}}')
    made = arguments()
    made.model = str(tmp_path)
    assert (unsupported_reason(made) == "") == served


def test_partial_reuse_is_one_line() -> None:
    assert notices(arguments()) == []
    (line,) = notices(arguments(cache={"enable_partial_reuse": True}))
    assert "enable_partial_reuse" in line
