"""Facts of slots: whatever comes and goes, and however slowly somebody listens, the account that he keeps is right."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbm.block import KEY_BYTES, Tier
from kvbm.framing import FACTS_BYTES_MAX
from kvbm.manager.slot_facts import SlotFact, SlotFacts, TierListener
from rigs.property_tests import scale_examples

SLOTS = 6
BLOCK_TOKENS = 2


def fact(number: int, more: bytes = b"") -> SlotFact:
    before = (number - 1).to_bytes(KEY_BYTES, "big") if number > 1 else b""
    return SlotFact(number.to_bytes(KEY_BYTES, "big"), before, number.to_bytes(4 * BLOCK_TOKENS, "big"), more)


class FactsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.facts = SlotFacts(Tier.HOST, SLOTS, BLOCK_TOKENS)
        self.filling: dict[int, SlotFact | None] = {}
        self.held: dict[int, SlotFact | None] = {}
        self.numbers = 0
        self.accounts: list[tuple[TierListener, set[bytes]]] = []

    @rule(slot=st.integers(0, SLOTS - 1), said=st.booleans(), more=st.sampled_from([b"", b"x"]))
    def reserve(self, slot: int, said: bool, more: bytes) -> None:
        if slot in self.filling or slot in self.held:
            return
        self.numbers += 1
        self.filling[slot] = fact(self.numbers, more) if said else None
        if said:
            self.facts.note(slot, fact(self.numbers, more))

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.filling)))
        self.held[slot] = self.filling.pop(slot)
        self.facts.committed([slot])

    @rule(slot=st.integers(0, SLOTS - 1))
    def empty(self, slot: int) -> None:
        self.filling.pop(slot, None)
        self.held.pop(slot, None)
        self.facts.emptied([slot])

    @rule()
    def listen(self) -> None:
        if len(self.accounts) < 3:
            self.accounts.append((self.facts.listen(), set()))

    @precondition(lambda self: self.accounts)
    @rule(data=st.data(), blocks=st.integers(1, 4))
    def hear(self, data: st.DataObject, blocks: int) -> None:
        self.tell(*data.draw(st.sampled_from(self.accounts)), blocks)

    def tell(self, listener: TierListener, account: set[bytes], blocks: int) -> None:
        for gone in listener.take_removed(SLOTS):
            account.remove(gone)  # told of, once
        for told in listener.take_stored(blocks):
            assert told in self.held.values()
            assert told.engine_hash not in account
            account.add(told.engine_hash)

    @invariant()
    def each_slot_has_its_fact(self) -> None:
        for slot in range(SLOTS):
            assert self.facts.of(slot) == (self.filling | self.held).get(slot)

    def teardown(self) -> None:
        for listener, account in self.accounts:
            for _ in range(2 * SLOTS):
                self.tell(listener, account, 2)
            assert listener.complete
            assert account == {each.engine_hash for each in self.held.values() if each is not None}


TestFacts = FactsMachine.TestCase
TestFacts.settings = settings(
    max_examples=scale_examples(100),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_nothing_is_kept_where_nothing_is_said() -> None:
    facts = SlotFacts(Tier.HOST, 1 << 40, 16)
    facts.committed(range(3))
    facts.emptied(range(3))
    assert facts.of(1) is None
    assert not facts.known(1)


def test_what_cannot_be_kept_is_not() -> None:
    facts = SlotFacts(Tier.HOST, SLOTS, BLOCK_TOKENS)
    facts.note(0, fact(1)._replace(tokens=b"short"))
    facts.note(1, fact(1, bytes(FACTS_BYTES_MAX + 1)))
    facts.note(2, fact(1, bytes(FACTS_BYTES_MAX)))
    assert [facts.known(slot) for slot in range(3)] == [False, False, True]


def test_who_listens_no_more_costs_nothing() -> None:
    facts = SlotFacts(Tier.HOST, SLOTS, BLOCK_TOKENS)
    listener = facts.listen()
    facts.ignore(listener)
    facts.note(0, fact(1))
    facts.committed([0])
    assert listener.take_stored(SLOTS) == [fact(1)], "it was held when it would have been looked at"
    facts.emptied([0])
    assert listener.take_removed(SLOTS) == []
