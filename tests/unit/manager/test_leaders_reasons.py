"""What a real leader decides about blocks that were found reaches `kvbm why` through a real manager."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kvbm.block import Tier
from kvbm.client.channel import Channel
from kvbm.leader.leader import Leader
from kvbm.leader.patience import REPLY_DEADLINE_S
from kvbm.protocol import PROTOCOL_VERSION, Hello
from kvbm.step_plan import LoadPlan, StepReport
from rigs.manager import DEADLINE_S, KEYS, ManagerBench, one, store

TABLE = list(range(100, 140))


class Engine:
    """A real leader at a manager that takes its turns when the test says so, and one rank."""

    def __init__(self, manager: ManagerBench) -> None:
        self.manager = manager
        hello = Hello(version=PROTOCOL_VERSION, role="leader", engine="e", rank_count=1)
        self.leader = Leader(self, hello, 4, True, manager.clock)  # type: ignore[arg-type]  # it is a finder
        self.worker = manager.worker("e")
        self._until(lambda: self.leader.ready)

    def attempt(self) -> Channel:
        return Channel.connect(self.manager.path)

    def welcomed(self) -> None:
        pass

    def log_trouble(self, *_: object) -> None:
        pass

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s
            self.manager.step()
            self.leader.step((), (), 0, idle=False)

    def promised(self, request: str) -> int:
        """The request comes, the manager answers, the engine asks."""
        self.leader.request_added(request, KEYS[:4], b"", 0)
        self.manager.step()
        return self.leader.matched(request, 0).blocks

    def load(self, request: str, blocks: int) -> LoadPlan:
        self.leader.allocated(request, blocks, TABLE)
        (plan,) = self.leader.step((), (), 0, idle=False).loads
        return plan

    def why(self, request: str) -> dict[str, int]:
        self.leader.finished(request)
        self.manager.step()
        found = one(self.manager, request)
        return {"loaded": found["loaded"], **found["unloaded"]}


@pytest.fixture
def engine(manager: ManagerBench) -> Iterator[Engine]:
    engine = Engine(manager)
    other, worker = manager.engine("writer")
    store(other, worker, 1, KEYS[:4])
    yield engine
    engine.leader.close()


def test_all_loaded(engine: Engine) -> None:
    assert engine.promised("r") == 4
    engine.load("r", 4)
    engine.leader.updated(StepReport(loaded={"r": 0.1}), ["r"], set())
    assert engine.why("r") == {"loaded": 4}


def test_computing_was_faster(engine: Engine) -> None:
    for _ in range(3):  # enough to be believed: loads that take a minute a block, steps that take none
        engine.leader.cost.loaded(bytes((Tier.HOST,)), 60.0)
        engine.leader.cost.prefilled(1000, 0.001)
    assert engine.promised("r") == 0
    engine.leader.allocated("r", 0, ())
    assert engine.why("r") == {"loaded": 0, "recompute_cheaper": 4}


def test_an_answer_that_came_too_late(engine: Engine) -> None:
    engine.leader.request_added("r", KEYS[:4], b"", 0)
    engine.manager.clock.advance(REPLY_DEADLINE_S + 10.0)
    assert engine.leader.matched("r", 0).blocks == 0
    engine.leader.allocated("r", 0, ())
    engine.manager.step()
    engine.leader.receive()
    assert engine.why("r") == {"loaded": 0, "promotion_too_late": 4}


def test_an_engine_that_goes_on_without(engine: Engine) -> None:
    assert engine.promised("r") == 4
    engine.leader.allocated("r", 0, ())
    assert engine.why("r") == {"loaded": 0, "unused": 4}


def test_a_rank_that_could_not_copy(engine: Engine) -> None:
    assert engine.promised("r") == 4
    plan = engine.load("r", 4)
    engine.leader.updated(StepReport(loaded={"r": 0.1}), ["r"], {plan.device_blocks[1]})
    assert engine.why("r") == {"loaded": 1, "copy_failed": 3}
