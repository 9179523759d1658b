"""The blocks that requests asked for, as a tree of runs, resident or not any more.

A *run* is a stretch of one chain that requests have always used as a whole. Where a request leaves a run, the run
is cut in two. The resident part of a run is always its beginning, because leaves are evicted first. Runs that left
the tier stay as history until there are too many.

Names are 64-bit numbers, one per block, each of which stands for the whole chain up to its block. They lie in one log,
a stretch per run, so that cutting a run copies nothing; the log is packed when half of it is garbage.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvbm.block import NO_SLOT

_FEW = 12
"""Up to so many slots a loop is faster than a call of numpy."""
_PACK_BLOCKS_MIN = 4096
_MOVED_BLOCKS_MAX = 256
NO_RUN = -1


class RunTree:
    """Runs, numbered from 0; their fields are parallel arrays, read and written by the policy.

    `parent`, `child`, `next` and `previous` link the tree (NO_RUN: none). `length` counts the run's blocks, `resident`
    those of them that are in the tier, `resident_children` the continuations that have some there. `branches` counts
    the requests that left the known chain behind this run. `scale` times the seconds since `used_s` is the run's age,
    `owner` the session that alone uses it (`words`). About 100 bytes a run and 12 a block, and a dictionary entry a
    run.
    """

    def __init__(self, slot_count: int) -> None:
        self.run_of = array("i", [NO_RUN]) * slot_count
        self.start, self.length, self.resident = array("i"), array("i"), array("i")
        self.parent, self.child = array("i"), array("i")
        self.next, self.previous = array("i"), array("i")
        self.resident_children, self.branches = array("i"), array("i")
        self.used_s = array("d")
        self.uses, self.turn = array("i"), array("i")
        self.kind, self.early_kind = array("i"), array("i")
        self.weight, self.scale = array("f"), array("f")
        self.owner = array("i")
        self.log_names, self.log_slots = array("q"), array("i")
        self.first: dict[int, int] = {}
        self.live_blocks = self.resident_blocks = self.resident_runs = 0
        self._free: list[int] = []
        self._fields = (
            *(self.start, self.length, self.resident, self.parent, self.child, self.next, self.previous),
            *(
                self.resident_children,
                self.branches,
                self.uses,
                self.kind,
                self.early_kind,
                self.turn,
                self.owner,
            ),
        )

    def __len__(self) -> int:
        """Runs that are known."""
        return len(self.start) - len(self._free)

    # ---- finding

    def match(self, names: array[int]) -> tuple[list[int], int]:
        """The runs of the longest known prefix and its length. A run that the chain leaves midway is cut there."""
        path: list[int] = []
        position, end = 0, len(names)
        first, start, length, log = self.first, self.start, self.length, self.log_names
        while position < end:
            run = first.get(names[position], NO_RUN)
            if run < 0:
                break
            begin, size = start[run], length[run]
            if position + size <= end and log[begin + size - 1] == names[position + size - 1]:
                position += size  # the last name says the whole chain up to it
            else:
                same = self.common(run, names, position)
                self.cut(run, same)
                path.append(run)
                return path, position + same
            path.append(run)
        return path, position

    def common(self, run: int, names: array[int], position: int) -> int:
        """How many of the run's first blocks are `names[position:]`; at least the first one is."""
        begin, log = self.start[run], self.log_names
        low, high = 1, min(self.length[run], len(names) - position)
        while low < high:
            middle = (low + high + 1) // 2
            if log[begin + middle - 1] == names[position + middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def tail_slot(self, run: int) -> int:
        """The slot of the run's last resident block."""
        return self.log_slots[self.start[run] + self.resident[run] - 1]

    def slots(self, run: int) -> array[int]:
        """The slots of its resident blocks, in order."""
        begin = self.start[run]
        return self.log_slots[begin : begin + self.resident[run]]

    def like(self, run: int) -> list[int]:
        """The runs behind this one that have its kind and its request: tails, as the chain's other runs differ."""
        found, child = [], self.child[run]
        while child >= 0:
            if self.turn[child] == self.turn[run] and self.kind[child] == self.kind[run]:
                found.append(child)
            child = self.next[child]
        return found

    # ---- growing

    def add(self, parent: int, names: array[int]) -> int:
        """Add a run of these blocks, none of them resident, behind the last block of `parent`."""
        run = self._new_run()
        self.start[run], self.length[run] = len(self.log_names), len(names)
        self.log_names.extend(names)
        self.log_slots.extend(array("i", [NO_SLOT]) * len(names))
        self.live_blocks += len(names)
        self._link(run, parent)
        self.first[names[0]] = run
        return run

    def cut(self, run: int, size: int) -> int:
        """Cut the run behind its first `size` blocks. Returns the run of the others, or NO_RUN when there are none."""
        if size >= self.length[run]:
            return NO_RUN
        assert size > 0
        rest = self._new_run()
        begin = self.start[run] + size
        self.start[rest], self.length[rest] = begin, self.length[run] - size
        self.length[run] = size
        copied = (
            self.branches,
            self.uses,
            self.kind,
            self.early_kind,
            self.turn,
            self.resident_children,
            self.owner,
        )
        for field in copied:
            field[rest] = field[run]
        self.used_s[rest], self.scale[rest] = self.used_s[run], self.scale[run]
        self.branches[run] = 0
        staying = min(size, self.resident[run])
        self.resident[rest] = self.resident[run] - staying
        self.resident[run] = staying
        self._assign(self.slots(rest), rest)
        child = self.child[rest] = self.child[run]
        while child >= 0:
            self.parent[child] = rest
            child = self.next[child]
        self.child[run] = NO_RUN
        self.resident_children[run] = 0
        self._link(rest, run)
        if self.resident[rest]:
            self.resident_children[run] = 1
            self.resident_runs += 1
        self.first[self.log_names[begin]] = rest
        return rest

    def extend(self, run: int, names: array[int]) -> None:
        """Append blocks to a run without continuations; it moves to the end of the log unless it is there."""
        assert self.child[run] < 0
        assert self.can_extend(run)
        self._to_end_of_log(run)
        self.log_names.extend(names)
        self.log_slots.extend(array("i", [NO_SLOT]) * len(names))
        self.length[run] += len(names)
        self.live_blocks += len(names)
        self._pack_if_due()

    def can_extend(self, run: int) -> bool:
        """Whether extending it is cheap: it is short, or at the end of the log already."""
        return self.length[run] < _MOVED_BLOCKS_MAX or self.start[run] + self.length[run] == len(
            self.log_names
        )

    def can_merge(self, run: int, rest: int) -> bool:
        """Whether they may be one run again: no other continues the first, and both are resident alike."""
        return (
            self.child[run] == rest
            and self.next[rest] < 0
            and (self.resident[run] == self.length[run] or not self.resident[rest])
            and (self.resident[run] == 0) == (self.resident[rest] == 0)
        )

    def merge(self, run: int, rest: int) -> None:
        """Undo a `cut`: make a run and its only continuation one."""
        assert self.child[run] == rest
        assert self.next[rest] < 0
        assert not self.resident[rest] or self.resident[run] == self.length[run]
        if self.start[run] + self.length[run] != self.start[rest]:
            self._to_end_of_log(run)
            begin, size = self.start[rest], self.length[rest]
            self.log_names.extend(self.log_names[begin : begin + size])
            self.log_slots.extend(self.log_slots[begin : begin + size])
        self._assign(self.slots(rest), run)
        self.resident_runs -= self.resident[rest] > 0 and self.resident[run] > 0
        name = self.log_names[self.start[rest]]
        self.length[run] += self.length[rest]
        self.resident[run] += self.resident[rest]
        self.branches[run] = self.branches[rest]
        self.resident_children[run] = self.resident_children[rest]
        child = self.child[run] = self.child[rest]
        while child >= 0:
            self.parent[child] = run
            child = self.next[child]
        self._free_run(rest, name)
        self._pack_if_due()

    # ---- residency

    def fill(self, run: int, slots: Sequence[int]) -> None:
        """The run's next blocks became resident in these slots."""
        at = self.start[run] + self.resident[run]
        self.log_slots[at : at + len(slots)] = array("i", slots)
        self._assign(slots, run)
        if not self.resident[run]:
            self.resident_runs += 1
            if self.parent[run] >= 0:
                self.resident_children[self.parent[run]] += 1
        self.resident[run] += len(slots)
        self.resident_blocks += len(slots)

    def trim(self, run: int, count: int) -> array[int]:
        """The run's last `count` resident blocks leave the tier; their slots, the last block's first."""
        end = self.start[run] + self.resident[run]
        gone = self.log_slots[end - count : end]
        gone.reverse()
        self._assign(gone, NO_RUN)
        self.resident[run] -= count
        self.resident_blocks -= count
        if not self.resident[run]:
            self.resident_runs -= 1
            if self.parent[run] >= 0:
                self.resident_children[self.parent[run]] -= 1
        return gone

    def remove(self, slot: int) -> None:
        """One block leaves out of turn. The blocks that continue it stay, as the first of a chain of their own."""
        run = self.run_of[slot]
        if slot == self.tail_slot(run) and not self.resident_children[run]:
            self.trim(run, 1)  # a chain that is given up from its end, as stores and loads that fail are
            return
        offset = self.slots(run).index(slot)
        if offset == 0 and self.length[run] > 1:
            self._drop_first(run)
            return
        self.cut(run, offset + 1)
        child = self.child[run]
        while child >= 0:
            following = self.next[child]
            if self.resident[child]:
                self._unlink(child)
            child = following
        self.trim(run, 1)

    def _drop_first(self, run: int) -> None:
        """Forget a run's first block, without a cut: a chain may be cleared from its front, block by block."""
        self._unlink(run)
        begin = self.start[run]
        if self.first.get(self.log_names[begin]) == run:
            del self.first[self.log_names[begin]]
        self.first[self.log_names[begin + 1]] = run
        self.run_of[self.log_slots[begin]] = NO_RUN
        self.start[run] = begin + 1
        self.length[run] -= 1
        self.resident[run] -= 1
        self.live_blocks -= 1
        self.resident_blocks -= 1
        self.resident_runs -= not self.resident[run]

    def leads_to(self, run: int, descendant: int) -> bool:
        """Whether the run is the other one or lies before it: keys that contradict one another cause that."""
        while descendant >= 0 and descendant != run:
            descendant = self.parent[descendant]
        return descendant == run

    def move(self, run: int, parent: int) -> None:
        """Put a run without resident blocks behind the last block of another."""
        assert not self.resident[run]
        self._unlink(run)
        self._link(run, parent)

    # ---- forgetting

    def oldest_gone(self) -> list[int]:
        """Of the runs without resident blocks and continuations a tenth, one at least: those used longest ago."""
        gone = np.frombuffer(self.resident, np.int32) == 0
        gone &= np.frombuffer(self.child, np.int32) < 0
        gone &= np.frombuffer(self.length, np.int32) > 0
        ends = np.flatnonzero(gone)
        used_s = np.frombuffer(self.used_s)[ends]
        oldest: list[int] = ends[np.argsort(used_s, kind="stable")][: max(1, len(ends) // 10)].tolist()
        return oldest

    def forget(self, run: int) -> None:
        """Drop a run without resident blocks and continuations from the history."""
        assert not self.resident[run]
        assert self.child[run] < 0
        self._unlink(run)
        self.live_blocks -= self.length[run]
        self._free_run(run, self.log_names[self.start[run]])
        self._pack_if_due()

    def _free_run(self, run: int, name: int) -> None:
        if self.first.get(name) == run:
            del self.first[name]
        self.length[run] = self.resident[run] = self.turn[run] = 0
        self.parent[run] = self.child[run] = NO_RUN
        self.weight[run] = 0.0
        self._free.append(run)

    def _to_end_of_log(self, run: int) -> None:
        begin, size = self.start[run], self.length[run]
        if begin + size != len(self.log_names):
            self.start[run] = len(self.log_names)
            self.log_names.extend(self.log_names[begin : begin + size])
            self.log_slots.extend(self.log_slots[begin : begin + size])

    def _pack_if_due(self) -> None:
        if len(self.log_names) > max(_PACK_BLOCKS_MIN, 2 * self.live_blocks):
            self._pack()

    def _pack(self) -> None:
        """Drop the garbage from the log."""
        length = np.frombuffer(self.length, np.int32)
        start = np.frombuffer(self.start, np.int32)
        before = np.cumsum(length, dtype=np.int64) - length
        kept = np.repeat(start - before, length) + np.arange(int(length.sum()))
        names = np.frombuffer(self.log_names, np.int64)[kept]
        slots = np.frombuffer(self.log_slots, np.int32)[kept]
        del length, start
        self.start[:] = array("i", before.astype(np.int32).tobytes())
        self.log_names, self.log_slots = array("q", names.tobytes()), array("i", slots.tobytes())

    # ---- links

    def _assign(self, slots: Sequence[int], run: int) -> None:
        """The blocks in these slots belong to this run now."""
        if len(slots) > _FEW:
            numbers = slots if isinstance(slots, array) else array("i", slots)
            np.frombuffer(self.run_of, np.int32)[np.frombuffer(numbers, np.int32)] = run
            return
        for slot in slots:
            self.run_of[slot] = run

    def _new_run(self) -> int:
        if self._free:
            run = self._free.pop()
            for field in self._fields:
                field[run] = 0
            self.weight[run] = 0.0
        else:
            run = len(self.start)
            for field in self._fields:
                field.append(0)
            self.used_s.append(0.0)
            self.weight.append(0.0)
            self.scale.append(1.0)
        self.parent[run] = self.child[run] = self.next[run] = self.previous[run] = NO_RUN
        self.early_kind[run] = NO_RUN
        self.scale[run] = 1.0
        return run

    def _link(self, run: int, parent: int) -> None:
        self.parent[run] = parent
        if parent >= 0:
            sibling = self.next[run] = self.child[parent]
            self.previous[run] = NO_RUN
            self.child[parent] = run
            if sibling >= 0:
                self.previous[sibling] = run

    def _unlink(self, run: int) -> None:
        parent, previous, following = self.parent[run], self.previous[run], self.next[run]
        if parent >= 0:
            if previous >= 0:
                self.next[previous] = following
            else:
                self.child[parent] = following
            if following >= 0:
                self.previous[following] = previous
            if self.resident[run]:
                self.resident_children[parent] -= 1
        self.parent[run] = self.next[run] = self.previous[run] = NO_RUN
