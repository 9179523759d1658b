"""What clients ask to be kept (`hints.Retain`): tokens become blocks, times become favours and deadlines, and every
range gets its verdict.

A range is retained in each tier within the budget of that tier (`policy.retained`); the verdict is that of the tier
which keeps the least of it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvbm.block import BlockKey
from kvbm.clock import Clock
from kvbm.hints import NEUTRAL_PRIORITY, TTL_S_MAX, ClientHint, Outcome, Retain, Verdict, Why
from kvbm.layout import BlockLayout
from kvbm.manager.deadlines import Deadlines
from kvbm.manager.pool import SlotPool

KEPT_S = 3600.0
"""How long a range of a higher priority is retained that names no `min_ttl`."""
_AT_ONCE = 512
_PART = "retain"

Judging: TypeAlias = Generator[None, None, tuple[Verdict, ...]]
"""A judgement that yields where it gives others their turn."""


def goes_first(each: Retain, tokens: int | None = None) -> bool:
    """Whether the range says that the whole request, of so many `tokens`, may go before others."""
    whole = each.start == 0 and (each.end is None or (tokens is not None and each.end >= tokens))
    return whole and each.priority < NEUTRAL_PRIORITY and not each.min_ttl


@dataclass(slots=True, eq=False)
class Retaining:
    """The ranges that the clients of one space name. Owned by the manager's thread. `pools` are those of the tiers that
    keep blocks, as they are now."""

    layout: BlockLayout
    pools: Callable[[], Sequence[SlotPool[BlockKey]]]
    clock: Clock
    deadlines: Deadlines = field(default_factory=Deadlines)

    def judge(self, keys: Sequence[BlockKey], asker: ClientHint) -> Judging:
        """Do what the hint says of the chain that is asked for; a verdict for each range."""
        self.deadlines.asked(keys)
        verdicts: list[Verdict] = []
        for each in asker.hint.retain:
            if verdicts:
                yield
            verdicts.append((yield from self._judge(keys, asker.tenant, each)))
        return tuple(verdicts)

    def _judge(self, keys: Sequence[BlockKey], tenant: str, each: Retain) -> Generator[None, None, Verdict]:
        if self.layout.groups:
            return _nothing("the model has several kinds of layers")
        tokens = self.layout.block_tokens
        first = each.start // tokens
        end = len(keys) if each.end is None else min(len(keys), -(-each.end // tokens))
        if first >= end:
            return _nothing("no whole block of the prompt lies there")
        keep_s = each.min_ttl or (min(each.max_ttl, KEPT_S) if each.priority > NEUTRAL_PRIORITY else 0.0)
        ends = each.max_ttl < TTL_S_MAX
        if not keep_s and not ends and not goes_first(each, len(keys) * tokens):
            return _nothing(
                f"neither a time, nor a priority above {NEUTRAL_PRIORITY}, nor one below for the whole request"
            )
        kept = noted = end - first
        if keep_s:
            kept = yield from self._retain(keys[first:end], tenant, keep_s, each.priority)
        if ends:
            noted = self.deadlines.add(keys, first, end, self.clock() + each.max_ttl, tenant)
        return _verdict(kept, noted, end - first)

    def _retain(
        self, keys: Sequence[BlockKey], tenant: str, keep_s: float, priority: int
    ) -> Generator[None, None, int]:
        """Of how many of the blocks every tier will keep that long."""
        least = len(keys)
        for tier in range(len(self.pools())):
            kept = 0
            for start in range(0, len(keys), _AT_ONCE):
                if start:
                    yield
                pool, now_s = self.pools()[tier], self.clock()
                some = list(keys[start : start + _AT_ONCE])
                # A block that is still being filled is retained from its commit on.
                slots = pool.slots_of(some)
                done = pool.favouring.retain(some, slots, tenant, now_s + keep_s, priority, now_s)
                kept += done
                if done < len(some):
                    break
            least = min(least, kept)
        return least


def final_verdicts(read: Iterable[Verdict], judged: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """The verdicts of a hint's parts once its ranges were judged, each part once: a range that the form took has the
    verdict that it got later, unless that only accepts it too."""
    later, final = list(judged), list[Verdict]()
    for each in read:
        if each.part == _PART and each.outcome is not Outcome.REJECTED and later:
            decided = later.pop(0)
            final.append(each if decided.outcome is Outcome.ACCEPTED else decided)
        else:
            final.append(each)
    return (*final, *later)


def of_ranges(verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """Those of ranges among the verdicts."""
    return tuple(each for each in verdicts if each.part == _PART)


def _nothing(reason: str) -> Verdict:
    return Verdict(_PART, Outcome.REJECTED, reason, Why.NOTHING)


def _verdict(kept: int, noted: int, asked: int) -> Verdict:
    if kept == noted == asked:
        return Verdict(_PART, Outcome.ACCEPTED)
    if not kept or not noted:
        return Verdict(_PART, Outcome.REJECTED, "the budget is used up", Why.BUDGET)
    return Verdict(
        _PART, Outcome.CLIPPED, f"{min(kept, noted)} of {asked} blocks: the budget is used up", Why.BUDGET
    )
