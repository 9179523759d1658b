"""The messages of a leader to its workers, inside the engine's own step message, and the workers' report back."""

from __future__ import annotations

import msgspec

NO_EPOCH = -1
"""The life of no manager."""


class NodeSlots(msgspec.Struct, frozen=True, kw_only=True):
    """The slots of a plan at the manager of one node, of an engine over several: one for each of the plan's blocks, as
    `generations`. `HELD` in place of a slot: that manager has the block already, and its ranks copy nothing."""

    epoch: int
    slots: tuple[int, ...]
    generations: tuple[int, ...]


class StorePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Copy device blocks into reserved slots. Nothing overwrites the blocks before a step releases the store.

    `generations[i]` is what slot i's generation must be when the copy begins: else the reservation has ended. With
    `nodes` the slots are those of each node's manager, and `on_node` is what its ranks carry out: they copy `blocks`
    blocks all nodes together, and one that fails says so of all.
    """

    store: int
    epoch: int
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    device_blocks: tuple[int, ...]
    nodes: tuple[NodeSlots, ...] = ()
    blocks: int = 0

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions of its blocks, as they are reported."""
        return tuple(range(self.blocks or len(self.slots)))

    def on_node(self, node: int) -> StorePlan:
        """What the ranks of this node do."""
        if not self.nodes:
            return msgspec.structs.replace(self, epoch=NO_EPOCH)
        mine = self.nodes[node]
        here = [i for i, slot in enumerate(mine.slots) if slot >= 0]
        return StorePlan(
            store=self.store,
            epoch=mine.epoch,
            slots=tuple(mine.slots[i] for i in here),
            generations=tuple(mine.generations[i] for i in here),
            device_blocks=tuple(self.device_blocks[i] for i in here),
            blocks=len(self.device_blocks),
        )


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Copy leased slots into device blocks. The first `ready` slots hold their bytes; the worker watches the others.

    `generations[i]` is what slot i's generation must be before and after the copy. `offset` is the position of
    the first pair in the lookup's run (the blocks before it were on the device already). `layerwise`: every slot is
    ready, and the step's own forward pass reads the blocks, each layer as soon as it has arrived. `traced`: the ranks
    report when they copied. `nodes` is as in `StorePlan`.
    """

    request: str
    lookup: int
    epoch: int
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    device_blocks: tuple[int, ...]
    offset: int
    ready: int
    layerwise: bool = False
    traced: bool = False
    nodes: tuple[NodeSlots, ...] = ()

    def on_node(self, node: int) -> LoadPlan:
        """What the ranks of this node do."""
        if not self.nodes:
            return msgspec.structs.replace(self, epoch=NO_EPOCH)
        mine = self.nodes[node]
        return msgspec.structs.replace(
            self, epoch=mine.epoch, slots=mine.slots, generations=mine.generations, nodes=()
        )


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks that one engine step has for every worker. `idle`: the step computes nothing, so waiting costs nobody.

    `released` names stores, of this step or earlier ones, whose device blocks the engine may overwrite from this step
    on: their copies come first. `weights` rises with every change of the weights that the leader knows of: a rank that
    knows of a later one refuses the stores and loads of the step.
    """

    stores: tuple[StorePlan, ...] = ()
    loads: tuple[LoadPlan, ...] = ()
    idle: bool = False
    released: tuple[int, ...] = ()
    weights: int = 0

    def on_node(self, node: int) -> StepPlan:
        """What the ranks of this node, of an engine over several, do in the step."""
        if not (self.stores or self.loads):
            return self
        return msgspec.structs.replace(
            self,
            stores=tuple(store.on_node(node) for store in self.stores),
            loads=tuple(load.on_node(node) for load in self.loads),
        )


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """The work of ranks since the last report: stores with the positions that failed, and seconds of copying.

    `stored` maps a store id to (ranks that report it, failed positions, longest seconds); `loaded` maps a request
    to its longest seconds of copying. `copied` maps a traced one to when its first copy began and its last ended, in ns
    of the system's clock. `weights_changed`: a rank's weights did, and no plan has shown that the leader
    knows.
    """

    stored: dict[int, tuple[int, tuple[int, ...], float]] = {}
    loaded: dict[str, float] = {}
    weights_changed: bool = False
    copied: dict[str, tuple[int, int]] = {}

    def merge(self, other: StepReport) -> StepReport:
        """The report of two groups of ranks together."""
        stored = dict(self.stored)
        for store, (ranks, failed, seconds) in other.stored.items():
            mine = stored.get(store, (0, (), 0.0))
            both = tuple(sorted({*mine[1], *failed}))
            stored[store] = (mine[0] + ranks, both, max(mine[2], seconds))
        loaded = dict(self.loaded)
        for request, seconds in other.loaded.items():
            loaded[request] = max(loaded.get(request, 0.0), seconds)
        copied = dict(self.copied)
        for request, (began, ended) in other.copied.items():
            mine_began, mine_ended = copied.get(request, (began, ended))
            copied[request] = min(mine_began, began), max(mine_ended, ended)
        changed = self.weights_changed or other.weights_changed
        return StepReport(stored=stored, loaded=loaded, weights_changed=changed, copied=copied)
