"""Block keys: equal for equal prompts in every process, and for nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.block import KEY_BYTES
from kvbm.hashing import (
    ROOT,
    Chain,
    chain_key,
    chain_keys,
    derive_key,
    join_keys,
    keys_in_space,
    space_mask,
    split_keys,
)
from kvbm.layout import BlockLayout, Namespace

FINGERPRINT = bytes(range(32))
OTHER = bytes(range(1, 33))
NAMESPACE = Namespace(model="m", fields=(("weights", "1"),))
hashes = st.binary(min_size=0, max_size=40)


def test_keys_are_what_they_were() -> None:
    """Blocks on disk are found by these for years: a change here drops every cache and needs a format version."""
    keys = chain_keys(FINGERPRINT, list(range(8)), 4, [b"", b"salt"])
    assert [key.hex()[:16] for key in keys] == ["110de778cc448914", "021a8720116f405f"]
    assert derive_key(FINGERPRINT, b"h" * 32).hex()[:16] == "30a1e58e24759985"
    assert derive_key(FINGERPRINT, b"h" * 32, b"adapter").hex()[:16] == "0cc2bc2216a1845c"
    assert keys_in_space(b"h" * 32, space_mask(FINGERPRINT, b"adapter")).hex()[:16] == "1171e7d24b1c99b2"


def test_keys_are_the_same_in_another_process() -> None:
    program = (
        "from kvbm.hashing import chain_keys, derive_key, join_keys\n"
        "fingerprint = bytes(range(32))\n"
        "print(join_keys([*chain_keys(fingerprint, list(range(9)), 3), derive_key(fingerprint, b'x', b'y')]).hex())"
    )
    expected = [*chain_keys(FINGERPRINT, list(range(9)), 3), derive_key(FINGERPRINT, b"x", b"y")]
    for seed in ("0", "1"):
        result = subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        )
        assert result.stdout.decode().strip() == join_keys(expected).hex()


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40), block_tokens=st.integers(1, 7))
def test_a_prefix_has_the_keys_of_the_whole(tokens: list[int], block_tokens: int) -> None:
    keys = chain_keys(FINGERPRINT, tokens, block_tokens)
    assert len(keys) == len(tokens) // block_tokens
    assert all(len(key) == KEY_BYTES for key in keys)
    assert len(set(keys)) == len(keys)
    for count in range(len(keys) + 1):
        assert chain_keys(FINGERPRINT, tokens[: count * block_tokens], block_tokens) == keys[:count]


@given(tokens=st.lists(st.integers(0, 50), min_size=6, max_size=20), position=st.integers(0, 5))
def test_a_changed_token_changes_its_block_and_all_after_it(tokens: list[int], position: int) -> None:
    changed = [*tokens[:position], tokens[position] + 1, *tokens[position + 1 :]]
    before, after = chain_keys(FINGERPRINT, tokens, 2), chain_keys(FINGERPRINT, changed, 2)
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [i < position // 2 for i in range(len(before))]


@given(one=st.tuples(hashes, hashes), two=st.tuples(hashes, hashes))
def test_hash_and_extras_are_not_run_together(one: tuple[bytes, bytes], two: tuple[bytes, bytes]) -> None:
    assert (derive_key(FINGERPRINT, *one) == derive_key(FINGERPRINT, *two)) == (one == two)


def test_extras_cannot_be_forged_by_a_hash() -> None:
    keys = [
        derive_key(FINGERPRINT, b"h", b"x"),
        derive_key(FINGERPRINT, b"h\x00extrasx"),
        derive_key(FINGERPRINT, b"hx"),
        derive_key(FINGERPRINT, b"hextrasx"),
        derive_key(OTHER, b"h", b"x"),
        derive_key(OTHER, b"h"),
        derive_key(FINGERPRINT, b"h"),
    ]
    assert len(set(keys)) == len(keys)


def test_key_spaces_share_no_key() -> None:
    """The same hashes in the space of the namespace itself, of two adapters, and of another namespace."""
    hashes = chain_keys(FINGERPRINT, list(range(100)), 2)
    spaces = [(FINGERPRINT, b"one"), (FINGERPRINT, b"two"), (OTHER, b"one")]
    named = [keys_in_space(join_keys(hashes), space_mask(*space)) for space in spaces]
    found = [*hashes, *(key for keys in named for key in split_keys(keys))]
    assert len(set(found)) == len(found) == 200


@given(blocks=st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=9), extras=hashes)
def test_a_key_of_a_space_is_the_hash_and_the_mask(blocks: list[bytes], extras: bytes) -> None:
    """Each block for itself, whatever is asked with it: the newest block of a request is named alone."""
    mask = space_mask(FINGERPRINT, extras)
    moved = keys_in_space(join_keys(blocks), mask)
    assert keys_in_space(moved, mask) == join_keys(blocks), "nothing of a hash is lost"
    assert moved == b"".join(keys_in_space(block, mask) for block in blocks)
    assert keys_in_space(bytes(KEY_BYTES), mask) == mask != bytes(KEY_BYTES)


def test_tokens_and_extras_are_not_run_together() -> None:
    assert chain_key(FINGERPRINT, ROOT, [1, 2], b"") != chain_key(
        FINGERPRINT, ROOT, [1], (2).to_bytes(4, "little")
    )
    assert chain_key(FINGERPRINT, ROOT, [1], b"") != chain_key(FINGERPRINT, b"\x01" * 32, [1], b"")
    assert chain_key(FINGERPRINT, ROOT, [1], b"") != chain_key(OTHER, ROOT, [1], b"")


def test_a_salt_in_the_first_block_reaches_all() -> None:
    plain = chain_keys(FINGERPRINT, list(range(12)), 4)
    salted = chain_keys(FINGERPRINT, list(range(12)), 4, [b"tenant", b"", b""])
    assert not set(plain) & set(salted)


@given(
    pieces=st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=9), max_size=8),
    size=st.integers(1, 5),
    extras=hashes,
)
def test_a_chain_that_grows_has_the_keys_of_its_tokens(
    pieces: list[list[int]], size: int, extras: bytes
) -> None:
    chain = Chain(BlockLayout(block_tokens=size, shard_bytes=1), NAMESPACE, extras=extras)
    tokens: list[int] = []
    for piece in pieces:
        if len(piece) == 1:
            chain.append(piece[0])
        else:
            chain.extend(piece)
        tokens += piece
        piece.clear()  # what the caller does with its list is no concern of the chain
        assert (chain.tokens, chain.blocks) == (len(tokens), len(tokens) // size)
        chain.keys.clear()  # and what it gave out is the caller's
        expected, parent = [], ROOT
        for start in range(0, chain.blocks * size, size):
            parent = chain_key(NAMESPACE.fingerprint, parent, tokens[start : start + size], extras)
            expected.append(parent)
        assert chain.keys == expected
        assert chain.keys == chain_keys(NAMESPACE.fingerprint, tokens, size, [extras] * chain.blocks)


def test_what_is_no_token_is_refused_and_not_added() -> None:
    chain = Chain(BlockLayout(block_tokens=2, shard_bytes=1), NAMESPACE, [1, 2, 3])
    before = chain.keys
    for wrong in (-1, 2**32, "a", 1.5):
        with pytest.raises((OverflowError, TypeError)):
            chain.append(wrong)
        with pytest.raises((OverflowError, TypeError)):
            chain.extend([4, 5, wrong])
    assert (chain.tokens, chain.keys) == (3, before)
    chain.append(4)
    assert chain.keys == chain_keys(NAMESPACE.fingerprint, [1, 2, 3, 4], 2)


@given(count=st.integers(0, 20))
def test_keys_are_split_as_they_were_joined(count: int) -> None:
    keys = chain_keys(FINGERPRINT, list(range(count)), 1)
    assert split_keys(join_keys(keys)) == keys


@pytest.mark.parametrize("length", [1, 31, 33])
def test_half_a_key_is_a_programmers_error(length: int) -> None:
    with pytest.raises(AssertionError):
        split_keys(b"x" * length)
