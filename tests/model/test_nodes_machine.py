"""An engine over two nodes amid everything: managers die and come back, ranks go and come, memory is too small.

Laws: what a load brings is what each node's rank would have computed, no request waits for ever, and nothing is held
for requests that have ended.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rigs.property_tests import scale_examples
from rigs.two_nodes import CHAINS, NODES, Request, TwoNodes

chains = st.integers(0, len(CHAINS) - 1)
lengths = st.integers(1, 7)
picks = st.integers(0, 20)
nodes = st.integers(0, NODES - 1)


class NodesMachine(RuleBasedStateMachine):
    """Two nodes with memory of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(prefix="kvbm-")
        self.engine = TwoNodes(Path(self.directory.name))
        for node in self.engine.nodes:
            node.attach()
        self.engine.turn()

    def _picked(self, pick: int) -> Request | None:
        requests = list(self.engine.requests.values())
        return requests[pick % len(requests)] if requests else None

    @rule(chain=chains, length=lengths)
    def a_request_comes(self, chain: int, length: int) -> None:
        self.engine.add(chain, length)

    @rule(chain=chains, length=lengths)
    def a_request_is_served(self, chain: int, length: int) -> None:
        """From end to end, as far as the managers let it."""
        request = self.engine.add(chain, length)
        for _ in range(4):
            self.engine.turn()
            if not (request.computed or request.loading):
                self.engine.ask(request)
            self.engine.step()
            self.engine.work()

    @rule(pick=picks)
    def the_engine_asks(self, pick: int) -> None:
        request = self._picked(pick)
        if request is not None and not request.computed and not request.loading:
            self.engine.ask(request)

    @rule(pick=picks)
    def a_request_ends(self, pick: int) -> None:
        request = self._picked(pick)
        if request is not None:
            self.engine.finish(request)

    @rule()
    def step(self) -> None:
        self.engine.step()

    @rule()
    def the_ranks_work(self) -> None:
        self.engine.work()

    @rule()
    def messages_go(self) -> None:
        self.engine.turn()

    @rule(node=nodes)
    def one_manager_is_quick(self, node: int) -> None:
        self.engine.leader.receive()
        self.engine.nodes[node].turn()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.engine.clock.advance(seconds)

    @rule(node=nodes)
    def a_manager_dies(self, node: int) -> None:
        self.engine.nodes[node].kill()

    @rule(node=nodes)
    def a_manager_comes(self, node: int) -> None:
        if self.engine.nodes[node].bench is None:
            self.engine.nodes[node].start()

    @rule(node=nodes)
    def a_rank_goes(self, node: int) -> None:
        self.engine.nodes[node].detach()

    @rule()
    def ranks_come(self) -> None:
        for node in self.engine.nodes:
            node.turn()
            node.attach()

    @rule()
    def all_is_well_for_a_while(self) -> None:
        self.engine.settle()
        self._nothing_is_held()

    @invariant()
    def managers_are_sound(self) -> None:
        for node in self.engine.nodes:
            if node.bench is not None:
                node.bench.check()

    def teardown(self) -> None:
        try:
            self.engine.settle()
            self._nothing_is_held()
            self._a_hit_is_found()
        finally:
            self.engine.close()
            self.directory.cleanup()

    def _nothing_is_held(self) -> None:
        for _ in range(20):
            self.engine.turn()
            if self.engine.held() == [(0, 0)] * NODES:
                break
            self.engine.clock.advance(20.0)
        assert self.engine.held() == [(0, 0)] * NODES
        link = self.engine.leader._link
        assert not link._lookups and not link._stores  # type: ignore[attr-defined]

    def _a_hit_is_found(self) -> None:
        """Whatever happened: what is computed now is found the next time."""
        before = self.engine.loaded
        for _ in range(12):
            self.a_request_is_served(0, 3)
            self.engine.settle()
            self.engine.clock.advance(6.0)
        assert self.engine.loaded > before


TestNodes = NodesMachine.TestCase
TestNodes.settings = settings(max_examples=scale_examples(60), stateful_step_count=40, deadline=None)
