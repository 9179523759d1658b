"""Which key a block gets, and the engine hash that goes to the manager beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvbm.block import BlockKey
from kvbm.framing import encode
from kvbm.hashing import derive_key, join_keys, split_keys
from kvbm.protocol import (
    KEYS_PER_MESSAGE_MAX,
    MESSAGE_BYTES_MAX,
    STORED_KEYS_MAX,
    Lookup,
    Reserve,
)
from rigs.leader import FINGERPRINT, HASHES, TABLE, Bench, ScriptedDevice, keys

ADAPTER = b"digest of an adapter"


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**modes: Any) -> Bench:
        benches.append(Bench(**modes))
        return benches[-1]

    yield make
    for bench in benches:
        bench.leader.close()
        bench.manager.close()


def asked(bench: Bench, hashes: list[bytes], extras: bytes = b"") -> tuple[Lookup, Reserve]:
    """A request of these blocks comes and fills them all: what is sent."""
    bench.leader.request_added("r", hashes, extras, 0)
    (lookup,) = bench.manager.said()
    bench.step({"r": len(hashes)})
    (reserve,) = bench.manager.said()
    return lookup, reserve


def test_the_engines_own_hash_is_the_key(make_bench: Callable[..., Bench]) -> None:
    lookup, reserve = asked(make_bench(), HASHES[:3])
    assert lookup.keys == reserve.keys == join_keys(HASHES[:3])
    assert (reserve.hashes, reserve.group) == (b"", 0)


def test_what_the_hash_leaves_out_makes_another_key_and_the_hash_goes_along(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    lookup, reserve = asked(bench, HASHES[:3], ADAPTER)
    assert split_keys(lookup.keys) == split_keys(reserve.keys) == keys(3, ADAPTER)
    assert not {*keys(3, ADAPTER)} & {*map(BlockKey, HASHES)}
    assert reserve.hashes == join_keys(HASHES[:3])
    bench.step({"r": 3})
    assert bench.manager.said() == []


def test_the_hashes_are_those_of_the_blocks_that_are_stored(make_bench: Callable[..., Bench]) -> None:
    """The second reservation of a request begins behind the first."""
    bench = make_bench()
    bench.leader.request_added("r", HASHES[:6], ADAPTER, 0)
    bench.manager.said()
    bench.step({"r": 2})
    bench.step({"r": 5})
    first, second = bench.manager.said()
    assert first.hashes == join_keys(HASHES[:2])
    assert second.hashes == join_keys(HASHES[2:5])
    assert (second.parent, split_keys(second.keys)) == (keys(2, ADAPTER)[1], keys(5, ADAPTER)[2:])


@pytest.mark.parametrize("short", [b"64 bits!", b"x" * 33])
def test_a_hash_of_another_length_is_no_key_and_not_told(
    make_bench: Callable[..., Bench], short: bytes
) -> None:
    lookup, reserve = asked(make_bench(), [HASHES[1], short])
    assert split_keys(lookup.keys) == [HASHES[1], derive_key(FINGERPRINT, short)]
    assert split_keys(reserve.keys) == split_keys(lookup.keys)
    assert reserve.hashes == HASHES[1] + bytes(32)


@pytest.mark.parametrize("extras", [b"", ADAPTER])
def test_lazily_stored_blocks_say_as_much(make_bench: Callable[..., Bench], extras: bytes) -> None:
    engine = ScriptedDevice()
    bench = make_bench(lazy=True, device=engine)
    bench.leader.request_added("r", HASHES[:3], extras, 0)
    bench.manager.said()
    bench.step({"r": 3})
    bench.leader.finished("r")
    engine.free = [TABLE[2]]
    bench.step()
    (reserve,) = [message for message in bench.manager.said() if isinstance(message, Reserve)]
    assert split_keys(reserve.keys) == keys(3, extras)
    assert reserve.hashes == (join_keys(HASHES[:3]) if extras else b"")


def test_the_longest_reservation_and_the_longest_lookup_fit_into_a_message() -> None:
    hashes = bytes(32) * STORED_KEYS_MAX
    reserve = Reserve(store=2**62, parent=bytes(32), keys=hashes, hashes=hashes, group=65535)
    lookup = Lookup(lookup=2**62, keys=bytes(32) * KEYS_PER_MESSAGE_MAX, skip=KEYS_PER_MESSAGE_MAX)
    for message in (reserve, lookup):
        assert len(encode(message)) <= MESSAGE_BYTES_MAX
