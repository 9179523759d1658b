"""The worked examples of docs/guides/extending.md keep the contracts that the guide names, and do their own part."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import kvbm
from kvbm.block import Outcome, SlotIndex
from kvbm.layout import BlockLayout, Namespace
from kvbm.policy import EvictionPolicy
from kvbm.testing.copier_contract import PAIRS, CopierContract
from kvbm.testing.policy_contract import PolicyContract
from kvbm.testing.stored_runs import LAYOUT, RunMemory, load, make_key, store
from kvbm.testing.tier_contract import TierContract
from kvbm.tiers.contract import BlockHead, RunTier
from kvbm.transfer import CpuCopier, DeviceCache
from kvbm.transfer.copier import Copier
from rigs.checkout import ROOT
from rigs.mini_engine import by_path

EXAMPLES = ROOT / "examples" / "extending"
GUIDE = ROOT / "docs/guides/extending.md"
dict_tier, fifo_policy = by_path(EXAMPLES / "dict_tier.py"), by_path(EXAMPLES / "fifo_policy.py")
logging_copier, tiny_engine = by_path(EXAMPLES / "logging_copier.py"), by_path(EXAMPLES / "tiny_engine.py")


class TestDictTier(TierContract):
    def make_tier(
        self, tmp_path: Path, slot_count: int, layout: BlockLayout, namespace: Namespace, pending_limit: int
    ) -> RunTier:
        tier: RunTier = dict_tier.DictTier(slot_count, namespace.fingerprint, pending_limit)
        return tier

    def test_a_flipped_bit_is_a_corrupt_miss(self, tier: Any) -> None:
        store(tier, LAYOUT, make_key(1), 0)
        held = tier.blocks[0]
        tier.blocks[0] = held._replace(content=bytes([held.content[0] ^ 1]) + held.content[1:])
        missed = load(tier, LAYOUT, make_key(1), 0)
        assert (missed.outcome, missed.corrupt) == (Outcome.MISS, True)

    @pytest.mark.parametrize("pending", [False, True])
    def test_a_closed_tier_gives_its_descriptor_back(self, tmp_path: Path, pending: bool) -> None:
        tier = self.make(tmp_path)
        if pending:
            sources = RunMemory.of([make_key(1)], LAYOUT)
            assert (
                tier.submit_store(1, [BlockHead(make_key(1), None)], SlotIndex(0), sources.views)
                is Outcome.PENDING
            )
        os.fstat(tier.fileno())
        tier.close(keep=False)
        assert len(tier.poll()) == pending
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(tier.fileno())


class TestLeafFirstFifo(PolicyContract):
    admits_all = True

    def make_policy(self, slot_count: int) -> EvictionPolicy:
        policy: EvictionPolicy = fifo_policy.LeafFirstFifo(slot_count)
        return policy

    def test_the_leaf_that_came_first_goes_first(self) -> None:
        policy = self.make_policy(4)
        policy.inserted([b"a", b"b"], [0, 1], -1, 1.0)
        policy.inserted([b"c"], [2], -1, 2.0)
        policy.evictable([0, 1, 2])
        policy.requested([b"a", b"b"], [0, 1], 3.0)  # a use does not matter
        assert policy.victims(3, [b"d"], (), 4.0) == [1, 0, 2]


class TestLoggingCopier(CopierContract):
    def make_copier(self, cache: DeviceCache, arena: torch.Tensor) -> Copier:
        copier: Copier = logging_copier.LoggingCopier(CpuCopier(cache, arena))
        return copier

    def test_copies_are_counted_and_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, "logging_copier")
        with self.rig("LBNHC") as rig:
            rig.copier.store(PAIRS)
            rig.copier.load(PAIRS[:2])
            counted: Any = rig.copier
            assert counted.blocks == {"store": len(PAIRS), "load": 2}
        assert caplog.messages == [f"store of {len(PAIRS)} blocks begun", "load of 2 blocks begun"]


PROMPTS = [[7, *range(20)], [9, *range(30)], [7, *range(20), 5, 5], [7, *range(20)]]


def answers(host: str) -> tuple[list[float], int]:
    """The engine's answers to the prompts, and the number of tokens that it computed."""
    engine = tiny_engine.TinyEngine()
    with kvbm.BlockManager(engine.layout, host=host, namespace=engine.namespace) as manager:
        return [engine.answer(prompt, manager) for prompt in PROMPTS], engine.computed


def test_the_engine_answers_the_same_with_hits_and_computes_less() -> None:
    expected = []
    for prompt in PROMPTS:  # each with a cache of its own, in which nothing can hit
        engine = tiny_engine.TinyEngine()
        with kvbm.BlockManager(engine.layout, host="1MB", namespace=engine.namespace) as manager:
            expected.append(engine.answer(prompt, manager))
        assert engine.computed == len(prompt)
    found, computed = answers("1MB")
    assert found == expected
    # All full blocks of the third and fourth prompt were held: only the rest is computed.
    assert computed == len(PROMPTS[0]) + len(PROMPTS[1]) + 3 + 1


def test_an_engine_that_loads_wrong_kv_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right, _ = answers("1MB")
    monkeypatch.setattr(kvbm.Hit, "onboard", lambda hit, kv_cache, blocks: hit.blocks)  # nothing arrives
    assert answers("1MB")[0] != right


@pytest.mark.skipif(not GUIDE.exists(), reason="a source distribution has no docs")
def test_the_guide_quotes_the_examples_and_this_file() -> None:
    sources = "".join(path.read_text() for path in (*EXAMPLES.glob("*.py"), Path(__file__)))
    written = "".join(sources.split())  # a formatter may break the same lines elsewhere
    quoted = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(quoted) >= 4
    assert [block for block in quoted if "".join(block.split()) not in written] == []
    named = set(re.findall(r"examples/extending/(\w+\.py)", GUIDE.read_text()))
    assert named == {path.name for path in EXAMPLES.glob("*.py")}
