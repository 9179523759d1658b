"""A queue of requests that wait: an engine asks about all of them in each step, and little is done for each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.rigs.leader import FINGERPRINT, HASHES, LEASE_S, TABLE, Bench

from kvbm.leader.patience import ASK_AGAIN_S, LEASE_MARGIN_S
from kvbm.leader.questions import ASKED_AGAIN_MAX
from kvbm.leader.tracked import Answer
from kvbm.protocol import Lookup, Progress, Ready

QUEUE = [f"r{number}" for number in range(2 * ASKED_AGAIN_MAX)]
LATER, NOTHING = Answer(later=True), Answer()


@pytest.fixture
def looks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests whose answers the leader looked at anew."""
    looked: list[str] = []
    answer = bench.leader._questions.answer

    def counted(request: str, *arguments: object) -> object:
        looked.append(request)
        return answer(request, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.leader._questions, "answer", counted)
    return looked


def arrive(bench: Bench, requests: list[str], blocks: int = 8) -> list[Lookup]:
    for request in requests:
        bench.leader.request_added(request, HASHES[:blocks], b"", 0)
    return lookups(bench)


def lookups(bench: Bench) -> list[Lookup]:
    return [message for message in bench.manager.said() if isinstance(message, Lookup)]


def ask(bench: Bench, requests: list[str]) -> set[Answer]:
    """The engine asks about them in one step."""
    answers = {bench.leader.matched(request, 0) for request in requests}
    bench.step()
    return answers


def narrow(bench: Bench, lease_blocks: int) -> None:
    ready = Ready(ready=True, epoch=7, fingerprint=FINGERPRINT, lease_s=LEASE_S, lease_blocks=lease_blocks)
    bench.manager.send(ready)
    bench.step()


def test_what_waits_for_an_answer_is_looked_at_when_it_comes(bench: Bench, looks: list[str]) -> None:
    first, *_ = arrive(bench, QUEUE)
    assert ask(bench, QUEUE) == {LATER}
    looks.clear()
    assert ask(bench, QUEUE) == {LATER}
    assert looks == []
    bench.answer(first, 5)
    assert ask(bench, QUEUE) == {LATER, Answer(blocks=5)}
    assert looks == ["r0"]


def test_what_waits_for_another_ones_load_is_looked_at_when_that_ends(bench: Bench, looks: list[str]) -> None:
    plan = bench.load(5, request="loads")
    arrive(bench, QUEUE)
    assert ask(bench, QUEUE) == {LATER}
    looks.clear()
    assert ask(bench, QUEUE) == {LATER}
    bench.arrive(plan)
    assert looks == []
    ask(bench, QUEUE)
    assert set(looks) == set(QUEUE)


def test_what_waits_for_room_is_looked_at_when_it_has_some(bench: Bench, looks: list[str]) -> None:
    narrow(bench, 8)
    (first,) = arrive(bench, QUEUE)
    for _ in range(2):
        assert ask(bench, QUEUE[1:]) == {LATER}, "but one of them is the next now"
    looks.clear()
    assert ask(bench, QUEUE[1:]) == {LATER}
    assert len(looks) == 1, "the next"
    bench.leader.finished("r0")
    bench.step()
    (second,) = lookups(bench)
    assert second.lookup != first.lookup
    bench.answer(second, 8)
    assert Answer(blocks=8) in ask(bench, QUEUE[1:])


def test_a_wait_for_reads_ends_when_they_do(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(promise_early=False)
    lookup = bench.add()
    bench.answer(lookup, 5, ready=2, disk=3)
    for _ in range(2):
        assert ask(bench, ["r"]) == {LATER}
    bench.manager.send(Progress(lookup=lookup.lookup, ready=5, final=True))
    assert ask(bench, ["r"]) == {Answer(blocks=5)}


def test_an_answer_that_does_not_come_is_not_waited_for_longer(bench: Bench) -> None:
    arrive(bench, ["r"])
    for _ in range(2):
        assert ask(bench, ["r"]) == {LATER}
    bench.clock.advance(10.0)
    assert ask(bench, ["r"]) == {NOTHING}


def test_nothing_waits_for_a_manager_that_has_gone(bench: Bench) -> None:
    arrive(bench, QUEUE)
    for _ in range(2):
        assert ask(bench, QUEUE) == {LATER}
    bench.manager.die()
    assert ask(bench, QUEUE) == {NOTHING}


def test_nothing_waits_while_a_rank_is_missing(bench: Bench) -> None:
    arrive(bench, QUEUE)
    for _ in range(2):
        assert ask(bench, QUEUE) == {LATER}
    bench.manager.ready(ready=False)
    assert ask(bench, QUEUE) == {NOTHING}


def test_messages_are_read_once_for_all_that_are_asked_about(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrive(bench, QUEUE)
    ask(bench, QUEUE)
    reads: list[None] = []
    poll = bench.leader._link.poll
    monkeypatch.setattr(bench.leader._link, "poll", lambda: reads.append(None) or poll())
    for request in QUEUE:
        bench.leader.matched(request, 0)
    assert len(reads) == 1


def test_old_answers_of_the_next_in_the_queue_are_renewed_before_the_engine_asks(bench: Bench) -> None:
    for lookup in arrive(bench, QUEUE):
        bench.answer(lookup, 0)
    bench.step()
    bench.clock.advance(ASK_AGAIN_S + 0.1)
    bench.step()
    renewed = lookups(bench)
    assert [each.request for each in renewed] == QUEUE[:ASKED_AGAIN_MAX]
    assert all(each.again for each in renewed)
    for lookup in renewed:
        bench.answer(lookup, 3)
    assert bench.leader.matched("r0", 0) == Answer(blocks=3)
    bench.leader.allocated("r0", 3, TABLE)
    bench.step()
    assert [each.request for each in lookups(bench)] == [QUEUE[ASKED_AGAIN_MAX]], "the queue has moved"


@pytest.mark.parametrize(
    ("age_s", "others"), [(ASK_AGAIN_S + 0.1, NOTHING), (LEASE_S - LEASE_MARGIN_S + 0.1, LATER)]
)
def test_a_step_asks_again_about_a_few_of_a_queue(bench: Bench, age_s: float, others: Answer) -> None:
    """Those beyond go by what was found, as long as that holds: else the engine asks about all that wait."""
    for lookup in arrive(bench, QUEUE):
        bench.answer(lookup, 0)
    bench.step()
    bench.clock.advance(age_s)
    answers = [bench.leader.matched(request, 0) for request in QUEUE]
    assert len(lookups(bench)) == ASKED_AGAIN_MAX
    assert answers == [LATER] * ASKED_AGAIN_MAX + [others] * (len(QUEUE) - ASKED_AGAIN_MAX)
