"""What clients say reaches the manager, shapes what is kept, changes no answer, and is answered."""

from __future__ import annotations

import dataclasses
import random

from engine import reach
from engine.launcher import Launcher, differences
from engine.patience import wait_for_every_store
from engine.tier_settings import host
from engine.workload import Request, random_tokens, workload

BLOCKS = 10
LONG = BLOCKS * 32 + 5
"""Tokens of a prompt with ten complete blocks."""


def prompts(seed: int, hints: list[object]) -> list[Request]:
    """A long prompt for each of these hints."""
    source = random.Random(seed)
    return [
        Request(f"p{seed}-{i}", random_tokens(source, LONG), 4, hint=hint) for i, hint in enumerate(hints)
    ]


def test_a_hint_is_counted_answered_and_obeyed(launcher: Launcher) -> None:
    engine = launcher.start(host())
    engine.call(wait_for_every_store, timeout_s=5.0)
    asked = prompts(
        11,
        [
            None,
            {"session": "talk", "expect_s": 90000, "soon": True},
            {"session": "other", "store": False},
            "not a mapping",
        ],
    )
    answers = engine.run(asked)
    told = {name: said["kvbm_hints"] for name, said in answers.told.items()}
    assert told == {
        "p11-1": [
            {"part": "session", "outcome": "accepted"},
            {"part": "expect_s", "outcome": "clipped", "reason": "above 86400 s"},
            {"part": "unknown", "outcome": "rejected", "reason": "no such part"},
        ],
        "p11-2": [{"part": "session", "outcome": "accepted"}, {"part": "store", "outcome": "accepted"}],
        "p11-3": [{"part": "unknown", "outcome": "rejected", "reason": "no such part"}],
    }
    counted = launcher.metrics()
    assert counted['kvbm_hints_total{part="session",outcome="accepted",reason="none"}'] == 2
    assert counted['kvbm_hints_total{part="expect_s",outcome="clipped",reason="bound"}'] == 1
    assert counted['kvbm_hints_total{part="unknown",outcome="rejected",reason="unknown"}'] == 2

    assert engine.call(reach.reset, connector=False, timeout_s=20.0)
    again = engine.run(
        [dataclasses.replace(request, name=request.name + "+", hint=None) for request in asked]
    )
    cached = [again.cached_tokens[request.name + "+"] for request in asked]
    assert cached == [BLOCKS * 32, BLOCKS * 32, 0, BLOCKS * 32], "store: false is obeyed"
    assert not again.told, "who says nothing is told nothing"


def test_no_hint_changes_an_answer(launcher: Launcher, reference: dict[str, list[int]]) -> None:
    """Every request says something else, half of it nonsense, with a host tier that is too small for all."""
    engine = launcher.start(host(40))
    source = random.Random(5)

    def said() -> object:
        values: list[object] = [
            True,
            False,
            0,
            1,
            3.5,
            -1,
            "x",
            [],
            {},
            None,
            [{"start": 0, "end": 64, "priority": 90}],
        ]
        parts = ("session", "parent", "final", "expect_s", "retain", "prefetch", "demote", "store")
        return {part: source.choice(values) for part in source.sample(parts, source.randint(1, 8))}

    requests = [dataclasses.replace(request, hint=said()) for request in workload()]
    assert differences(reference, engine.run(requests)) == []
    assert any(name.startswith("kvbm_hints_total") for name in launcher.metrics())
