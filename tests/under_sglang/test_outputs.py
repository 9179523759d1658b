"""Answers equal those of an engine that computes everything, whatever became of the stored KV; hits are proven."""

from __future__ import annotations

import pytest

from rigs.sglang.keepers import WAYS
from rigs.sglang.prompts import HIT_TOKENS, PROMPTS, ROUNDS
from rigs.sglang.scenarios import Stage, bits_flipped, restart, truncated, weights_changed
from under_sglang.conftest import Keep

ALL = ROUNDS * PROMPTS
EVERYTHING = PROMPTS * HIT_TOKENS
Reference = list[list[int]]


def first_sure(way: str) -> int:
    """The first round in which an engine must find all that was there when it started.

    The linker answers the scheduler from what it has heard of the manager so far, and that begins at its start.
    """
    return 1 if way == "linker" else 0


@pytest.mark.parametrize("way", WAYS)
def test_after_a_restart_everything_is_found(
    stage: Stage, keep: Keep, reference: Reference, way: str
) -> None:
    outcome = restart(stage, keep(way), reference)
    assert (outcome.asked, outcome.wrong) == (ALL, 0)
    assert outcome.found[first_sure(way) :] == [EVERYTHING] * (ROUNDS - first_sure(way))


@pytest.mark.parametrize("way", WAYS)
def test_flipped_bits_are_misses(stage: Stage, keep: Keep, reference: Reference, way: str) -> None:
    """And what was computed again is found after that."""
    kept = keep(way)
    outcome = bits_flipped(stage, kept, reference)
    assert (outcome.asked, outcome.wrong) == (ALL, 0)
    assert outcome.found[0] == 0
    assert kept.metrics()['kvbm_failures_total{tier="disk",kind="corrupt"}'] > 0


@pytest.mark.parametrize("way", WAYS)
def test_files_cut_in_half_are_misses_or_right(
    stage: Stage, keep: Keep, reference: Reference, way: str
) -> None:
    outcome = truncated(stage, keep(way), reference)
    assert (outcome.asked, outcome.wrong) == (ALL, 0)
    assert outcome.found[0] < EVERYTHING
    assert outcome.found[-1] == EVERYTHING


@pytest.mark.parametrize("way", WAYS)
def test_kv_of_other_weights_at_the_same_path_is_not_found(
    stage: Stage, keep: Keep, reference: Reference, way: str
) -> None:
    outcome = weights_changed(stage, keep(way), reference)
    assert (outcome.asked, outcome.wrong) == (ALL, 0)
    assert outcome.found[0] == 0
    assert outcome.found[1 + first_sure(way) :] == [EVERYTHING] * (ROUNDS - 1 - first_sure(way))


@pytest.mark.parametrize("scenario", [bits_flipped, weights_changed])
def test_wrong_kv_would_be_noticed(stage: Stage, keep: Keep, reference: Reference, scenario: object) -> None:
    """The negative control: SGLang's own files, which nothing verifies, change every answer."""
    assert callable(scenario)
    outcome = scenario(stage, keep("file"), reference)
    assert outcome.found[0] == EVERYTHING
    assert outcome.wrong == ALL


def test_sglangs_own_files_outlast_a_restart(stage: Stage, keep: Keep, reference: Reference) -> None:
    """The rig itself, without anything of ours."""
    outcome = restart(stage, keep("file"), reference)
    assert (outcome.asked, outcome.wrong) == (ALL, 0)
    assert outcome.found == [EVERYTHING] * ROUNDS
