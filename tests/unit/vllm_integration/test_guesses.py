"""Speculative decoding at the scheduler's half: a block with KV of a guess that was wrong is never stored.

A double of vLLM's scheduler and of a device: guesses count as computed when they are scheduled, and are taken back when
the device has rejected them. Asynchronously, the next step is scheduled before that is known.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the scheduler's half counts with vLLM's classes; vllm is not installed")

from kvbm.hashing import split_keys
from kvbm.protocol import Reserve
from kvbm.step_plan import StepPlan, StepReport
from rigs.leader import HASHES, TABLE
from rigs.scheduler_half import BLOCK_TOKENS, DONE, Side

GUESSES = 3
PROMPT_TOKENS = 6
TOKENS = 30 * BLOCK_TOKENS


class Device:
    """One request's KV: at each position whether it is of the right token. Steps are carried out in order."""

    def __init__(self, source: random.Random) -> None:
        self._random = source
        self._right: dict[int, bool] = {}
        self.known = PROMPT_TOKENS
        self.stored: list[int] = []

    def run(self, plan: StepPlan) -> int:
        """The step's stores, then its forward pass over the newest token and the guesses; how many were right."""
        for store in plan.stores:
            for block in store.device_blocks:
                index = TABLE.index(block)
                positions = range(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS)
                assert all(self._right.get(position, False) for position in positions), f"block {index}"
                self.stored.append(index)
        guessed = [self._random.random() < 0.6 for _ in range(GUESSES)]
        right = guessed.index(False) if False in guessed else GUESSES
        self._right[self.known - 1] = True
        for ahead, guess in enumerate(guessed):
            # What follows a wrong guess is wrong too, whatever its token is.
            self._right[self.known + ahead] = guess and ahead < right
        self.known += right + 1
        return right


@pytest.mark.parametrize("ahead", [0, 1], ids=["synchronous", "asynchronous"])
def test_no_block_with_a_wrong_guess_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    for seed in range(10):
        made = Side(tmp_path, monkeypatch)
        source = random.Random(seed)
        device = Device(source)
        request = made.request("r", 0, "")
        request.lora_request, request.num_tokens = None, PROMPT_TOKENS
        request.block_hashes = HASHES[: PROMPT_TOKENS // BLOCK_TOKENS]
        device._right.update(dict.fromkeys(range(PROMPT_TOKENS - 1), True))
        request.num_computed_tokens = PROMPT_TOKENS - 1
        made.side.added(request)
        unheard: list[tuple[StepPlan, int]] = []
        while request.num_tokens < TOKENS:
            plan = made.step(r=1 + GUESSES)
            request.num_computed_tokens += 1 + GUESSES
            for reserve in made.said(Reserve):
                assert len(split_keys(reserve.keys)) <= len(request.block_hashes)
                made.grant(reserve)
            unheard.append((plan, device.run(plan)))
            if len(unheard) > ahead:
                _hear(made, request, *unheard.pop(0))
        # All but the last few blocks, whose guesses are not confirmed yet.
        assert sorted(device.stored) == list(range(len(device.stored)))
        assert len(device.stored) >= TOKENS // BLOCK_TOKENS - 3
        made.side.close()
        made.manager.close()


def _hear(made: Side, request: Any, plan: StepPlan, right: int) -> None:
    """vLLM takes back the guesses that were wrong, and hashes what is sure."""
    request.num_computed_tokens -= GUESSES - right
    request.num_tokens += right + 1
    request.block_hashes = HASHES[: request.num_tokens // BLOCK_TOKENS]
    made.side.updated(DONE, StepReport(stored={store.store: (1, (), 0.1) for store in plan.stores}))
