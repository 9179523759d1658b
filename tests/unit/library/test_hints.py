"""What is known of a prompt's future goes along with the question, and changes no answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the library copies torch tensors; torch is not installed")

from rigs.library import LocalHouse, SharedHouse, new_cache, prompt


@pytest.fixture(params=[LocalHouse, SharedHouse])
def house(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalHouse | SharedHouse]:
    """Opens block managers."""
    house: LocalHouse | SharedHouse = request.param(tmp_path)
    yield house
    house.close()


def test_a_hint_changes_no_hit_and_is_answered(house: LocalHouse | SharedHouse) -> None:
    rng, cache = random.Random(3), new_cache(1)
    with house.open(host="1MB") as manager:
        tokens = prompt(rng, 3)
        manager.offload(tokens, cache, [0, 1, 2])
        with manager.match(tokens, hint={"session": "s", "expect_s": -1}) as hit:
            assert hit.blocks == 3
            assert [(each.part, each.outcome.value) for each in hit.verdicts] == [
                ("session", "accepted"),
                ("expect_s", "rejected"),
            ]
        with manager.match(tokens, hint={"soon": 1}, extras=b"other") as hit:
            assert (hit.blocks, [each.part for each in hit.verdicts]) == (0, ["unknown"])
        with manager.match(tokens, hint={"session": "s", "prefetch": True}) as hit:
            (_, prefetch) = hit.verdicts
            assert (prefetch.part, prefetch.why.value) == ("prefetch", "nothing"), (
                "there is no disk to read from"
            )
        with manager.match(tokens) as hit:
            assert (hit.blocks, hit.verdicts) == (3, ())


def test_the_request_ends_with_its_block(tmp_path: Path) -> None:
    """Only then is it known from when on a client counts."""
    with LocalHouse(tmp_path).open(host="1MB", disk="1MB") as manager:
        tokens = prompt(random.Random(4), 3)
        manager.offload(tokens, new_cache(1), [0, 1, 2])
        sessions = manager.backend.space.foresight.sessions  # type: ignore[attr-defined]  # a local one
        with manager.match(tokens, hint={"session": "s", "expect_s": 40}):
            session = sessions.get("", "s")
            assert session.running
        assert not session.running
        assert session.look_s is not None, "it is expected back"
