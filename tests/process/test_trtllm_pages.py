"""TensorRT-LLM's second cache manager (pages of layer groups), and its events."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvbm.events.wire import Stored, encode, events_in
from kvbm.trtllm_integration.message import decode
from rigs.manager_probe import free_port, wait_for
from rigs.trtllm.engine import Request, reference
from rigs.trtllm.house import DEADLINE_S, House, make_prompts, push_out, settle, side_of
from rigs.trtllm.model import BLOCK_TOKENS
from rigs.trtllm.package import RequestData, SchedulerOutput


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    house = House(tmp_path, monkeypatch)
    yield house
    house.close()


def test_the_consolidator_listens_to_the_engines_events(
    house: House, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Engines of this process may have taken the loggers above it from pytest.
    monkeypatch.setattr(logging.getLogger("kvbm.consolidator"), "propagate", False)
    monkeypatch.setattr(logging.getLogger("kvbm.consolidator"), "handlers", [caplog.handler])
    house.set(KV_EVENTS_ENABLE_CONSOLIDATOR="1", LEADER_ZMQ_PUB_PORT=str(free_port()))
    engine = house.engine()
    (line,) = [r.message for r in caplog.records if r.name == "kvbm.consolidator"]
    assert "TRTLLM_ZMQ_PORT" in line
    engine.close()
    port, base = free_port(), free_port()
    monkeypatch.setenv("DYN_KVBM_TRTLLM_ZMQ_PORT", str(port))
    house.set(LEADER_ZMQ_PUB_PORT=str(base))
    context = zmq.Context()
    with context.socket(zmq.PUB) as events, context.socket(zmq.SUB) as router:
        events.bind(f"tcp://127.0.0.1:{port}")
        router.setsockopt(zmq.SUBSCRIBE, b"")
        router.setsockopt(zmq.RCVTIMEO, 200)
        router.connect(f"tcp://127.0.0.1:{base + 1000}")
        house.engine()
        stored = {"type": "BlockStored", "block_hashes": [-5], "token_ids": [1, 2], "block_size": 2}
        heard: list[object] = []

        def came() -> bool:
            events.send_multipart([b"", (0).to_bytes(8, "big"), encode(1.0, [stored])])
            try:
                heard.extend(events_in(router.recv_multipart()[2]))
            except zmq.Again:
                return False
            return bool(heard)

        wait_for(came, DEADLINE_S, "the router hears nothing")
    context.destroy(linger=0)
    assert isinstance(heard[0], Stored) and heard[0].name == (1 << 64) - 5


def test_pages_of_the_second_manager(house: House) -> None:
    engine = house.engine(layout_groups=1, chunk=5)
    asked = [Request(number, prompt, 6) for number, prompt in enumerate(make_prompts(4) * 3)]
    assert engine.serve(*asked) == reference(engine.spec, asked)
    assert engine.loaded_tokens > 0


def test_a_promise_that_the_engine_does_not_take_up_is_given_back(house: House) -> None:
    engine = house.engine(layout_groups=1)
    (prompt,) = make_prompts(1)
    engine.serve(Request(1, prompt, 2))
    push_out(engine)
    request = Request(2, prompt, 2)
    request.tokens = list(prompt)
    promised, _ = engine.leader.get_num_new_matched_tokens(request, 0)
    assert promised == 6 * BLOCK_TOKENS
    engine.leader.cancel_load(request, 2 * BLOCK_TOKENS, promised)
    request.table = engine.blocks.take([], 8)
    engine.leader.update_state_after_alloc(request, request.table)
    output = SchedulerOutput(
        [RequestData(2, prompt, request.table, 0, 18, new_block_ids_by_layer_group=[request.table])]
    )
    plan = decode(engine.leader.build_connector_meta(output)).plan
    (load,) = plan.loads
    assert load.device_blocks == tuple(request.table[:2])
    assert side_of(engine)._served[2].position == 18, (
        "what it computes of the promise itself is not counted twice"
    )
    engine.leader.request_finished(request, request.table)


def test_pages_without_memory_are_neither_loaded_nor_stored(house: House) -> None:
    """-1 is a block that a window has passed, and would name the last page of the pool."""
    engine = house.engine(layout_groups=1)
    (prompt,) = make_prompts(1)
    engine.serve(Request(1, prompt, 2))
    push_out(engine)
    request = Request(2, prompt, 2)
    request.tokens = list(prompt)
    engine.leader.get_num_new_matched_tokens(request, 0)
    table = [-1, -1, *engine.blocks.take([], 6)]
    engine.leader.update_state_after_alloc(request, table)
    output = SchedulerOutput([RequestData(2, prompt, table, 0, 2, new_block_ids_by_layer_group=[table])])
    plan = decode(engine.leader.build_connector_meta(output)).plan
    (load,) = plan.loads
    assert load.device_blocks == tuple(table[2:6])
    assert len(load.slots) == len(load.generations) == load.ready == 4
    assert not plan.stores


def test_several_layer_groups_are_not_served_and_the_engine_runs(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    engine = house.engine(layout_groups=2, ready=False)
    asked = [Request(number, prompt, 3) for number, prompt in enumerate(make_prompts(3) * 2)]
    assert engine.serve(*asked) == reference(engine.spec, asked)
    lines = [r.message for r in caplog.records if "KVBM is off" in r.message]
    assert lines == [
        "KVBM is off for this engine: 2 layer groups (window None, window None); accepted is one"
    ]


def test_what_no_plan_had_when_its_request_ended_is_not_copied_later(house: House) -> None:
    """Its blocks may have another's content by then."""
    engine = house.engine()
    (prompt,) = make_prompts(1)
    request = Request(1, prompt, 2)
    request.tokens = list(prompt)
    engine.leader.get_num_new_matched_tokens(request, 0)
    request.table = engine.blocks.take([], 8)
    engine.leader.update_state_after_alloc(request, request.table)
    output = SchedulerOutput([RequestData(1, prompt, request.table, BLOCK_TOKENS - 1, 1)])
    assert not decode(engine.leader.build_connector_meta(output)).plan.stores, "no answer was waited for"
    assert len(side_of(engine).leader.stores) == 1
    assert not engine.leader.request_finished(request, request.table), "nobody reads its blocks"
    settle(engine)
    assert not decode(engine.leader.build_connector_meta(SchedulerOutput())).plan.stores
