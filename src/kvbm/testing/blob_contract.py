"""The contract of a store of named blobs as tests. Subclass `BlobContract`, say how to open a store, run pytest::

    class TestMyStore(BlobContract):
        def open_store(self, space, clock):
            return MyBlobs(f"http://127.0.0.1:9000/{space}", clock)

Every test has a space of its own; two stores that are opened on one space are two nodes at one store.
"""

from __future__ import annotations

import abc
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvbm.clock import Clock, ManualClock
from kvbm.tiers.remote.blobs import BlobStore, Buffer, Put

THREADS = 8
CLOCK_SLACK_S = 2.5
"""Stores tell times to the second, some by cutting."""


def blob_name(number: int, kind: str = "packs") -> str:
    """A name as packs have them."""
    digits = f"{number:040x}"
    return f"{kind}/{digits[-2:]}/{digits}"


def blob_bytes(number: int, size: int) -> bytes:
    """Bytes that no other blob has."""
    unit = b"%016x" % number
    return (unit * (size // len(unit) + 1))[:size]


class BlobContract(abc.ABC):
    """The duties of every driver. Override `open_store`, and what differs in a store of limited abilities."""

    refuses_second: bool = True
    """Of two puts at the same moment one is told EXISTS."""
    large_bytes: int = 3 << 20

    @abc.abstractmethod
    def open_store(self, space: str, clock: Clock) -> BlobStore:
        """A store on `space`, a word: what was put there before is there. Empty where no test has been."""

    @pytest.fixture
    def space(self) -> str:
        """A word that no other test has."""
        return f"t{uuid.uuid4().hex[:16]}"

    @pytest.fixture
    def clock(self) -> ManualClock:
        """Moved by the test, for drivers that ask their store for its time only now and then."""
        return ManualClock()

    @pytest.fixture
    def open_more(self, space: str, clock: ManualClock) -> Iterator[Callable[[], BlobStore]]:
        """Opens one more store on the test's space."""
        opened: list[BlobStore] = []

        def open_one() -> BlobStore:
            opened.append(self.open_store(space, clock))
            return opened[-1]

        yield open_one
        for store in opened:
            store.close()

    @pytest.fixture
    def store(self, open_more: Callable[[], BlobStore]) -> BlobStore:
        """One store."""
        return open_more()

    def test_says_what_it_is(self, store: BlobStore) -> None:
        assert "://" in store.place
        assert store.blob_bytes_max >= 1 << 20
        assert store.notes == ()
        assert store.requests() == dict.fromkeys(("put", "get", "list", "delete"), 0)

    def test_a_blob_comes_back_at_another_node(self, open_more: Callable[[], BlobStore]) -> None:
        blob = blob_bytes(1, self.large_bytes)
        parts: list[Buffer] = [bytearray(blob[:1]), memoryview(blob)[1:70_000], b"", blob[70_000:]]
        assert open_more().put(blob_name(1), parts) is Put.CREATED
        found = open_more().read(blob_name(1), 0, len(blob))
        assert found is not None
        assert bytes(found) == blob

    def test_many_small_parts_are_one_blob(self, store: BlobStore) -> None:
        blob = os.urandom(5000)
        assert store.put(blob_name(1), [blob[at : at + 1] for at in range(5000)]) is Put.CREATED
        assert same(store.read(blob_name(1), 0, 5000), blob)

    @pytest.mark.parametrize(
        ("start", "end"), [(0, 1), (0, 1000), (1, 999), (999, 1000), (500, 5000), (999, 1001)]
    )
    def test_a_part_of_a_blob(self, store: BlobStore, start: int, end: int) -> None:
        blob = os.urandom(1000)
        store.put(blob_name(1), [blob])
        assert same(store.read(blob_name(1), start, end), blob[start:end])

    def test_beyond_the_end_there_is_nothing(self, store: BlobStore) -> None:
        store.put(blob_name(1), [b"0123456789"])
        assert same(store.read(blob_name(1), 10, 20), b"")
        assert same(store.read(blob_name(1), 5000, 9000), b"")

    @pytest.mark.parametrize("length", [1, 10, 999, 1000, 1001, 100_000])
    def test_the_end_of_a_blob(self, store: BlobStore, length: int) -> None:
        blob = os.urandom(1000)
        store.put(blob_name(1), [blob])
        found = store.read_end(blob_name(1), length)
        assert found is not None
        assert same(found[0], blob[-length:])
        assert found[1] == 1000

    def test_what_is_not_there(self, store: BlobStore) -> None:
        assert store.read(blob_name(1), 0, 10) is None
        assert store.read_end(blob_name(1), 10) is None
        assert list(store.listing("packs/")) == []
        store.touch(blob_name(1))
        store.delete([blob_name(1), blob_name(2)])
        store.delete([])
        assert list(store.listing("")) == []

    def test_a_second_put_changes_nothing(self, store: BlobStore) -> None:
        assert store.put(blob_name(1), [b"the first"]) is Put.CREATED
        assert store.put(blob_name(1), [b"another"]) is Put.EXISTS
        assert same(store.read(blob_name(1), 0, 100), b"the first")

    def test_of_many_puts_at_once_one_is_told_that_it_created(self, store: BlobStore) -> None:
        """All put the same bytes, as names say what is in a blob."""
        blob = blob_bytes(1, 300_000)
        for number in range(4):
            told = at_once(lambda _, number=number: store.put(blob_name(number), [blob]))  # type: ignore[misc]  # mypy infers no default
            created = told.count(Put.CREATED)
            assert created == 1 or (created > 1 and not self.refuses_second)
            assert same(store.read(blob_name(number), 0, 300_000), blob)

    def test_many_threads_read_and_write(self, store: BlobStore) -> None:
        def one(number: int) -> bool:
            blob = blob_bytes(number, 100_000 + number)
            store.put(blob_name(number), [blob])
            found = store.read_end(blob_name(number), 60_000)
            return found is not None and same(found[0], blob[-60_000:]) and found[1] == len(blob)

        assert all(at_once(one))
        assert len(list(store.listing("packs/"))) == THREADS

    def test_a_listing_has_names_in_order_and_sizes(self, store: BlobStore) -> None:
        numbers = [7, 300, 4, 1024, 511, 0, 65]
        for number in numbers:
            store.put(blob_name(number), [blob_bytes(number, 10 + number)])
        store.put(blob_name(1, "other"), [b"x"])
        listed = list(store.listing("packs/"))
        assert [(info.name, info.size) for info in listed] == sorted(
            (blob_name(number), 10 + number) for number in numbers
        )
        everything = [info.name for info in store.listing("")]
        assert everything == sorted([blob_name(1, "other"), *(info.name for info in listed)])
        assert [info.name for info in store.listing("packs/00/")] == [
            name for name in everything if name.startswith("packs/00/")
        ]
        assert list(store.listing("pack/")) == []

    def test_times_are_by_the_store_s_clock(self, store: BlobStore) -> None:
        before_s = store.now_s()
        store.put(blob_name(1), [b"x"])
        (info,) = store.listing("packs/")
        assert before_s - CLOCK_SLACK_S <= info.modified_s <= store.now_s() + CLOCK_SLACK_S

    def test_the_clock_goes_on(self, store: BlobStore, clock: ManualClock) -> None:
        first_s = store.now_s()
        clock.advance(3600.0)
        assert store.now_s() >= first_s - CLOCK_SLACK_S

    def test_a_touched_blob_is_younger(self, open_more: Callable[[], BlobStore]) -> None:
        store, other = open_more(), open_more()
        for number in (1, 2, 3):
            store.put(blob_name(number), [b"x" * number])
        self.wait_for_another_time(store)
        store.touch(blob_name(2))
        listed = {info.name: info for info in other.listing("packs/")}
        assert [info.size for info in listed.values()] == [1, 2, 3]
        assert listed[blob_name(2)].modified_s > listed[blob_name(3)].modified_s
        assert same(other.read(blob_name(2), 0, 10), b"xx")
        assert [info.name for info in other.listing("")] == list(listed)

    def test_deleted_blobs_are_gone_and_can_come_again(self, open_more: Callable[[], BlobStore]) -> None:
        store, other = open_more(), open_more()
        for number in range(6):
            store.put(blob_name(number), [b"x"])
        store.touch(blob_name(3))
        other.delete([blob_name(3), blob_name(99), blob_name(4)])
        assert [info.name for info in store.listing("")] == [blob_name(number) for number in (0, 1, 2, 5)]
        assert store.read(blob_name(3), 0, 1) is None
        assert store.read_end(blob_name(4), 1) is None
        assert store.put(blob_name(3), [b"yy"]) is Put.CREATED
        assert same(other.read(blob_name(3), 0, 10), b"yy")

    def test_more_blobs_than_a_page(self, store: BlobStore) -> None:
        """A page has at most 1,000 of them at the stores that we know."""
        names = [blob_name(number) for number in range(self.page_and_more)]
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(lambda name: store.put(name, [b"x"]), names))
        for name in names[::97]:
            store.touch(name)
        assert [info.name for info in store.listing("packs/")] == sorted(names)
        store.delete(names[1:])
        assert [info.name for info in store.listing("")] == names[:1]

    page_and_more: int = 1050

    def test_requests_are_counted(self, store: BlobStore) -> None:
        store.put(blob_name(1), [b"x"])
        store.read(blob_name(1), 0, 1)
        before = store.requests()
        assert before["put"] >= 1 and before["get"] >= 1
        store.read_end(blob_name(1), 1)
        list(store.listing("packs/"))
        store.delete([blob_name(1)])
        after = store.requests()
        assert after["get"] > before["get"] and after["list"] >= 1 and after["delete"] >= 1
        assert after["put"] == before["put"]

    def test_closing_twice_is_no_error(self, store: BlobStore) -> None:
        store.put(blob_name(1), [b"x"])
        store.close()
        store.close()

    def wait_for_another_time(self, store: BlobStore) -> None:
        """Until the store's clock says something else than it did for what was put before: a little over a second."""
        threading.Event().wait(1.1)


def at_once(work: Callable[[int], object], count: int = THREADS) -> list[object]:
    """What `count` threads answer that begin together."""
    gate = threading.Barrier(count)

    def one(number: int) -> object:
        gate.wait()
        return work(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))


def same(found: object, blob: Sequence[int]) -> bool:
    """Whether what a store answered is exactly these bytes."""
    return found is not None and bytes(memoryview(found)) == bytes(blob)  # type: ignore[arg-type]  # a buffer
