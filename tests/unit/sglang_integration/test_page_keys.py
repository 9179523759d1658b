"""SGLang's page hashes as block keys, and which page comes before which."""

from __future__ import annotations

import hashlib

import pytest

pytest.importorskip("numpy", reason="keys are moved by numpy; numpy is not installed")

from kvbm.block import KEY_BYTES, BlockKey
from kvbm.hashing import space_mask
from kvbm.sglang_integration.page_keys import Parents, block_keys

FINGERPRINT = bytes(range(32))
HASHES = [hashlib.sha256(bytes([i])).hexdigest() for i in range(4)]
ONE, OTHER = space_mask(FINGERPRINT, b"weights 1"), space_mask(FINGERPRINT, b"weights 2")


def test_a_hash_in_hex_is_a_key_of_its_own_bytes() -> None:
    assert block_keys(HASHES, bytes(KEY_BYTES)) == [bytes.fromhex(each) for each in HASHES]
    assert block_keys([], ONE) == []
    keys = block_keys(HASHES, ONE)
    assert keys == block_keys(HASHES, ONE)
    assert len(set(keys)) == len(HASHES)


def test_key_spaces_have_nothing_in_common() -> None:
    assert not set(block_keys(HASHES, ONE)) & set(block_keys(HASHES, OTHER))
    elsewhere = space_mask(bytes(32), b"weights 1")
    assert not set(block_keys(HASHES, ONE)) & set(block_keys(HASHES, elsewhere))


@pytest.mark.parametrize(
    "odd", ["", "abc", "page-7", HASHES[0] + "_draft", HASHES[0][:-2], 32 * "zz", "é" * 32]
)
def test_another_form_of_hash_is_named_by_its_digest(odd: str) -> None:
    (key,) = block_keys([odd], ONE)
    assert len(key) == KEY_BYTES
    assert key == block_keys([odd], ONE)[0]
    assert key not in block_keys([*HASHES, odd + "x"], ONE)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(KEY_BYTES, "big"))


def test_what_calls_have_shown_to_come_before_a_page() -> None:
    parents = Parents()
    parents.chain([key(1), key(2), key(3)])
    assert [parents.of(key(n)) for n in (1, 2, 3)] == [b"", key(1), key(2)]
    parents.chain([key(4)], before=key(3))
    parents.chain([key(4), key(5)])
    assert [parents.of(key(n)) for n in (4, 5)] == [key(3), key(4)], "a later call without it forgets nothing"


def test_pairs_are_bounded_and_those_seen_longest_ago_go_first() -> None:
    parents = Parents(3)
    parents.chain([key(n) for n in range(1, 5)])
    parents.chain([key(1), key(2)])
    parents.chain([key(8), key(9)])
    assert [parents.of(key(n)) for n in (2, 3, 4, 9)] == [key(1), b"", key(3), key(8)]
    none = Parents(0)
    none.chain([key(1), key(2)])
    assert none.of(key(2)) == b""
