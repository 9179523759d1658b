"""The duel between a client's hints and what is usual for it."""

from __future__ import annotations

import random

from kvbm.policy.gittins.belief import Belief

GAP_S = 100.0


def converse(
    belief: Belief, client: str, claims: list[float | None], outcomes: list[float | None], start: int = 0
) -> None:
    """Conversations one after the other: each claims when it goes on (None: never), and then does as in `outcomes`."""
    for number, (claim, outcome) in enumerate(zip(claims, outcomes, strict=True), start=1 + start):
        now_s = number * 1e5
        belief.claimed(number, client, claim, now_s)
        belief.ended(number, now_s + 10.0)
        if outcome is not None:
            belief.went_on(number, now_s + 10.0 + outcome)
    belief.settle_due((start + len(claims) + 1) * 1e5)


def mixed(count: int, seed: int = 0) -> list[float | None]:
    """One of three conversations goes on, after a minute or several."""
    chance = random.Random(seed)
    return [60.0 * 8 ** chance.random() if chance.random() < 1 / 3 else None for _ in range(count)]


def said(outcomes: list[float | None], seed: int = 1) -> list[float | None]:
    """The truth within a factor of two."""
    chance = random.Random(seed)
    return [None if gap is None else gap * 2 ** chance.uniform(-1, 1) for gap in outcomes]


def test_a_client_is_believed_until_it_is_wrong() -> None:
    assert Belief().believes("new")


def test_who_is_right_within_a_factor_of_two_stays_believed() -> None:
    belief, outcomes = Belief(), mixed(500)
    for start in range(0, 500, 10):
        part = outcomes[start : start + 10]
        converse(belief, "honest", said(part, start), part, start)
        assert belief.believes("honest")


def test_who_hints_at_random_is_found_out_and_stays_so() -> None:
    """Also where ends are as frequent in the hints as in the truth."""
    belief, outcomes, claims = Belief(), mixed(500), said(mixed(500, seed=7))
    converse(belief, "random", claims[:60], outcomes[:60])
    for start in range(60, 500, 10):
        assert not belief.believes("random")
        end = start + 10
        converse(belief, "random", claims[start:end], outcomes[start:end], start)


def test_clients_are_judged_one_by_one() -> None:
    belief, outcomes = Belief(), mixed(60)
    converse(belief, "liar", [None if gap else GAP_S for gap in outcomes], outcomes)
    converse(belief, "honest", said(outcomes), outcomes, 60)
    assert not belief.believes("liar")
    assert belief.believes("honest")


def test_a_liar_that_mends_its_ways_is_believed_again() -> None:
    belief, outcomes = Belief(), mixed(300)
    converse(belief, "c", [None if gap else GAP_S for gap in outcomes[:50]], outcomes[:50])
    assert not belief.believes("c")
    converse(belief, "c", said(outcomes[50:]), outcomes[50:], 50)
    assert belief.believes("c")


def test_what_is_claimed_counts_from_the_requests_end() -> None:
    """Requests that take most of an hour, and go on as claimed after that."""
    for ended in (True, False):
        belief = Belief()
        for number, gap_s in enumerate([10.0, 100.0] * 20, start=1):
            now_s, taken_s = number * 1e5, 3000.0
            belief.claimed(number, "c", gap_s, now_s)
            if ended:
                belief.ended(number, now_s + taken_s)
            belief.went_on(number, now_s + taken_s + gap_s)
        assert belief.believes("c") == ended


def test_hints_that_say_what_is_usual_do_no_harm() -> None:
    belief = Belief()
    converse(belief, "steady", [GAP_S] * 200, [GAP_S] * 200)
    assert belief.believes("steady")


def test_clients_and_claims_are_bounded() -> None:
    belief = Belief(clients_max=2, pending_max=10)
    lies: list[float | None] = [None] * 10
    for client in ("a", "b", "c"):
        converse(belief, client, lies, [GAP_S] * 10)
    assert [belief.believes(client) for client in ("a", "b", "c")] == [True, False, False]
    for number in range(100_000):
        belief.claimed(1000 + number, "d", None, 1e7)
        belief.ended(1000, 1e7)
    assert len(belief._pending) == 10
    assert len(belief._deadlines) <= 41
