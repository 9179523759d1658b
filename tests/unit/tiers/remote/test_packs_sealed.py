"""Sealed packs: who reads them, and what cannot be forged."""

from __future__ import annotations

from kvbm.testing.stored_runs import make_key
from kvbm.tiers.remote.records import checksum, decode_header, encode_header
from rigs.packed import FINGERPRINT, TENANT, Blocks, blob, marks, read, sealer, some_blocks


def test_another_tenant_or_key_is_a_plain_miss() -> None:
    blocks = some_blocks(2)
    records = blob(blocks, seal=sealer("one")).records
    assert marks(read(blocks, records, unseal=sealer("one"))) == "HH"
    assert marks(read(blocks, records, unseal=sealer("one"), tenant="bob")) == "mm"
    assert marks(read(blocks, records, unseal=sealer("one"), tenant=None)) == "mm"
    assert marks(read(blocks, records, unseal=sealer("two"))) == "mm"
    assert marks(read(blocks, records, unseal=None)) == "mm"


def test_with_a_seal_what_anybody_could_have_written_is_no_hit() -> None:
    blocks = some_blocks(1)
    assert marks(read(blocks, blob(blocks).records, unseal=sealer())) == "m"


def test_a_sealed_record_shows_neither_bytes_nor_facts_nor_their_checksum() -> None:
    blocks = some_blocks(3)
    data = blob(blocks, seal=sealer()).data
    for head, (source,) in zip(blocks.heads, blocks.sources, strict=True):
        assert bytes(source[:64]) not in data
        assert not head.facts or head.facts not in data
        assert checksum(FINGERPRINT, head.key, [source]) not in data
    assert TENANT.encode() not in data


def test_what_a_sealed_record_says_of_itself_cannot_be_changed() -> None:
    """Not even by somebody who makes the header anew."""
    blocks, seal = some_blocks(3), sealer()
    data = blob(blocks, seal=seal).record(1)
    record = decode_header(memoryview(data))
    assert record is not None and record.facts_bytes == 7
    sealed, head = data[record.stored_from :], record.head
    changes = [
        record._replace(facts_bytes=6),
        *(
            record._replace(head=head._replace(**change))
            for change in (
                {"group": 9},
                {"parent": None},
                {"parent": make_key(9)},
                {"engine_hash": b""},
                {"engine_hash": bytes(32)},
            )
        ),
    ]
    own = Blocks(blocks.layout, blocks.heads[1:2], blocks.sources[1:2])
    assert marks(read(own, encode_header(record) + sealed, unseal=seal)) == "H"
    for changed in changes:
        assert marks(read(own, encode_header(changed) + sealed, unseal=seal)) == "C", changed
    compressed = record._replace(codec="zstd-2")
    assert marks(read(own, encode_header(compressed) + sealed, unseal=seal)) == "m"
    # Moved to another key, and to another namespace.
    other = Blocks(blocks.layout, blocks.heads[:1], blocks.sources[1:2])
    moved = encode_header(record._replace(head=head._replace(key=blocks.heads[0].key))) + sealed
    assert marks(read(other, moved, unseal=seal)) == "C"
    moved = encode_header(record._replace(fingerprint=bytes(32))) + sealed
    assert marks(read(own, moved, unseal=seal, fingerprint=bytes(32))) == "C"


def test_a_new_master_key_seals_and_the_old_one_still_opens() -> None:
    blocks = some_blocks(1)
    old = blob(blocks, seal=sealer("old"))
    new = blob(blocks, seal=sealer("new", "old"))
    assert old.entry.name != new.entry.name
    for packed, ids, expected in (
        (old, ("new", "old"), "H"),
        (new, ("old", "new"), "H"),
        (new, ("old",), "m"),
        (old, ("new",), "m"),
    ):
        assert marks(read(blocks, packed.records, unseal=sealer(*ids))) == expected, ids


def test_two_tenants_do_not_share_a_name() -> None:
    blocks = some_blocks(1)
    names = {blob(blocks, seal=sealer(), tenant=tenant).entry.name for tenant in ("ann", "bob", "")}
    assert len(names) == 3
    assert blob(blocks, seal=sealer()).entry.name == blob(blocks, seal=sealer()).entry.name
