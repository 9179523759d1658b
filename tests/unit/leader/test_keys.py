"""Which key a block gets, and the engine hash that goes to the manager beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvbm import framing
from kvbm.block import KEY_BYTES, BlockKey
from kvbm.framing import FACTS_BYTES_MAX, TOKEN_BYTES, announced_keys_max, encode
from kvbm.hashing import derive_key, join_keys, split_keys
from kvbm.leader.salt import KeySalt
from kvbm.leader.tracked import Answer, Said, Scheduled
from kvbm.protocol import (
    KEYS_PER_MESSAGE_MAX,
    MESSAGE_BYTES_MAX,
    STORED_KEYS_MAX,
    Lookup,
    Reserve,
)
from rigs.leader import FINGERPRINT, HASHES, Bench, keys

ADAPTER = b"digest of an adapter"


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


def test_hashes_of_other_lengths_that_are_as_long_together_as_keys_are_told_apart(
    make_bench: Callable[..., Bench],
) -> None:
    odd = [b"x" * 31, b"y" * 33]
    lookup, _ = asked(make_bench(), odd)
    assert split_keys(lookup.keys) == [derive_key(FINGERPRINT, block_hash) for block_hash in odd]


def test_beside_an_adapter_a_hash_of_another_length_is_derived_with_it(
    make_bench: Callable[..., Bench],
) -> None:
    lookup, reserve = asked(make_bench(), [HASHES[0], b"64 bits!"], ADAPTER)
    whole, derived = split_keys(lookup.keys)
    assert whole == keys(1, ADAPTER)[0]
    assert derived not in (
        derive_key(FINGERPRINT, b"64 bits!"),
        derive_key(FINGERPRINT, b"64 bits!", b"other"),
    )
    assert reserve.hashes == HASHES[0] + bytes(32)


def test_an_adapters_extras_and_the_salt_are_not_run_together(make_bench: Callable[..., Bench]) -> None:
    """The end of one adapter's extras is no salt of another's request."""
    bench = make_bench(weights_version="one")
    salt = KeySalt("one").value
    found = set()
    for number, (extras, version) in enumerate(((ADAPTER, "one"), (ADAPTER + salt, "two"), (b"", "one"))):
        bench.leader.weights_named(version)
        bench.leader.request_added(str(number), HASHES[:1], extras, 0)
        found.add(bench.manager.said()[-1].keys)
    plain = make_bench()
    plain.leader.request_added("r", HASHES[:1], ADAPTER + salt, 0)
    found.add(plain.manager.said()[-1].keys)
    assert len(found) == 4


class WatchedHashes(Sequence[bytes]):
    """An engine's hashes; notes which are read."""

    def __init__(self, hashes: list[bytes]) -> None:
        self._hashes = hashes
        self.read: set[int] = set()

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, index: Any) -> Any:
        self.read.update(range(len(self))[index] if isinstance(index, slice) else [index])
        return self._hashes[index]


@pytest.mark.parametrize("extras", [b"", ADAPTER])
def test_a_step_reads_the_hashes_of_the_blocks_that_it_completes(
    make_bench: Callable[..., Bench], extras: bytes
) -> None:
    bench = make_bench()
    hashes = WatchedHashes(HASHES[:30])
    bench.leader.request_added("r", hashes, extras, 0)
    bench.step({"r": 20})
    hashes.read.clear()
    bench.step({"r": 21})
    assert split_keys(bench.manager.said()[-1].keys) == [keys(21, extras)[20]]
    assert hashes.read == {19, 20}, "the block, and the one before it"


def test_the_longest_reservation_and_the_longest_lookup_fit_into_a_message() -> None:
    hashes = bytes(32) * STORED_KEYS_MAX
    reserve = Reserve(store=2**62, parent=bytes(32), keys=hashes, hashes=hashes, group=65535)
    lookup = Lookup(lookup=2**62, keys=bytes(32) * KEYS_PER_MESSAGE_MAX, skip=KEYS_PER_MESSAGE_MAX)
    for message in (reserve, lookup):
        assert len(encode(message)) <= MESSAGE_BYTES_MAX


@pytest.mark.parametrize("block_tokens", [1, 16, 128, 4096])
def test_the_longest_reservation_of_blocks_that_are_announced_fits_into_a_message(block_tokens: int) -> None:
    count = announced_keys_max(block_tokens)
    hashes = bytes(KEY_BYTES) * count
    facts = (bytes(FACTS_BYTES_MAX),) * count
    reserve = Reserve(
        store=2**62,
        parent=bytes(KEY_BYTES),
        keys=hashes,
        hashes=hashes,
        groups=bytes(count),
        tokens=bytes(TOKEN_BYTES * block_tokens * count),
        before=bytes(KEY_BYTES),
        facts=facts,
        tenant="t" * 64,
    )
    assert MESSAGE_BYTES_MAX * 0.98 < len(encode(reserve)) <= MESSAGE_BYTES_MAX


MANY = 65_536


def announced(facts_bytes: int = 0) -> Callable[[int, int], Said]:
    """What is said of blocks of 16 tokens, with so many bytes of facts for each."""

    def says(start: int, end: int) -> Said:
        facts = (bytes(facts_bytes),) * (end - start) if facts_bytes else ()
        return Said(bytes(64 * (end - start)), facts=facts)

    return says


def test_a_request_of_a_million_tokens_is_offered_in_pieces(make_bench: Callable[..., Bench]) -> None:
    """It lies on the device when the engine gets to it; its blocks have hashes beside their keys, tokens and facts."""
    bench = make_bench(block_tokens=16)
    hashes = [number.to_bytes(KEY_BYTES, "big") for number in range(MANY)]
    bench.leader.request_added("r", hashes, ADAPTER, MANY, says=announced(facts_bytes=100))
    table = range(MANY)
    offered: list[Reserve] = []
    for _ in range(500):  # a socket takes a part of a message at a time
        bench.leader.step([Scheduled("r", MANY, lambda: table)], (), 0, False)
        offered += [each for each in bench.manager.said() if isinstance(each, Reserve)]
    assert b"".join(each.hashes for each in offered) == b"".join(hashes)
    assert all(len(each.tokens) == 2 * len(each.keys) for each in offered)
    assert len(offered) == -(-MANY // announced_keys_max(16))


def test_blocks_of_which_too_much_would_be_said_are_stored_without_it(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(block_tokens=16)
    bench.leader.request_added("r", HASHES[:3], b"", 0, says=announced(facts_bytes=FACTS_BYTES_MAX + 1))
    bench.manager.said()
    bench.step({"r": 3})
    (reserve,) = bench.manager.said()
    assert (len(split_keys(reserve.keys)), reserve.tokens, reserve.facts) == (3, b"", ())


def test_a_message_that_is_too_long_costs_its_request_the_cache_and_no_other(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench()
    monkeypatch.setattr(framing, "MESSAGE_BYTES_MAX", 1000)
    bench.leader.request_added("long", HASHES, b"", 0)
    assert bench.leader.matched("long", 0) == Answer()
    bench.step({"long": 40})
    assert bench.manager.said() == []
    assert "computed without the KV cache: a Lookup of" in caplog.text
    bench.load(5, request="short")
