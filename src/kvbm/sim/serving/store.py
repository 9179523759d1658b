"""A store that several nodes share, below their host memory: packs, what they cost in requests, and when they go.

It does what the manager's remote tier does: admission on each node, consecutive blocks of a chain gathered until a pack
is full, has waited long enough or waits in too much of host memory, blocks that host memory lost meanwhile left out,
packs found by other nodes a little later, packs in use touched now and then, also where host memory has their blocks,
and packs removed by age and size, the least recently used first. Nothing fails, and no transfer takes time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbm.errors import SettingsError
from kvbm.policy import AdmissionPolicy, admission_policies, make_admission
from kvbm.policy.contract import offer_all
from kvbm.settings import Settings
from kvbm.sim.serving.tier import SimulatedTier
from kvbm.tiers.remote.options import RemoteOptions
from kvbm.tiers.remote.pack_size import (
    LOAD_BYTES_MAX,
    OPEN_SHARE,
    PACK_BYTES,
    PACK_BYTES_MAX,
    blocks_of_a_load,
    blocks_of_a_pack,
    record_bytes,
)

POLL_S, SWEEP_S = RemoteOptions().poll_s, RemoteOptions().sweep_period_s
LOG_PERIOD_S = 1.0
KNOWN_AFTER_S = (LOG_PERIOD_S + POLL_S) / 2
"""A node writes down what it has stored once a second, and the others look every few seconds: this long on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRules:
    """A store and what nodes do with it, as the manager's settings say. `size_bytes` None: only `ttl_s` bounds it.

    `pack_blocks` and `load_blocks` go together in a write and in a read. Where a trace's block is so large that an
    engine would have it in several packs, one block takes `puts_each` writes and `gets_each` reads.
    """

    block_bytes: int
    size_bytes: int | None = None
    ttl_s: float = RemoteOptions().ttl_s
    admission: str = Settings().remote_admission
    linger_s: float = float(Settings().remote_linger_s)
    known_after_s: float = KNOWN_AFTER_S
    known_blocks: int = Settings().remote_known_blocks
    pack_blocks: int
    load_blocks: int
    puts_each: int = 1
    gets_each: int = 1

    @classmethod
    def of(cls, block_bytes: int, **others: Any) -> StoreRules:
        """For blocks of so many bytes, with the manager's packs."""
        parts = record_bytes(block_bytes) > PACK_BYTES_MAX
        return cls(
            block_bytes=block_bytes,
            pack_blocks=1 if parts else blocks_of_a_pack(block_bytes),
            load_blocks=blocks_of_a_load(block_bytes),
            puts_each=-(-block_bytes // PACK_BYTES) if parts else 1,
            gets_each=-(-block_bytes // LOAD_BYTES_MAX) if parts else 1,
            **others,
        )

    def check(self) -> None:
        """`SettingsError` for an unknown admission policy."""
        if self.admission not in (known := admission_policies()):
            raise SettingsError("--remote-admission", self.admission, f"one of {', '.join(known)}")


@dataclass(slots=True)
class StoreUse:
    """What a run did with a store. `byte_s` adds up every pack's bytes times the seconds that it lies there.

    `pack_puts` counts those that found the same pack there already (`existed`) too. `touches`, `log_puts` and
    `log_gets` are what nodes tell one another, through the store.
    """

    written_blocks: int = 0
    read_blocks: int = 0
    pack_puts: int = 0
    pack_gets: int = 0
    existed: int = 0
    again: int = 0
    """Blocks that were written although the store had them: their writer did not know yet."""
    touches: int = 0
    log_puts: int = 0
    log_gets: int = 0
    lost_blocks: int = 0
    """Blocks that host memory had given up before their turn."""
    refused_blocks: int = 0
    """Times that admission refused a block."""
    removed_blocks: int = 0
    byte_s: float = 0.0
    pauses_s: list[float] = field(default_factory=list)
    """For each read block: since its pack was written or used last."""


@dataclass(slots=True, eq=False)
class _Pack:
    """Blocks that are written together. `known_to`: nodes that know of it before `known_s`. `touched_s`: when each node
    has touched it."""

    blocks: tuple[int, ...]
    put_s: float
    used_s: float
    known_s: float
    known_to: set[int]
    touched_s: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Gathering:
    """A pack to be."""

    blocks: list[int]
    since_s: float


@dataclass(slots=True, eq=False)
class _Node:
    """One node's queue to the store."""

    host: SimulatedTier
    admission: AdmissionPolicy
    open: OrderedDict[int, _Gathering] = field(default_factory=OrderedDict)
    by_last: dict[int, _Gathering] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    open_blocks: int = 0
    logged_s: float = -math.inf


class SimulatedStore:
    """A store for one run, below these nodes' host memory. Time goes forward from call to call."""

    def __init__(self, rules: StoreRules, hosts: Sequence[SimulatedTier]) -> None:
        self.rules = rules
        self.use = StoreUse()
        self._nodes = [
            _Node(host, make_admission(rules.admission, rules.known_blocks, 0.0)) for host in hosts
        ]
        # By last use, and where each block lies: nodes that did not know of one another's may have written it twice.
        self._packs: OrderedDict[int, _Pack] = OrderedDict()
        self._where: dict[int, list[_Pack]] = {}
        self._by_blocks: dict[tuple[int, ...], _Pack] = {}
        self._blocks = 0

    @property
    def block_count(self) -> int:
        """Blocks that lie there."""
        return self._blocks

    def advance(self, now_s: float) -> None:
        """Time goes by: packs that have waited long enough are written, and old ones removed."""
        for number, node in enumerate(self._nodes):
            while node.open:
                gathering = next(iter(node.open.values()))
                due_s = gathering.since_s + self.rules.linger_s
                if due_s > now_s:
                    break
                self._write(number, gathering, due_s)
        while self._packs:
            pack = next(iter(self._packs.values()))
            if pack.used_s + self.rules.ttl_s >= now_s:
                break
            self._remove(pack, pack.used_s + self.rules.ttl_s)

    def holds(self, number: int, block: int, now_s: float) -> bool:
        """Whether this node knows that the block is there."""
        return self._find(number, block, now_s) is not None

    def read(self, number: int, blocks: Sequence[int], now_s: float) -> None:
        """The node reads these blocks of a chain, which it knows of."""
        use, rules = self.use, self.rules
        use.read_blocks += len(blocks)
        before: _Pack | None = None
        position = together = 0
        pause_s = 0.0
        for block in blocks:
            pack = self._find(number, block, now_s)
            assert pack is not None
            there = pack.blocks.index(block)
            if pack is before and there == position + 1 and together < rules.load_blocks:
                together += 1
            else:
                use.pack_gets += rules.gets_each
                together = 1
            if pack is not before:
                pause_s = now_s - pack.used_s
                self._used(number, pack, now_s)
            use.pauses_s.append(pause_s)
            before, position = pack, there

    def offered(self, number: int, blocks: Sequence[int], parent: int | None, now_s: float) -> None:
        """Blocks of a chain behind `parent` came into the node's host memory, or were asked for again."""
        node = self._nodes[number]
        for block in blocks:
            pack = self._find(number, block, now_s)
            if pack is not None and self._to_be_touched(number, pack, now_s):
                self._used(number, pack, now_s)
        new = [
            (block, before)
            for block, before in zip(blocks, (parent, *blocks), strict=False)
            if node.host.holds(block) and block not in node.waiting and not self.holds(number, block, now_s)
        ]
        taken = offer_all(node.admission, [block for block, _ in new], now_s)
        for (block, before), yes in zip(new, taken, strict=True):
            if yes:
                self._gather(number, block, before, now_s)
            else:
                self.use.refused_blocks += 1
        while node.open_blocks > max(node.host.free_count, node.host.slot_count // OPEN_SHARE):
            self._write(number, next(iter(node.open.values())), now_s)

    def finish(self, now_s: float) -> None:
        """The run is over: what waits is written, and what lies there is taken to stay until it is old."""
        for number, node in enumerate(self._nodes):
            while node.open:
                self._write(number, next(iter(node.open.values())), now_s)
        for pack in self._packs.values():
            self._charge(pack, pack.used_s + self.rules.ttl_s)

    # ---- inside

    def _find(self, number: int, block: int, now_s: float) -> _Pack | None:
        for pack in self._where.get(block, ()):
            if pack.known_s <= now_s or number in pack.known_to:
                return pack
        return None

    def _used(self, number: int, pack: _Pack, now_s: float) -> None:
        self._packs.move_to_end(id(pack))
        pack.used_s = now_s
        if self._to_be_touched(number, pack, now_s):
            pack.touched_s[number] = now_s
            self.use.touches += 1

    def _to_be_touched(self, number: int, pack: _Pack, now_s: float) -> bool:
        """Whether the node has not said for long that the pack is in use."""
        return now_s - pack.touched_s.get(number, pack.put_s) >= self.rules.ttl_s / 4

    def _gather(self, number: int, block: int, parent: int | None, now_s: float) -> None:
        node = self._nodes[number]
        gathering = node.by_last.pop(parent, None) if parent is not None else None
        if gathering is None:
            gathering = _Gathering([], now_s)
            node.open[id(gathering)] = gathering
        gathering.blocks.append(block)
        node.open_blocks += 1
        node.by_last[block] = gathering
        node.waiting.add(block)
        if len(gathering.blocks) >= self.rules.pack_blocks:
            self._write(number, gathering, now_s)

    def _write(self, number: int, gathering: _Gathering, now_s: float) -> None:
        node, use, rules = self._nodes[number], self.use, self.rules
        del node.open[id(gathering)], node.by_last[gathering.blocks[-1]]
        node.waiting.difference_update(gathering.blocks)
        node.open_blocks -= len(gathering.blocks)
        held = node.host.leading(gathering.blocks)
        use.lost_blocks += len(gathering.blocks) - held
        if not held:
            return
        blocks = tuple(gathering.blocks[:held])
        use.pack_puts += rules.puts_each
        there = self._by_blocks.get(blocks)
        if there is not None:
            # Its name is that of its blocks: the store refuses it, and the node has learned of it.
            use.existed += 1
            there.known_to.add(number)
            self._used(number, there, now_s)
            return
        pack = _Pack(blocks, now_s, now_s, now_s + rules.known_after_s, {number})
        self._packs[id(pack)] = self._by_blocks[blocks] = pack
        for block in blocks:
            use.again += block in self._where
            self._where.setdefault(block, []).append(pack)
        self._blocks += len(blocks)
        use.written_blocks += len(blocks)
        self._log(node, now_s)
        self._make_room(now_s)

    def _log(self, node: _Node, now_s: float) -> None:
        """What was stored is written down at once, or a second after the last time."""
        if now_s < node.logged_s:
            return  # with what waits for that already
        node.logged_s = max(now_s, node.logged_s + LOG_PERIOD_S)
        self.use.log_puts += 1
        self.use.log_gets += len(self._nodes) - 1

    def _make_room(self, now_s: float) -> None:
        if self.rules.size_bytes is None:
            return
        while self._packs and self._blocks * self.rules.block_bytes > self.rules.size_bytes:
            self._remove(next(iter(self._packs.values())), now_s)

    def _remove(self, pack: _Pack, now_s: float) -> None:
        del self._packs[id(pack)], self._by_blocks[pack.blocks]
        for block in pack.blocks:
            self._where[block].remove(pack)
            if not self._where[block]:
                del self._where[block]
        self._blocks -= len(pack.blocks)
        self.use.removed_blocks += len(pack.blocks)
        self._charge(pack, now_s)

    def _charge(self, pack: _Pack, until_s: float) -> None:
        self.use.byte_s += len(pack.blocks) * self.rules.block_bytes * (until_s - pack.put_s)
