"""What clients may say: every part is accepted, clipped or rejected, whatever it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvbm.hints import (
    EXPECT_S_MAX,
    NAME_CHARACTERS_MAX,
    PRIORITY_MAX,
    RANGES_MAX,
    TOKENS_MAX,
    TTL_S_MAX,
    UNKNOWN,
    WHOLE,
    Hint,
    Outcome,
    Retain,
    read_hint,
)


def test_everything_that_can_be_said() -> None:
    said = {
        "session": "s-1",
        "parent": "p",
        "final": True,
        "expect_s": 30,
        "retain": [{"start": 0, "end": 512, "priority": 80, "min_ttl": 60, "max_ttl": 300.0}, {}],
        "prefetch": True,
        "demote": True,
        "store": False,
    }
    hint, verdicts = read_hint(said)
    assert hint == Hint(
        session="s-1",
        parent="p",
        final=True,
        expect_s=30.0,
        retain=(Retain(start=0, end=512, priority=80, min_ttl=60.0, max_ttl=300.0), Retain()),
        prefetch=True,
        demote=True,
        store=False,
    )
    assert isinstance(hint.expect_s, float)
    assert {verdict.outcome for verdict in verdicts} == {Outcome.ACCEPTED}
    assert sorted(verdict.part for verdict in verdicts) == sorted([*said, "retain"])


@pytest.mark.parametrize("nothing", [None, {}, {"session": None, "retain": None}])
def test_nothing_said_has_no_verdict(nothing: object) -> None:
    assert read_hint(nothing) == (Hint(), ())


@pytest.mark.parametrize(
    ("said", "part", "outcome", "reason", "hint"),
    [
        ("final", WHOLE, Outcome.REJECTED, "not a mapping", Hint()),
        ({"colour": 1}, UNKNOWN, Outcome.REJECTED, "no such part", Hint()),
        ({1: 2}, UNKNOWN, Outcome.REJECTED, "no such part", Hint()),
        ({"session": 7}, "session", Outcome.REJECTED, "printable", Hint()),
        ({"session": ""}, "session", Outcome.REJECTED, "printable", Hint()),
        ({"session": "\ud800"}, "session", Outcome.REJECTED, "printable", Hint()),
        ({"parent": "x" * 257}, "parent", Outcome.REJECTED, "256", Hint()),
        ({"final": 1}, "final", Outcome.REJECTED, "true or false", Hint()),
        ({"store": "no"}, "store", Outcome.REJECTED, "true or false", Hint()),
        ({"expect_s": True}, "expect_s", Outcome.REJECTED, "not a number", Hint()),
        ({"expect_s": -1}, "expect_s", Outcome.REJECTED, "below 0", Hint()),
        ({"expect_s": float("nan")}, "expect_s", Outcome.REJECTED, "not finite", Hint()),
        ({"expect_s": 10**400}, "expect_s", Outcome.CLIPPED, "above 86400", Hint(expect_s=EXPECT_S_MAX)),
        ({"retain": {}}, "retain", Outcome.REJECTED, "not a list", Hint()),
        ({"retain": [3]}, "retain", Outcome.REJECTED, "not a mapping", Hint()),
        ({"retain": [{"until": 3}]}, "retain", Outcome.REJECTED, "unknown part", Hint()),
        ({"retain": [{"start": 5, "end": 5}]}, "retain", Outcome.REJECTED, "empty", Hint()),
        ({"retain": [{"start": 1.5}]}, "retain", Outcome.REJECTED, "whole number", Hint()),
        (
            {"retain": [{"priority": 101}]},
            "retain",
            Outcome.CLIPPED,
            "priority: above 100",
            Hint(retain=(Retain(priority=PRIORITY_MAX),)),
        ),
        (
            {"retain": [{"min_ttl": 9, "max_ttl": 5}]},
            "retain",
            Outcome.CLIPPED,
            "min_ttl: above max_ttl",
            Hint(retain=(Retain(min_ttl=5.0, max_ttl=5.0),)),
        ),
    ],
)
def test_what_is_not_accepted_has_a_reason(
    said: object, part: str, outcome: Outcome, reason: str, hint: Hint
) -> None:
    read = read_hint(said)
    (verdict,) = read.verdicts
    assert (verdict.part, verdict.outcome) == (part, outcome)
    assert reason in verdict.reason
    assert read.hint == hint


def test_one_bad_part_spoils_no_other() -> None:
    hint, verdicts = read_hint({"session": "a", "expect_s": "soon", "retain": [{}, {"end": -1}]})
    assert hint == Hint(session="a", retain=(Retain(),))
    assert [verdict.outcome.value for verdict in verdicts] == [
        "accepted", "rejected", "accepted", "rejected",
    ]  # fmt: skip


def test_ranges_are_bounded() -> None:
    hint, verdicts = read_hint({"retain": [{}] * 10_000})
    assert len(hint.retain) == RANGES_MAX
    assert len(verdicts) == RANGES_MAX + 1
    assert verdicts[-1].outcome is Outcome.CLIPPED


NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400)])
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text() | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)
RANGES = st.dictionaries(st.sampled_from(Retain.__struct_fields__), NUMBERS | ANYTHING)
LIKELY = st.dictionaries(
    st.sampled_from(Hint.__struct_fields__), ANYTHING | st.lists(RANGES, max_size=40) | st.text(max_size=300)
)


@given(ANYTHING | LIKELY)
@example({"retain": [{"start": 10**30, "end": 10**30}]})
@example({"retain": [{"start": TOKENS_MAX + 1, "end": TOKENS_MAX + 2}]})
def test_anything_is_read_and_bounds_hold(said: object) -> None:
    hint, verdicts = read_hint(said)
    for name in (hint.session, hint.parent):
        assert name is None or 0 < len(name) <= NAME_CHARACTERS_MAX
        assert name is None or name.encode()
    assert hint.expect_s is None or 0.0 <= hint.expect_s <= EXPECT_S_MAX
    assert len(hint.retain) <= RANGES_MAX
    for each in hint.retain:
        assert 0 <= each.start <= TOKENS_MAX
        assert each.end is None or each.start < each.end <= TOKENS_MAX
        assert 0 <= each.priority <= PRIORITY_MAX
        assert 0.0 <= each.min_ttl <= each.max_ttl <= TTL_S_MAX
    assert all(bool(verdict.reason) == (verdict.outcome is not Outcome.ACCEPTED) for verdict in verdicts)
    assert {verdict.part for verdict in verdicts} <= {*Hint.__struct_fields__, UNKNOWN, WHOLE}


@given(LIKELY)
def test_what_was_read_is_accepted_as_it_is(said: dict[str, object]) -> None:
    hint, _ = read_hint(said)
    told = {name: value for name in hint.__struct_fields__ if (value := getattr(hint, name)) != ()}
    told["retain"] = [{name: getattr(each, name) for name in each.__struct_fields__} for each in hint.retain]
    again, verdicts = read_hint(json.loads(json.dumps(told)))
    assert again == hint
    assert {verdict.outcome for verdict in verdicts} <= {Outcome.ACCEPTED}
