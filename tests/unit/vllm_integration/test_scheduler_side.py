"""vLLM's scheduler at the leader, with an adapter whose digest takes its time and whose files change."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the scheduler's half counts with vLLM's classes; vllm is not installed")

from kvbm.hashing import split_keys
from kvbm.protocol import Commit, Hello, Lookup, Reserve, ReserveReply
from kvbm.settings import Settings
from kvbm.step_plan import StepPlan, StepReport
from kvbm.vllm_integration import scheduler_side
from kvbm.vllm_integration.adapters import Adapters
from kvbm.vllm_integration.scheduler_side import SchedulerSide
from rigs.leader import HASHES, TABLE, ScriptedManager

BLOCK_TOKENS = 4
DONE = SimpleNamespace(finished_recving=None, invalid_block_ids=None)


class FullAttentionSpec:
    """Named as vLLM's, which is all that is looked at."""

    block_size = BLOCK_TOKENS


class Side:
    """A scheduler's half at a manager that answers from a script; digests are made when the test says so."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.manager = ScriptedManager()
        self.digests: list[Callable[[], None]] = []
        monkeypatch.setattr(scheduler_side, "ManagerFinder", lambda *arguments: self.manager)
        monkeypatch.setattr(
            scheduler_side,
            "Adapters",
            lambda memo, clock: Adapters(memo, clock, self.digests.append),
        )
        monkeypatch.setattr(scheduler_side, "hashes_are_deterministic", lambda config: True)
        spec = FullAttentionSpec()
        kv_cache = SimpleNamespace(num_blocks=200, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        transfer = SimpleNamespace(engine_id="e", kv_load_failure_policy="recompute")
        config = SimpleNamespace(
            kv_transfer_config=transfer,
            model_config=SimpleNamespace(max_model_len=400),
            parallel_config=SimpleNamespace(world_size=1),
        )
        chosen = Settings(**{"runtime_dir": str(tmp_path), "onboard_mode": "async", **settings})
        self.side = SchedulerSide(config, kv_cache, chosen, {})
        self.manager.ready()
        self.step()
        assert [type(message) for message in self.manager.said()] == [Hello]

    def request(self, name: str, blocks: int, lora_path: str) -> Any:
        lora = SimpleNamespace(lora_path=lora_path, lora_int_id=1)
        return SimpleNamespace(
            request_id=name,
            block_hashes=HASHES[:blocks],
            num_tokens=blocks * BLOCK_TOKENS + 1,
            num_computed_tokens=0,
            num_output_tokens=0,
            lora_request=lora,
        )

    def step(self, **tokens: int) -> StepPlan:
        state = SimpleNamespace(get_block_ids=lambda request_id: (TABLE,))
        return self.side.step(
            SimpleNamespace(
                num_scheduled_tokens=tokens,
                total_num_scheduled_tokens=sum(tokens.values()),
                kv_connector_block_state=state,
            )
        )

    def grant(self, reserve: Reserve) -> None:
        slots = tuple(range(len(split_keys(reserve.keys))))
        self.manager.send(ReserveReply(store=reserve.store, slots=slots, generations=slots))

    def said(self, kind: type) -> list[Any]:
        return [message for message in self.manager.said() if isinstance(message, kind)]


@pytest.fixture
def side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    made = Side(tmp_path, monkeypatch)
    yield made
    made.side.close()
    made.manager.close()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    path.parent.mkdir()
    path.write_bytes(b"first")
    os.utime(path, ns=(1, 1))
    return path


def test_a_request_does_not_wait_for_its_adapters_digest_and_is_stored_after_it(
    side: Side, weights: Path
) -> None:
    request = side.request("r", 3, str(weights.parent))
    side.side.added(request)
    assert side.side.matched(request, 0) == (0, False)
    side.side.allocated(request, None, 0)
    side.step(r=12)
    assert side.said(object) == [], "without its digest it has no name"
    (digest,) = side.digests
    digest()
    request.num_computed_tokens = 12
    side.step(r=1)
    (reserve,) = side.said(Reserve)
    assert (reserve.parent, reserve.hashes) == (b"", b"".join(HASHES[:3])), "all that it has computed so far"
    assert reserve.keys != reserve.hashes


def test_a_request_that_still_waits_is_looked_up_once_the_digest_is_there(side: Side, weights: Path) -> None:
    request = side.request("r", 3, str(weights.parent))
    side.side.added(request)
    side.digests.pop()()
    assert side.side.matched(request, 0) == (None, False)
    (lookup,) = side.said(Lookup)
    second = side.request("s", 3, str(weights.parent))
    side.side.added(second)
    assert [message.keys for message in side.said(Lookup)] == [lookup.keys], (
        "with the next one it is there at once"
    )


def test_blocks_of_an_adapter_that_has_changed_by_then_are_not_committed(side: Side, weights: Path) -> None:
    for name, changes in (("first", False), ("second", True), ("third", False)):
        request = side.request(name, 3, str(weights.parent))
        side.side.added(request)
        while side.digests:
            side.digests.pop()()
        side.side.matched(request, 0)
        side.step(**{name: 12})
        if name == "third":
            assert side.said(Reserve) == [], "it is kept no more"
            continue
        (reserve,) = side.said(Reserve)
        side.grant(reserve)
        (plan,) = side.step().stores
        if changes:
            weights.write_bytes(b"other")
        side.side.updated(DONE, StepReport(stored={plan.store: (1, (), 0.1)}))
        (commit,) = side.said(Commit)
        assert commit.failed == ((0, 1, 2) if changes else ())
        side.side.finished(request)
        side.step()


def test_a_request_that_ends_before_its_digest_leaves_nothing(side: Side, weights: Path) -> None:
    request = side.request("r", 3, str(weights.parent))
    side.side.added(request)
    side.step(r=12)
    side.side.finished(request)
    side.digests.pop()()
    side.step()
    assert side.said(object) == side.manager.ended == []
    assert side.side.leader.requests == {}


@pytest.mark.parametrize("path", ["org/on-a-hub", ""])
def test_an_adapter_without_files_is_not_followed(side: Side, path: str, tmp_path: Path) -> None:
    request = side.request("r", 3, path or str(tmp_path / "nothing"))
    side.side.added(request)
    assert side.side.matched(request, 0) == (0, False)
    side.step(r=12)
    assert side.said(object) == []
    side.side.finished(request)
    assert side.side.leader.requests == {}


@pytest.mark.parametrize("traced", [True, False])
def test_requests_are_traced_in_their_own_traces_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traced: bool
) -> None:
    opened: list[str] = []
    taken: list[tuple[str, dict[str, str]]] = []
    closed: list[bool] = []
    sink = SimpleNamespace(
        put=lambda make, parent: taken.append((make().attributes["gen_ai.request.id"], dict(parent))),
        close=lambda: closed.append(True),
    )
    monkeypatch.setattr(scheduler_side, "open_sink", lambda engine: opened.append(engine) or sink)
    side = Side(tmp_path, monkeypatch, traces=traced)
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    for name, request_headers in (("r", headers), ("s", None)):
        request = side.request(name, 3, "")
        request.lora_request = None
        request.trace_headers = request_headers
        side.side.added(request)
        side.side.finished(request)
    side.side.close()
    side.manager.close()
    assert opened == (["e"] if traced else [])
    assert taken == ([("r", headers), ("s", {})] if traced else [])
    assert closed == ([True] if traced else [])
