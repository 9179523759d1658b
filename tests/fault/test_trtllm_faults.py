"""TensorRT-LLM cannot be told that a load has failed: what becomes of its requests when something does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm.transfer import CpuCopier
from rigs.manager_probe import SharedManager, private_managers, wait_for
from rigs.trtllm.engine import Engine, Request, reference
from rigs.trtllm.house import DEADLINE_S, House, is_ready, make_prompts, settle, side_of
from rigs.trtllm.model import BLOCK_TOKENS


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    house = House(tmp_path, monkeypatch)
    yield house
    house.close()


def rounds(count: int, first: int = 0) -> list[Request]:
    """The same four prompts again and again."""
    return [Request(first + number, prompt, 4) for number, prompt in enumerate(make_prompts(4) * count)]


def private_manager(house: House) -> int:
    (pid,) = private_managers(house.runtime_dir)
    return pid


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_manager_is_killed_and_comes_back(house: House, ranks: int) -> None:
    path = str(house.directory / "m.sock")
    house.set(MANAGER=path)
    manager = SharedManager(house.directory, path, "--host-blocks", "256")
    engine = house.engine(ranks=ranks)
    asked = rounds(2)
    expected = reference(engine.spec, asked)
    assert engine.serve(*asked) == expected
    before = engine.loaded_tokens
    assert before > 0
    manager.kill()
    assert engine.serve(*rounds(2, 100)) == expected
    assert not engine.saving
    manager = SharedManager(house.directory, path, "--host-blocks", "256")
    wait_for(lambda: is_ready(engine), DEADLINE_S, "not connected again")
    before = engine.loaded_tokens

    def used_again() -> bool:
        # A rank maps the new memory a little later than the manager says that it has come.
        assert engine.serve(*rounds(2, 200 + engine.iterations)) == expected
        return engine.loaded_tokens > before

    wait_for(used_again, DEADLINE_S, "nothing is loaded again")
    manager.close()


def test_a_manager_that_dies_after_a_promise_has_its_memory_read_still(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = house.engine()
    engine.serve(*rounds(1))
    settle(engine)
    side = side_of(engine)
    allocated, kills = side.allocated, []

    def die(request: Any, block_ids: list[int]) -> None:
        allocated(request, block_ids)
        if side._served[request.request_id].promised and not kills:
            kills.append(private_manager(house))
            os.kill(kills[0], signal.SIGKILL)

    monkeypatch.setattr(side, "allocated", die)
    asked = rounds(1, 100)
    assert engine.serve(*asked) == reference(engine.spec, asked)
    assert kills
    assert any(request.promised for request in asked)


@pytest.mark.slow
def test_a_late_answer_is_a_miss(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = house.engine()
    engine.serve(*rounds(1))
    settle(engine)
    monkeypatch.setattr("kvbm.leader.step_budget.STEP_WAIT_S", 0.002)
    manager = private_manager(house)
    os.kill(manager, signal.SIGSTOP)
    try:
        asked = rounds(1, 100)
        assert engine.serve(*asked) == reference(engine.spec, asked)
        assert not any(request.promised for request in asked)
        assert not engine.saving, "ids come back from ranks whose manager does not answer"
    finally:
        os.kill(manager, signal.SIGCONT)

    def counted() -> bool:
        settle(engine)
        return bool(side_of(engine).leader.lookups.unloaded["deadline"])

    wait_for(counted, DEADLINE_S, "late answers are not counted")


@pytest.mark.swallows("^RuntimeError: the device is lost")
def test_a_load_that_fails_ends_the_engine_with_one_line(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would compute from other KV, and nobody would notice."""
    engine = house.engine()
    engine.serve(*rounds(1))
    settle(engine)

    def begin_load(self: Any, *arguments: Any) -> Any:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(CpuCopier, "begin_load", begin_load)
    from kvbm.trtllm_integration.errors import PromiseBroken

    with pytest.raises(
        PromiseBroken, match="KV that was promised for request 100 is not on the device"
    ) as raised:
        engine.serve(*rounds(1, 100))
    assert "\n" not in str(raised.value)


def test_a_slow_load_is_waited_for(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = house.engine()
    engine.serve(*rounds(1))
    settle(engine)
    began, gate = threading.Event(), threading.Event()
    load = CpuCopier.begin_load

    def begin_load(self: Any, *arguments: Any) -> Any:
        began.set()
        assert gate.wait(DEADLINE_S)
        return load(self, *arguments)

    monkeypatch.setattr(CpuCopier, "begin_load", begin_load)
    asked, answers = rounds(1, 100), list[list[list[int]]]()
    serving = threading.Thread(target=lambda: answers.append(engine.serve(*asked)))
    serving.start()
    assert began.wait(DEADLINE_S)
    assert not answers
    gate.set()
    serving.join(DEADLINE_S)
    assert answers == [reference(engine.spec, asked)]


@pytest.mark.swallows("^RuntimeError: no memory")
def test_a_store_that_fails_is_not_committed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = house.engine()

    def begin_store(self: Any, *arguments: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(CpuCopier, "begin_store", begin_store)
    engine.serve(*rounds(2))
    settle(engine)
    assert engine.loaded_tokens == 0


@pytest.mark.swallows("^ZeroDivisionError: ")
def test_a_defect_switches_the_cache_off_and_not_the_engine(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = house.engine()
    engine.serve(*rounds(1))
    settle(engine)
    loaded = engine.loaded_tokens

    def matched(*arguments: Any) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(side_of(engine), "matched", matched)
    asked = rounds(2, 100)
    assert engine.serve(*asked) == reference(engine.spec, asked)
    assert engine.loaded_tokens == loaded
    assert [r.message for r in caplog.records if "after a defect" in r.message] == [
        "KVBM is off for this engine from now on, after a defect in KVBM; the engine serves without it"
    ]
    assert not engine.saving


@pytest.mark.swallows("^ZeroDivisionError: ")
def test_a_defect_after_a_promise_is_not_passed_off_as_a_load(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbm.trtllm_integration.errors import PromiseBroken

    engine = house.engine()
    engine.serve(*rounds(1))
    settle(engine)

    def step(*arguments: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(side_of(engine), "step", step)
    with pytest.raises(PromiseBroken):
        engine.serve(*rounds(1, 100))


@pytest.mark.swallows("^ZeroDivisionError: ")
def test_a_defect_in_a_rank_gives_all_ids_back(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = house.engine()
    monkeypatch.setattr(engine.first.connector._side, "store", lambda *arguments: 1 // 0)
    asked = rounds(1)
    assert engine.serve(*asked) == reference(engine.spec, asked)
    while engine.saving:
        engine.iterate()
    settle(engine)
    again = rounds(1, 100)
    assert engine.serve(*again) == reference(engine.spec, again)
    assert engine.loaded_tokens == 0


@pytest.mark.swallows("^ZeroDivisionError: ")
def test_after_a_defect_in_a_rank_what_was_promised_is_loaded_all_the_same(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The leader does not know of it, and goes on promising what is there."""
    engine = house.engine()
    engine.serve(*rounds(1))
    settle(engine)
    monkeypatch.setattr(engine.first.connector._side, "store", lambda *arguments: 1 // 0)
    asked = rounds(2, 100)
    assert engine.serve(*asked) == reference(engine.spec, asked)
    assert "after a defect in KVBM" in caplog.text
    assert sum(bool(request.promised) for request in asked) > 4


@pytest.mark.swallows("^ZeroDivisionError: ")
def test_a_defect_while_a_load_is_carried_out_ends_the_engine(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbm.trtllm_integration.errors import PromiseBroken

    engine = house.engine()
    engine.serve(*rounds(1))
    settle(engine)
    monkeypatch.setattr(engine.first.connector._side.worker, "load_now", lambda *arguments: 1 // 0)
    with pytest.raises(PromiseBroken, match="ZeroDivisionError in KVBM"):
        engine.serve(*rounds(1, 100))


@pytest.mark.slow
def test_no_manager_at_all(house: House, caplog: pytest.LogCaptureFixture) -> None:
    house.set(MANAGER=str(house.directory / "nobody.sock"))
    engine = house.engine(ready=False)
    asked = rounds(2)
    assert engine.serve(*asked) == reference(engine.spec, asked)
    assert engine.loaded_tokens == 0
    assert not engine.saving


def test_blocks_of_a_killed_engine_are_found_by_the_next(house: House) -> None:
    path = str(house.directory / "m.sock")
    house.set(MANAGER=path)
    manager = SharedManager(house.directory, path, "--host-blocks", "256")
    engine: Engine = house.engine(ranks=2)
    engine.serve(*rounds(1))
    settle(engine)
    engine.close()
    engine = house.engine(ranks=2)
    asked = rounds(1, 100)
    assert engine.serve(*asked) == reference(engine.spec, asked)
    assert asked[0].promised == 6 * BLOCK_TOKENS
    manager.close()
