"""Keep the runs that are expected to be used soonest: an online hazard model turned into a Gittins index.

See `runs` for the tree of runs, `features` for the features of a run, `hazard` for the model. This file lets requests
teach the model, and chooses the victims: the leaves with the lowest index, unless the newcomers' is lower still.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Hashable, Iterable, Sequence

from kvbm.block import NO_SLOT
from kvbm.policy.contract import ClientWord, none_leased
from kvbm.policy.gittins import features
from kvbm.policy.gittins.candidates import Candidates
from kvbm.policy.gittins.duel import Duel
from kvbm.policy.gittins.features import FIRST_NEW_BLOCKS, RUN_CODES, Position
from kvbm.policy.gittins.history import History
from kvbm.policy.gittins.learning import KINDS_MAX, Fitting, Learner
from kvbm.policy.gittins.names import names_of
from kvbm.policy.gittins.runs import NO_RUN, RunTree
from kvbm.policy.gittins.turns import TURNS_MAX, Turns
from kvbm.policy.gittins.words import Words

HISTORY_RUNS_MIN = 65_536
HISTORY_BLOCKS_MIN = 1 << 19
_BRANCHES_MAX = 4
_WEIGHT = array("f", (length**0.4 for length in range(4096)))


class Gittins:
    """The policy over `slot_count` slots. It starts knowing nothing and learns from every request.

    Its memory beyond the tier is bounded: `history_runs_min` runs (or one for 16 slots) and `history_blocks_min` blocks
    (or one for four slots), whichever is more, the latest `turns_max` requests, and `kinds_max` kinds of runs.
    """

    def __init__(
        self,
        slot_count: int,
        history_runs_min: int = HISTORY_RUNS_MIN,
        history_blocks_min: int = HISTORY_BLOCKS_MIN,
        turns_max: int = TURNS_MAX,
        kinds_max: int = KINDS_MAX,
    ) -> None:
        self.tree = RunTree(slot_count)
        self.learner = Learner(kinds_max)
        self.turns = Turns(turns_max)
        self.running: dict[int, int] = {}
        self._filling, self._tail = set[int](), False
        self.duel = Duel(slot_count, turns_max)
        self.history_runs_max = max(history_runs_min, slot_count // 16)
        self.history_blocks_max = max(history_blocks_min, slot_count // 4)
        bounds = self.history_runs_max, self.history_blocks_max
        self._history = History(self.tree, self.learner, self.duel, *bounds)
        self._candidates = Candidates(self.tree, self.learner.model, self.duel)
        self.words = Words(self.tree, self.turns, self.learner)
        self.fitting = Fitting(self.tree, self.turns, self.learner)

    # ---- requests

    def requested(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        """Learn from the request which runs are used again, and add the new ones that it brings."""
        if not keys:
            return
        self._candidates.now_s = now_s
        names = names_of(keys)
        path, known = self.tree.match(names)
        self._cut_at_residency(path)
        number = self._begin_turn(names, path, known, now_s)
        self._supersede(path, now_s)
        self.duel.begin(number)
        tree = self.tree
        lru_hits = self.duel.lru_hits((tree.turn[run], tree.length[run]) for run in path)
        last = self._use(path, number, len(names), now_s)
        self._add_new(last, known, names, number, now_s)
        hits = slots.index(NO_SLOT) if NO_SLOT in slots else len(slots)
        self.duel.end(lru_hits, hits, len(names))
        if self.fitting.step(now_s):
            self._candidates.expire()

    def believes(self, client: str) -> bool:
        """Whether the client's hints were right often enough (see `belief`)."""
        return self.words.belief.believes(client)

    def hinted(self, key: Hashable, word: ClientWord, now_s: float) -> None:
        """Note what the client says of the request whose prompt ended with `key`."""
        at = self.turns.find(self.running.get(names_of((key,))[0], 0))
        if at >= 0:
            self._candidates.now_s = now_s
            for run in self.words.told(at, word, now_s):
                self._candidates.offer(run)

    def requested_tail(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        """Blocks of tails stay worth what the run is worth that they lie behind."""
        tree = self.tree
        runs = {
            tree.run_of[slot] if slot >= 0 else tree.first.get(name, NO_RUN): None
            for name, slot in zip(names_of(keys), slots, strict=True)
        }
        for run in runs:
            if run >= 0 and (behind := tree.parent[run]) >= 0:
                self.duel.moved(tree.turn[run], tree.turn[behind], tree.length[run], tree.resident[run])
                tree.kind[run], tree.turn[run] = tree.kind[behind], tree.turn[behind]
                tree.used_s[run], tree.scale[run] = now_s, tree.scale[behind]
                self._candidates.offer(run)

    def finished(self, key: Hashable, output_tokens: int, now_s: float) -> None:
        """Note the length of the output, which says how likely a next turn is."""
        name = names_of((key,))[0]
        number = self.running.pop(name, 0)
        turns, tree = self.turns, self.tree
        at = turns.find(number)
        if at < 0:
            return
        self._candidates.now_s = now_s
        turns.finish(at, output_tokens)
        self.words.ended(at, now_s)
        code, codes, run = turns.code[at] * RUN_CODES, self.learner.codes, turns.last_run[at]
        while run >= 0 and tree.turn[run] == number:
            tails = tree.like(run)
            # The length was true from the start, but not known then. The model has to know runs also by what is known
            # at first, and over their whole life: so they count for both kinds.
            early = tree.early_kind[run] = tree.kind[run]
            said = self.words.said_of(run, at)
            tree.kind[run] = self.learner.kind(features.with_word(code + codes[early] % RUN_CODES, said))
            scale = self.words.scale(said, at)
            for each in (run, *tails):  # what lies beside the chain is wanted when it is
                tree.kind[each], tree.used_s[each], tree.scale[each] = tree.kind[run], now_s, scale
                self._candidates.offer(each)
            run = tree.parent[run]

    def _begin_turn(self, names: array[int], path: list[int], known: int, now_s: float) -> int:
        """Note the request, as the next turn of the one that used the last known run, unless many continue that run."""
        turns, tree = self.turns, self.tree
        before = 0
        if path and tree.branches[path[-1]] < _BRANCHES_MAX:
            before = tree.turn[path[-1]]
            self.words.belief.went_on(before, now_s)
        if path and known < len(names):
            tree.branches[path[-1]] += 1
        number = self._candidates.request_number = turns.begin(before, now_s, len(names), known)
        self.running[names[-1]] = number
        if len(self.running) > turns.capacity:
            del self.running[next(iter(self.running))]
        return number

    def _cut_at_residency(self, path: list[int]) -> None:
        """Cut runs that are resident in part, so that a run comes into the tier as a whole or not at all."""
        tree = self.tree
        for i in range(len(path) - 1, -1, -1):
            run = path[i]
            if 0 < tree.resident[run] < tree.length[run]:
                weight = tree.weight[run]
                rest = tree.cut(run, tree.resident[run])
                tree.weight[rest] = weight
                path.insert(i + 1, rest)

    def _use(self, path: list[int], number: int, blocks: int, now_s: float) -> int:
        """Note the use of every run of the path, an event for the model. Returns the last of them."""
        tree, at, used = self.tree, number % self.turns.capacity, self.learner.used
        code = self.turns.code[at] * RUN_CODES
        position, before, moved = 0, NO_RUN, self.duel.moved
        for run in path:
            if weight := tree.weight[run]:
                age_s = (now_s - tree.used_s[run]) * tree.scale[run]
                used.add(tree.kind[run], age_s, weight)
                if tree.early_kind[run] >= 0:
                    used.add(tree.early_kind[run], self.words.early_age_s(run, now_s), weight)
                    tree.early_kind[run] = NO_RUN
            length = tree.length[run]
            moved(tree.turn[run], number, length, tree.resident[run])
            uses = tree.uses[run] = tree.uses[run] + 1
            where = Position.OLD
            if position == 0:
                where = Position.ROOT
            if position == blocks - 1:
                where = Position.LAST
            position += length
            tree.turn[run] = number
            tree.used_s[run], tree.scale[run] = now_s, 1.0
            tree.weight[run] = _WEIGHT[min(length, 4095)]
            kind = tree.kind[run] = self.learner.kind(code + features.run_code(uses, where))
            if (
                before >= 0
                and tree.kind[before] == kind
                and tree.owner[before] == tree.owner[run]
                and tree.can_merge(before, run)
            ):
                tree.merge(before, run)
                tree.uses[before] = uses
                tree.weight[before] = _WEIGHT[min(tree.length[before], 4095)]
            else:
                before = run
        return before

    def _add_new(self, parent: int, known: int, names: array[int], number: int, now_s: float) -> None:
        """Add runs for the blocks that no request asked for before: the first ones, the rest, and the last one."""
        blocks = len(names)
        at = known
        for end, where in (
            (min(known + FIRST_NEW_BLOCKS, blocks - 1), Position.FIRST_NEW),
            (blocks - 1, Position.NEW),
            (blocks, Position.LAST),
        ):
            if at < end:
                parent = self._new_run(parent, names[at:end], where, number, now_s)
                at = end
        self.turns.last_run[number % self.turns.capacity] = parent
        self._history.shorten(now_s)

    def _new_run(self, parent: int, names: array[int], where: int, number: int, now_s: float) -> int:
        tree, at = self.tree, number % self.turns.capacity
        run = tree.add(parent, names)
        self.duel.moved(0, number, len(names), 0)
        tree.turn[run], tree.used_s[run], tree.uses[run] = number, now_s, 1
        tree.weight[run] = _WEIGHT[min(len(names), 4095)]
        code = self.turns.code[at] * RUN_CODES if number else 0
        tree.kind[run] = self.learner.kind(code + features.run_code(1, where))
        return run

    def _supersede(self, path: list[int], now_s: float) -> None:
        """Mark the rest of an earlier request's chain as left behind, where this request leaves that chain."""
        tree = self.tree
        for i, run in enumerate(path):
            turn = tree.turn[run]
            if i + 1 < len(path) and tree.turn[path[i + 1]] == turn:
                continue
            if tree.branches[run] >= _BRANCHES_MAX:
                continue
            following = path[i + 1] if i + 1 < len(path) else NO_RUN
            child = tree.child[run]
            while child >= 0:
                if child != following and tree.turn[child] == turn:
                    self._leave_behind(child, turn, now_s)
                    break
                child = tree.next[child]

    def _leave_behind(self, run: int, turn: int, now_s: float) -> None:
        tree = self.tree
        while run >= 0:
            self._become(run, features.superseded(self.learner.codes[tree.kind[run]]), now_s)
            run = tree.child[run]
            while run >= 0 and tree.turn[run] != turn:
                run = tree.next[run]

    # ---- changes

    def _become(self, run: int, code: int, now_s: float) -> None:
        """The run has other features now: from this age on it counts for another kind."""
        tree = self.tree
        before, kind = tree.kind[run], self.learner.kind(code)
        if before == kind:
            return
        tree.kind[run] = kind
        if weight := tree.weight[run]:
            age_s = (now_s - tree.used_s[run]) * tree.scale[run]
            self.learner.left.add(before, age_s, weight)
            self.learner.joined.add(kind, age_s, weight)
            if tree.early_kind[run] >= 0:
                self.learner.left.add(tree.early_kind[run], self.words.early_age_s(run, now_s), weight)
                tree.early_kind[run] = NO_RUN
        self._candidates.offer(run)

    # ---- residency

    def inserted(self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float) -> None:
        """Put the blocks into the runs that their request added, or into new ones."""
        tree, names = self.tree, names_of(keys)
        self._filling.update(slots)
        behind = tree.run_of[parent] if parent >= 0 else NO_RUN
        if behind >= 0 and tree.tail_slot(behind) != parent:
            tree.cut(behind, tree.slots(behind).index(parent) + 1)
        done, end = 0, len(names)
        while done < end:
            run = self._run_to_fill(behind, names, done, now_s)
            room = min(tree.length[run] - tree.resident[run], end - done)
            tree.fill(run, slots[done : done + room])
            self.duel.came(tree.turn[run], room)
            done += room
            behind = self._rejoin(behind, run)

    def inserted_tail(
        self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float
    ) -> None:
        """The same; those that no request asked for are worth what the run is worth that they lie behind."""
        self._tail = True
        self.inserted(keys, slots, parent, now_s)
        self._tail = False

    def _rejoin(self, behind: int, run: int) -> int:
        """Undo the cut between two resident runs that nothing tells apart; the run to go on from.

        A chain may come into a tier block by block. Its blocks are not to become runs of their own by that.
        """
        tree, turns = self.tree, self.turns
        if behind < 0 or tree.parent[run] != behind or tree.branches[behind] or tree.weight[run]:
            return run
        same = (tree.scale, tree.owner, tree.turn, tree.kind, tree.early_kind, tree.uses, tree.used_s)
        if any(field[behind] != field[run] for field in same) or not tree.can_merge(behind, run):
            return run
        if tree.start[behind] + tree.length[behind] != tree.start[run]:
            return run  # joining them would copy both
        at = turns.find(tree.turn[run])
        if at >= 0 and turns.last_run[at] == run:
            turns.last_run[at] = behind
        tree.merge(behind, run)
        return behind

    def _run_to_fill(self, behind: int, names: array[int], done: int, now_s: float) -> int:
        """The run to which the blocks from `names[done]` on belong: none of them is resident, all before them are."""
        tree = self.tree
        if behind >= 0 and tree.resident[behind] < tree.length[behind]:
            # The block is the next of the run behind, or the chain goes another way in the middle of it.
            rest = tree.cut(behind, tree.resident[behind])
            tree.weight[rest] = tree.weight[behind]
        run = tree.first.get(names[done], NO_RUN)
        if run >= 0 and not tree.resident[run]:
            tree.cut(run, tree.common(run, names, done))
            if behind >= 0 and tree.parent[run] != behind and not tree.leads_to(run, behind):
                tree.move(run, behind)  # it was left without its parent once
            return run
        if behind >= 0 and tree.child[behind] < 0 and not self._tail:
            code = self.learner.codes[tree.kind[behind]]
            if features.position_of(code) == Position.OUTPUT and tree.can_extend(behind):
                self.duel.moved(0, tree.turn[behind], len(names) - done, 0)
                tree.extend(behind, names[done:])  # an output grows block by block
                return behind
        number = tree.turn[behind] if behind >= 0 else 0
        number = number if self.turns.find(number) >= 0 else 0
        run = self._new_run(behind, names[done:], Position.OUTPUT, number, now_s)
        if self._tail and behind >= 0:
            tree.kind[run], tree.scale[run] = tree.kind[behind], tree.scale[behind]
        elif number:
            self.words.output(run, number % self.turns.capacity)
        return run

    def evictable(self, slots: Iterable[int]) -> None:
        """Offer the leaves among these."""
        if not self._filling and not self._candidates.passed_over:
            return
        tree = self.tree
        run_of = tree.run_of
        if isinstance(slots, range):
            runs = set(run_of[slots.start : slots.stop])
        else:
            slots = list(slots)
            runs = set(map(run_of.__getitem__, slots))
        self._filling.difference_update(slots)
        self._candidates.may_go(slots)
        for run in runs:
            self._candidates.offer(run)

    def removed(self, slots: Iterable[int]) -> None:
        """Take the blocks out of their runs."""
        tree = self.tree
        for slot in slots:
            run = tree.run_of[slot]
            turn, known = tree.turn[run], tree.live_blocks
            self._filling.discard(slot)
            tree.remove(slot)
            self.duel.came(turn, -1)
            self.duel.forgotten(turn, known - tree.live_blocks)
            self._candidates.offer(run if tree.resident[run] else tree.parent[run])

    # ---- eviction

    def victims(
        self, needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float
    ) -> list[int]:
        """Blocks of the leaves with the lowest index; fewer where the end of `incoming` has a lower one."""
        tree, candidates = self.tree, self._candidates
        candidates.now_s = now_s
        if self.duel.decide(needed, may_resume=candidates.is_affordable()):
            candidates.expire()
        candidates.expire_if_due()
        chosen: list[int] = []
        newcomers = candidates.newcomers(names_of(incoming))
        while needed > 0:
            worth, run = candidates.least(leased, self._filling)
            while newcomers and needed > 0 and (run < 0 or worth > newcomers[-1][0]):
                # The end of the incoming chain is worth less than anything that could go.
                needed -= newcomers.pop()[1]
            if run < 0:
                break
            if needed > 0:
                count = self._free_tail(run, min(needed, tree.resident[run]), leased)
                chosen.extend(tree.trim(run, count))
                self.duel.came(tree.turn[run], -count)
                needed -= count
            self._candidates.offer(run if tree.resident[run] else tree.parent[run])
        return chosen

    def _free_tail(self, run: int, most: int, leased: Container[int]) -> int:
        """How many of the run's last blocks may go; the last one may."""
        filling, tail = self._filling, self.tree.slots(run)[-most:]
        if none_leased(leased, tail) and filling.isdisjoint(tail):
            return len(tail)
        count = 1
        for slot in tail[-2::-1]:
            if slot in leased or slot in filling:
                break
            count += 1
        return count
