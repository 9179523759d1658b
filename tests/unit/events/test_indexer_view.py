"""What an indexer makes of messages: blocks, chains, and what does not add up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvbm.block import Tier
from kvbm.events import indexer_view
from kvbm.events.indexer_view import IndexerView, TierBelieved
from kvbm.events.wire import cleared_fields, encode

TOPIC = b"0123456789ab"
SIZE = 2
HOST, DISK = Tier.HOST, Tier.DISK


def stored(*names: int, before: int | None = None, medium: str = "CPU", **fields: Any) -> dict[str, Any]:
    """Blocks that follow one another; the tokens of block n are 2n and 2n + 1."""
    return {
        "type": "BlockStored",
        "block_hashes": list(names),
        "parent_block_hash": before,
        "token_ids": [token for name in names for token in (SIZE * name, SIZE * name + 1)],
        "block_size": SIZE,
        "medium": medium,
        **fields,
    }


def removed(*names: int, medium: str = "CPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": medium}


def heard(*events: Mapping[str, Any], view: IndexerView | None = None, topic: bytes = TOPIC) -> IndexerView:
    """A view after one more message with these events."""
    view = view or IndexerView()
    view.read(topic, 0 if view.last is None else view.last + 1, encode(1.0, events))
    return view


def believed(view: IndexerView) -> dict[Tier, tuple[int, int, int, int]]:
    return {each.tier: (each.blocks, each.roots, each.chains, each.orphans) for each in view.tiers()}


def test_blocks_are_counted_by_tier_with_the_chains_they_make() -> None:
    view = heard(
        stored(1, 2, 3),
        stored(4, before=2),
        stored(10),
        stored(3, before=2, medium="STORAGE"),
    )
    assert believed(view) == {HOST: (5, 2, 3, 0), DISK: (1, 0, 1, 0)}
    assert view.tiers()[0] == TierBelieved("0123456789ab", HOST, 5, 2, 3, 0)
    assert (view.count("0123456789ab", HOST), view.count("0123456789ab", Tier.DEVICE)) == (5, 0)
    heard(removed(2), view=view)
    assert believed(view) == {HOST: (4, 2, 4, 2), DISK: (1, 0, 1, 1)}, (
        "no prompt finds what is behind block 2"
    )
    assert (view.twice, view.unknown_removals, view.missing) == (0, 0, 0)


def test_a_parent_in_the_other_tier_is_known() -> None:
    view = heard(stored(1, medium="STORAGE"), stored(2, before=1))
    assert believed(view) == {HOST: (1, 0, 1, 0), DISK: (1, 1, 1, 0)}


def test_what_does_not_add_up_is_counted() -> None:
    view = heard(stored(1, 2), stored(2, before=1), removed(7), removed(2, medium="STORAGE"))
    assert (view.twice, view.unknown_removals) == (1, 2)
    assert view.count(TOPIC.decode(), HOST) == 2
    view.read(TOPIC, 5, encode(1.0, []))
    assert (view.missing, view.restarts) == (4, 0)
    view.read(TOPIC, 0, encode(1.0, [cleared_fields(), stored(8)]))
    assert (view.missing, view.restarts, view.cleared) == (4, 1, 1)
    view.read(TOPIC, 1, b"\xff")
    view.read(TOPIC, 2, encode(1.0, [stored(9, token_ids=[1 << 40, 2])]))
    assert (view.unreadable, view.messages, view.first, view.last) == (2, 5, 0, 2)
    assert believed(view) == {HOST: (1, 1, 1, 0), DISK: (0, 0, 0, 0)}


def test_a_topic_is_cleared_alone() -> None:
    view = heard(stored(1, 2))
    heard(stored(1), topic=b"other", view=view)
    heard(cleared_fields(), view=view)
    assert [(each.namespace, each.blocks) for each in view.tiers()] == [("0123456789ab", 0), ("other", 1)]


def test_a_prompt_is_followed_as_far_as_its_blocks_are_believed() -> None:
    view = heard(
        stored(1, 2, 3, 4),
        removed(2),
        stored(1, 2, medium="STORAGE"),
        stored(5, before=4, extra_keys=["salt"]),
    )
    tokens = [*range(2, 12), 99]
    (found,) = view.leading(tokens)
    assert (found.prompt_blocks, found.block_tokens, found.blocks) == (5, SIZE, 4), (
        "the salted one is another"
    )
    assert found.tiers == {HOST: 1, DISK: 2}
    assert [each.blocks for each in view.leading([2, 3, 9, 9, 6, 7])] == [1]
    assert [each.blocks for each in view.leading([4, 5])] == [0], "block 2 is not the start of a prompt"
    assert [each.blocks for each in view.leading([])] == [0]
    assert IndexerView().leading(tokens) == []


def test_the_view_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer_view, "BLOCKS_MAX", 3)
    view = heard(stored(1, 2, 3))
    assert not view.full
    heard(removed(3), stored(4), stored(1), view=view)
    assert not view.full
    heard(stored(5), view=view)
    assert view.full
    assert view.count(TOPIC.decode(), HOST) == 3
    heard(cleared_fields(), stored(6, 7, 8), view=view)
    assert view.count(TOPIC.decode(), HOST) == 3
