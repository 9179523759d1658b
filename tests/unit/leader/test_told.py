"""A lookup says for people which request it is of, and what shaped its keys."""

from __future__ import annotations

import msgspec

from kvbm.leader.tracked import NOTHING_TOLD, Told
from kvbm.protocol import Lookup
from kvbm.protocol_decoding import decode_to_manager
from rigs.leader import HASHES, Bench


def asked(bench: Bench, request: str, told: Told) -> Lookup:
    bench.leader.request_added(request, HASHES[:3], b"", 0, told=told)
    (lookup,) = bench.manager.said()
    assert isinstance(lookup, Lookup)
    return lookup


def test_a_lookup_names_its_request(bench: Bench) -> None:
    lookup = asked(bench, "cmpl-1-01234567", Told(b"p" * 16, (("adapter", "cats"),)))
    assert (lookup.request, lookup.prompt, lookup.extras) == (
        "cmpl-1-01234567",
        b"p" * 16,
        {"adapter": "cats"},
    )


def test_weights_that_changed_are_told_too(bench: Bench) -> None:
    before = asked(bench, "a", Told(b"p" * 16))
    bench.leader.weights_changed()
    bench.manager.said()
    after = asked(bench, "b", Told(b"p" * 16))
    assert "weights" not in before.extras
    assert set(after.extras) == {"weights"}
    bench.leader.weights_changed()
    bench.manager.said()
    assert asked(bench, "c", Told(b"p" * 16)).extras != after.extras


def test_an_id_that_is_no_unicode_can_be_sent(bench: Bench) -> None:
    """vLLM takes such an id from a request's body, and the scheduler's thread must not fail at it."""
    question = asked(bench, "id-\ud800", NOTHING_TOLD)
    assert decode_to_manager(msgspec.msgpack.encode(question)) == question
    assert question.request == "id-?"
