"""vLLM's scheduler at the leader, with an adapter whose digest takes its time and whose files change."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the scheduler's half counts with vLLM's classes; vllm is not installed")

from kvbm.adapters import FIRST_DIGEST_S
from kvbm.hashing import split_keys
from kvbm.leader.tracked import Scheduled
from kvbm.protocol import REFUSED, Commit, Lookup, LookupReply, Release, Reserve, ReserveReply
from kvbm.step_plan import StepReport
from kvbm.vllm_integration import scheduler_side
from rigs.leader import HASHES, TABLE
from rigs.scheduler_half import BLOCK_TOKENS, DONE, Side


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


def test_a_request_waits_a_moment_for_its_adapters_digest_and_is_then_stored_after_it(
    side: Side, weights: Path
) -> None:
    request = side.request("r", 3, str(weights.parent))
    side.side.added(request)
    assert side.side.matched(request, 0) == (None, False)
    side.adapters_clock.advance(FIRST_DIGEST_S)
    assert side.side.matched(request, 0) == (0, False)
    second = side.request("s", 3, str(weights.parent))
    assert side.side.matched(second, 0) == (0, False), "a digest that takes long is waited for once"
    side.side.finished(second)
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


def test_a_request_that_waited_for_its_digest_is_looked_up(side: Side, weights: Path) -> None:
    request = side.request("r", 3, str(weights.parent))
    assert side.side.matched(request, 0) == (None, False)
    assert side.said(Lookup) == []
    side.digests.pop()()
    assert side.side.matched(request, 0) == (None, False)
    assert len(side.said(Lookup)) == 1


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


@pytest.mark.parametrize("mode", ["auto", "async", "layerwise"])
def test_a_mode_that_several_groups_do_not_have_is_told_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    monkeypatch.setattr(scheduler_side, "layerwise_is_free", lambda config: True)
    made = Side(tmp_path, monkeypatch, groups=2, onboard_mode=mode)
    made.side.close()
    made.manager.close()
    told = [line.split()[0] for line in caplog.messages if "has no effect: this model" in line]
    assert told == (["onboard_mode=layerwise"] if mode == "layerwise" else [])


@pytest.mark.parametrize("emptied", [True, False])
def test_vllms_pool_shows_whether_a_reset_emptied_the_device(side: Side, emptied: bool) -> None:
    """It makes a new index when its cache is emptied, and keeps the old one while requests have blocks."""
    pool = SimpleNamespace(cached_block_hash_to_block={}, get_cached_block=lambda block_hash, groups: None)
    side.side.bind_block_pool(pool)
    if emptied:
        pool.cached_block_hash_to_block = {}
    side.side.reset()
    request = side.request("r", 3, "")
    request.lora_request = None
    side.side.added(request)
    side.side.matched(request, 8)
    request.num_computed_tokens = 8
    side.step(r=4)
    assert len(side.said(Reserve)) == emptied


def test_the_engine_steps_on_while_a_load_runs(side: Side) -> None:
    """A pause that keeps requests is complete when there is no work: by then nothing writes to the device."""
    request = side.request("r", 3, "")
    request.lora_request = None
    side.side.added(request)
    (lookup,) = side.said(Lookup)
    side.manager.send(
        LookupReply(lookup=lookup.lookup, slots=(0, 1, 2), generations=(1, 1, 1), ready=3, sources=b"\1\1\1")
    )
    assert side.side.matched(request, 0) == (12, True)
    side.side.allocated(request, SimpleNamespace(get_block_ids=lambda: (TABLE,)), 12)
    assert side.side.work_pending
    assert len(side.step().loads) == 1
    assert side.side.work_pending
    done = SimpleNamespace(finished_recving={"r"}, invalid_block_ids=None)
    side.side.updated(done, StepReport(loaded={"r": 0.1}))
    assert not side.side.work_pending


def running(side: Side, blocks: int) -> Any:
    """A request that has computed its prompt, all of whose blocks were offered."""
    request = side.request("r", blocks, "")
    request.lora_request = None
    side.side.added(request)
    side.step(r=blocks * BLOCK_TOKENS)
    request.num_computed_tokens = blocks * BLOCK_TOKENS
    for reserve in side.said(Reserve):
        side.grant(reserve)
    side.step(r=1)
    return request


def test_the_leader_is_told_of_a_request_when_a_block_of_it_is_complete(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = running(side, 2)
    step, told = side.side.leader.step, list[list[str]]()

    def noted(entries: list[Scheduled], *arguments: Any, **more: Any) -> Any:
        told.append([entry.request for entry in entries])
        return step(entries, *arguments, **more)

    monkeypatch.setattr(side.side.leader, "step", noted)
    for _ in range(2 * BLOCK_TOKENS):
        request.block_hashes = HASHES[: (request.num_computed_tokens + 1) // BLOCK_TOKENS]
        side.step(r=1)
        request.num_computed_tokens += 1
    once = [[]] * (BLOCK_TOKENS - 1) + [["r"]]
    assert told == 2 * once
    assert [len(split_keys(reserve.keys)) for reserve in side.said(Reserve)] == [1, 1]


@pytest.mark.parametrize("happens", ["refused", "preempted", "a new session"])
def test_blocks_are_offered_again_long_before_the_next_one_is_complete(side: Side, happens: str) -> None:
    request = running(side, 2)
    if happens == "refused":
        request.block_hashes = HASHES[:3]
        side.step(r=BLOCK_TOKENS)
        request.num_computed_tokens += BLOCK_TOKENS
        (reserve,) = side.said(Reserve)
        side.manager.send(ReserveReply(store=reserve.store, slots=(REFUSED,), generations=()))
        side.step(r=1)
        side.side.leader.requests["r"].retry.due_s = 0.0
    elif happens == "preempted":
        side.step(preempted={"r"}, r=1)
        assert side.side.leader.requests["r"].begun, "it runs again in the same step"
    else:
        side.manager.close()
        for _ in range(3):
            side.step()
        side.manager.said()
        side.manager.ready()
        side.step()
    side.step(r=1)
    assert len(side.said(Reserve)) == 1


def test_requests_that_reach_their_end_are_told_of_at_the_end_of_the_step(side: Side) -> None:
    requests = [side.request(name, 2, "") for name in ("length", "stop")]
    for request, status in zip(requests, ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"), strict=True):
        request.lora_request, request.status = None, SimpleNamespace(name=status)
        side.side.added(request)
    side.manager.said()
    for request in requests:
        side.side.finished(request)
    assert side.said(Release) == []
    side.side.take_stats()
    assert len(side.said(Release)) == 2


def test_the_end_of_a_request_that_is_aborted_is_told_at_once(side: Side) -> None:
    """The engine may take no further step."""
    request = side.request("r", 2, "")
    request.lora_request, request.status = None, SimpleNamespace(name="FINISHED_ABORTED")
    side.side.added(request)
    side.manager.said()
    side.side.finished(request)
    assert len(side.said(Release)) == 1
