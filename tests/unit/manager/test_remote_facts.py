"""What routers are told of a store: blocks that this node wrote or read, and that they are gone."""

from __future__ import annotations

from kvbm.block import Tier
from kvbm.manager.host_side import SpaceOptions
from kvbm.manager.remote_facts import RemoteFacts
from kvbm.manager.slot_facts import SlotFact, TierListener
from rigs.fake_remote import FakeStore
from rigs.remote import RemoteBench
from rigs.space import KEYS, LAYOUT

TOKENS = bytes(4 * LAYOUT.block_tokens)


def said(bench: RemoteBench, count: int) -> None:
    """An engine says of its blocks what they are."""
    for i, key in enumerate(KEYS[:count]):
        slot = bench.space.host_pool.find(key)
        assert slot is not None
        bench.space.facts.note(slot, SlotFact(key, KEYS[i - 1] if i else b"", TOKENS))
        bench.space.facts.committed((slot,))


def told(listener: TierListener) -> list[bytes]:
    return [fact.engine_hash for fact in listener.take_stored(1000)]


def test_what_was_written_is_told_until_it_is_gone() -> None:
    store = FakeStore(LAYOUT)
    bench = RemoteBench(store, space_options=SpaceOptions(keeps_facts=True))
    listener = bench.space.remotes[0].facts.slots.listen()
    assert listener.facts.tier is Tier.REMOTE
    bench.compute(KEYS[:3])
    said(bench, 3)
    bench.settle(10.0)
    assert told(listener) == KEYS[:3]
    bench.space.clear("host")
    store.lose(KEYS[:1])
    bench.look(1, KEYS[:3])
    bench.settle()
    assert listener.take_removed(10) == KEYS[:1]
    bench.close()


def test_the_oldest_are_forgotten_first() -> None:
    store = FakeStore(LAYOUT)
    bench = RemoteBench(store)
    facts = RemoteFacts(LAYOUT.block_tokens, blocks_max=2)
    listener = facts.slots.listen()
    bench.compute(KEYS[:3])
    said(bench, 3)
    bench.settle(10.0)
    news = bench.remote.news()
    assert list(news.came) == KEYS[:3]
    facts.heard(news._replace(came=KEYS[:2]), bench.space.below.host)
    assert told(listener) == KEYS[:2]
    facts.heard(news._replace(came=KEYS[2:3]), bench.space.below.host)
    assert listener.take_removed(10) == KEYS[:1]
    assert told(listener) == KEYS[2:3]
    bench.close()
