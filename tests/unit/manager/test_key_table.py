"""The dictionary of keys in parts."""

from __future__ import annotations

import hashlib

import pytest

from kvbm.manager.key_table import KeyTable

KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(200)]


def test_it_has_what_was_put_and_not_removed() -> None:
    table: KeyTable[bytes, int] = KeyTable()
    table.put_each(KEYS, range(200))
    table.put_each(KEYS[:2], [7, 8])
    table.remove_each(KEYS[100:])
    assert len(table) == 100
    assert dict(table) == dict(zip(KEYS[:100], [7, 8, *range(2, 100)], strict=True))
    assert table.find_each(KEYS[98:102]) == [98, 99, None, None]
    assert table.has_each(KEYS[98:102]) == bytes([1, 1, 0, 0])
    assert table.find(KEYS[1]) == 8
    assert table.find(KEYS[100]) is None
    assert KEYS[0] in table
    assert KEYS[100] not in table


def test_a_key_without_a_value_cannot_be_removed() -> None:
    table: KeyTable[int, int] = KeyTable()
    table.put_each([1], [1])
    with pytest.raises(KeyError):
        table.remove_each([1, 2])


def test_no_part_has_many_of_the_keys() -> None:
    """A dictionary that grows copies what it has: that is bounded by the largest part."""
    table: KeyTable[bytes, int] = KeyTable()
    keys = [hashlib.sha256(b"%d" % number).digest() for number in range(64_000)]
    table.put_each(keys, range(64_000))
    assert max(map(len, table._parts)) < 400
