"""What a client says goes along with its lookup, is obeyed where the leader decides, and is answered."""

from __future__ import annotations

import msgspec
import pytest

from kvbm.hints import ClientHint, Outcome, Verdict, Why, as_tuples, read_hint
from kvbm.protocol import Lookup, LookupReply, Reserve, Says
from kvbm.protocol_decoding import decode_to_manager
from rigs.leader import HASHES, Bench

SAID = {"session": "talk", "expect_s": 1e9, "retain": [{"end": 64, "priority": 90}], "soon": 1}


def client(said: object, tenant: str = "t") -> ClientHint:
    return ClientHint(tenant, *read_hint(said))


def asked(bench: Bench, said: object, request: str = "r") -> Lookup:
    bench.leader.request_added(request, HASHES[:8], b"", 0, asker=client(said))
    (lookup,) = bench.manager.said()
    assert isinstance(lookup, Lookup)
    return lookup


def test_a_lookup_carries_what_was_said_within_bounds(bench: Bench) -> None:
    lookup = decode_to_manager(msgspec.msgpack.encode(asked(bench, SAID)))
    assert isinstance(lookup, Lookup)
    assert (lookup.tenant, read_hint(lookup.hint).hint) == ("t", read_hint(SAID).hint)
    assert lookup.hint["expect_s"] == 86_400.0
    assert lookup.verdicts == as_tuples(read_hint(SAID).verdicts)


def test_who_says_nothing_sends_nothing_more(bench: Bench) -> None:
    lookup = bench.add()
    assert (lookup.tenant, lookup.hint, lookup.verdicts) == ("", {}, ())


def test_the_client_is_told_what_the_manager_made_of_it(bench: Bench) -> None:
    lookup = asked(bench, SAID)
    clipped = Verdict("retain", Outcome.CLIPPED, "2 of 4 blocks", Why.BUDGET)
    bench.manager.send(LookupReply(lookup=lookup.lookup, verdicts=as_tuples([clipped])))
    bench.step()
    told = {verdict.part: verdict for verdict in bench.leader.client_words.verdicts("r")}
    assert told["retain"] == clipped
    assert told["session"].outcome is Outcome.ACCEPTED
    assert told["expect_s"].outcome is Outcome.CLIPPED
    assert told["unknown"].outcome is Outcome.REJECTED
    bench.leader.finished("r")
    assert bench.leader.client_words.verdicts("r") == ()


@pytest.mark.parametrize("store", [True, False])
def test_blocks_that_need_not_be_kept_are_not_offered(bench: Bench, store: bool) -> None:
    asked(bench, {"store": store})
    bench.leader.matched("r", 0)
    bench.step({"r": 4})
    offered = [message for message in bench.manager.said() if isinstance(message, Reserve)]
    assert [reserve.tenant for reserve in offered] == ["t"] * store


def test_what_is_said_later_goes_by_itself(bench: Bench) -> None:
    asked(bench, None)
    bench.leader.client_words.says("r", read_hint({"retain": [{"end": 8, "priority": 90}]}))
    (says,) = bench.manager.said()
    assert isinstance(says, Says)
    assert (len(says.keys), says.tenant) == (8 * 32, "t")
    assert read_hint(says.hint).hint.retain[0].priority == 90
    bench.leader.client_words.says("nobody", read_hint({"final": True}))
    bench.manager.die()
    bench.step()
    bench.leader.client_words.says("r", read_hint({"final": True}))
