"""A difference between two answers is measured where a computation without caches has both."""

from __future__ import annotations

import pytest

from kvbm.demo.client import Likelihoods, RequestError
from kvbm.demo.report import AnsweredRequest, measure_difference


def answered(*token_ids: int) -> AnsweredRequest:
    return AnsweredRequest(
        document=1,
        question=2,
        seen=True,
        ttft_s=0.1,
        total_s=0.2,
        prompt_tokens=100,
        cached_tokens=64,
        text=" ".join(map(str, token_ids)),
        token_ids=token_ids,
    )


Answer = tuple[tuple[int, ...], Likelihoods]

WANT, GOT = answered(7, 8, 9, 1), answered(7, 8, 5, 2)


def told(token_ids: tuple[int, ...], *steps: dict[int, float]) -> Answer:
    return token_ids, steps


@pytest.mark.parametrize(
    ("answer", "apart_nats"),
    [
        (told((7, 8, 9), {7: -0.1}, {8: -0.1}, {9: -2.25, 5: -2.5, 4: -3.0}), 0.25),
        (told((7, 8, 5), {7: -0.1}, {8: -0.1}, {9: -2.5, 5: -2.25}), 0.25),
        (told((7, 8, 9), {7: -0.1}, {8: -0.1}, {9: -2.25, 4: -3.0}), None),
        (told((7, 6, 9), {7: -0.1}, {6: -0.1}, {9: -2.25, 5: -2.5}), None),
        (told((7, 8), {7: -0.1}, {8: -0.1}), None),
    ],
    ids=["likelier", "less likely", "not among the likeliest", "another beginning", "ended before"],
)
def test_the_first_differing_tokens_are_compared(answer: Answer, apart_nats: float | None) -> None:
    asked: list[tuple[AnsweredRequest, int]] = []

    def anew(request: AnsweredRequest, count: int) -> Answer:
        asked.append((request, count))
        return answer

    assert measure_difference(anew, WANT, GOT).apart_nats == apart_nats
    assert asked == [(GOT, 3)]


def test_equal_answers_and_those_cut_short_are_not_asked_for() -> None:
    def anew(request: AnsweredRequest, count: int) -> Answer:
        raise AssertionError("nothing to ask")

    assert measure_difference(anew, WANT, WANT) is WANT
    short = answered(7, 8)
    assert measure_difference(anew, WANT, short) is short


def test_a_server_that_cannot_say_leaves_the_difference() -> None:
    def anew(request: AnsweredRequest, count: int) -> Answer:
        raise RequestError("no such field")

    assert measure_difference(anew, WANT, GOT) is GOT
