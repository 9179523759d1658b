"""What happens to an engine's KV between two lives of it, and what the second one answers.

Each scenario stores all prompts, lets something happen while no engine runs, and asks them again: `ROUNDS` times, and
before each round the engine forgets what it has in its own pools. The tests and the table of the guide both run these.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rigs.manager_probe import wait_for
from rigs.sglang.engine_process import Answer, Engine, Nursery
from rigs.sglang.keepers import (
    Keeper,
    change_weights,
    copy_of,
    cut_in_half,
    flip_every_byte,
    wait_until_settled,
    wait_until_stored,
)
from rigs.sglang.modes import plain
from rigs.sglang.prompts import HIT_TOKENS, PAGES, PROMPTS, ROUNDS, different, prompts, texts

FOUND_S = 60.0


class Outcome(msgspec.Struct, frozen=True):
    """Of `asked` answers so many are not those of an engine that never saw the old KV; tokens found in each round."""

    asked: int
    wrong: int
    found: list[int]


class Stage:
    """Where scenarios play: one model, whose answers are known, and engines with logs below a directory."""

    def __init__(self, nursery: Nursery, model: Path, directory: Path) -> None:
        self.nursery, self.model, self.directory = nursery, model, directory
        self._starts = 0

    def engine(
        self, arguments: dict[str, Any], variables: dict[str, str] | None = None, name: str = "engine"
    ) -> Engine:
        """An engine that is ready."""
        self._starts += 1
        log = self.directory / f"{name}-{self._starts}.log"
        return self.nursery.start(arguments, log, variables).ready()

    def on(self, kept: Keeper, model: Path | None = None, **more: Any) -> Engine:
        """An engine above a keeper."""
        return self.engine(kept.arguments(model or self.model, **more), kept.variables(), kept.name)

    def reference(self, model: Path | None = None) -> list[list[int]]:
        """What an engine with its device pool alone answers."""
        with self.engine(plain(model or self.model), name="plain") as engine:
            return texts(engine.generate(prompts()))

    def store(self, kept: Keeper, model: Path | None = None, **more: Any) -> list[Answer]:
        """Let an engine compute all prompts, and end it when they would outlast it."""
        with self.on(kept, model, **more) as engine:
            answers = engine.generate(prompts())
            wait_until_stored(kept, PROMPTS * PAGES)
            engine.end()
        return answers

    def outcome(
        self, kept: Keeper, reference: list[list[int]], model: Path | None = None, **more: Any
    ) -> Outcome:
        """Ask all prompts of a new engine, `ROUNDS` times, each time from what is kept alone."""
        answers: list[Answer] = []
        with self.on(kept, model, **more) as engine:
            for _ in range(ROUNDS):
                assert engine.call("flush")
                answers += engine.generate(prompts())
                wait_until_settled(kept)
            engine.end()
        found = [
            sum(answer.cached for answer in answers[i : i + PROMPTS]) for i in range(0, len(answers), PROMPTS)
        ]
        return Outcome(len(answers), different(answers, reference), found)


def wait_until_found(engine: Engine, reference: list[list[int]], **request: Any) -> None:
    """Ask until all that can be found of all prompts is found below the engine's own pools; every answer is right."""
    found = 0

    def found_all() -> bool:
        nonlocal found
        assert engine.call("flush")
        answers = engine.generate(prompts(), **request)
        assert different(answers, reference) == 0
        found = sum(answer.cached for answer in answers)
        return found == PROMPTS * HIT_TOKENS

    wait_for(found_all, FOUND_S, lambda: f"{found} of {PROMPTS * HIT_TOKENS} tokens are found")


def restart(stage: Stage, kept: Keeper, reference: list[list[int]]) -> Outcome:
    """Nothing happens."""
    stage.store(kept)
    return stage.outcome(kept, reference)


def bits_flipped(stage: Stage, kept: Keeper, reference: list[list[int]]) -> Outcome:
    """A bit of every stored byte is flipped."""
    stage.store(kept)
    assert kept.damage(flip_every_byte)
    return stage.outcome(kept, reference)


def truncated(stage: Stage, kept: Keeper, reference: list[list[int]]) -> Outcome:
    """Every file loses its second half."""
    stage.store(kept)
    assert kept.damage(cut_in_half)
    return stage.outcome(kept, reference)


def weights_changed(stage: Stage, kept: Keeper, reference: list[list[int]]) -> Outcome:
    """Other weights come to lie at the same path."""
    model = copy_of(stage.model, stage.directory / f"changed-{kept.name}" / "model")
    first = stage.store(kept, model)
    assert different(first, reference) == 0
    change_weights(model)
    changed = stage.reference(model)
    assert changed != reference
    return stage.outcome(kept, changed, model)


SCENARIOS: dict[str, Callable[[Stage, Keeper, list[list[int]]], Outcome]] = {
    "restart": restart,
    "a bit of every stored byte flipped": bits_flipped,
    "every file cut in half": truncated,
    "other weights at the same path": weights_changed,
}
