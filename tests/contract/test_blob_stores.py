"""The public contract of a store of blobs, run on every driver at real servers on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.clock import Clock, ManualClock
from kvbm.testing.blob_contract import BlobContract, blob_name, same
from kvbm.tiers.remote.blobs import BlobStore
from kvbm.tiers.remote.drivers.credentials import Credentials
from kvbm.tiers.remote.drivers.opening import open_blobs
from rigs.blob_services import (
    ACCESS_KEY,
    REGION,
    SECRET_KEY,
    MooncakeService,
    RedisService,
    S3Service,
    mooncake,
    moto,
    rclone,
    redis_server,
    seaweedfs,
)
from rigs.faulty_blobs import FaultyBlobs, MemoryBlobs

BUCKET = "bucket"
KEYS = Credentials(ACCESS_KEY, SECRET_KEY)


class TestMemory(BlobContract):
    def open_store(self, space: str, clock: Clock) -> BlobStore:
        if not hasattr(self, "spaces"):
            self.spaces: dict[str, MemoryBlobs] = {}
        known = self.spaces.setdefault(space, MemoryBlobs(clock))
        again = MemoryBlobs(clock)
        again.blobs, again.modified_s = known.blobs, known.modified_s
        self.clock_moved_by_hand = clock
        return FaultyBlobs(again)

    def wait_for_another_time(self, store: BlobStore) -> None:
        assert isinstance(self.clock_moved_by_hand, ManualClock)
        self.clock_moved_by_hand.advance(1.0)


class TestDirectory(BlobContract):
    fsync = "no"

    @pytest.fixture(autouse=True)
    def root(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def open_store(self, space: str, clock: Clock) -> BlobStore:
        (self.directory / space).mkdir(exist_ok=True)
        return open_blobs(f"file://{self.directory}/{space}?fsync={self.fsync}", clock=clock)


class TestDirectoryWithFsync(TestDirectory):
    fsync = "yes"
    page_and_more = 30


class TestLocalObjects(BlobContract):
    """Object stores' driver on a directory: a store that lists in no order, and whose deletes are single."""

    @pytest.fixture(autouse=True)
    def root(self, tmp_path: Path) -> None:
        pytest.importorskip("obstore")
        self.directory = tmp_path

    def open_store(self, space: str, clock: Clock) -> BlobStore:
        from kvbm.tiers.remote.drivers.object_clients import local
        from kvbm.tiers.remote.drivers.objects import ObjectBlobs, Traits
        from kvbm.tiers.remote.drivers.probing import find_traits

        kind = Traits(ordered=False, bulk_delete=False, suffixes=False)
        where = self.directory / space
        return ObjectBlobs(local(where), f"local://{where}", clock, kind=kind, find_traits=find_traits)


class OnS3(BlobContract):
    """At an S3 server."""

    service: S3Service

    def open_store(self, space: str, clock: Clock) -> BlobStore:
        url = f"s3://{BUCKET}/{space}?endpoint={self.service.endpoint}&region={REGION}"
        return open_blobs(url, clock=clock, credentials=KEYS, deadline_s=30.0)

    def test_a_deleted_blob_leaves_no_mark(self, store: BlobStore) -> None:
        from kvbm.tiers.remote.drivers.objects import ObjectBlobs

        assert isinstance(store, ObjectBlobs)
        store.put(blob_name(1), [b"x"])
        store.touch(blob_name(1))
        assert len(list(store._objects(""))) == 2
        store.delete([blob_name(1)])
        assert list(store._objects("")) == []


@pytest.fixture(scope="session")
def seaweed_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Service]:
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as service:
        service.make_bucket(BUCKET)
        yield service


@pytest.fixture(scope="session")
def moto_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Service]:
    with moto(tmp_path_factory.mktemp("moto")) as service:
        service.make_bucket(BUCKET)
        yield service


@pytest.fixture(scope="session")
def rclone_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Service]:
    with rclone(tmp_path_factory.mktemp("rclone")) as service:
        service.make_bucket(BUCKET)
        yield service


@pytest.fixture(scope="session")
def redis_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisService]:
    with redis_server(tmp_path_factory.mktemp("redis")) as service:
        yield service


@pytest.fixture(scope="session")
def mooncake_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeService]:
    with mooncake(tmp_path_factory.mktemp("mooncake")) as service:
        yield service


class HonouringS3(OnS3):
    """At an S3 server that does what it is asked."""

    def test_nothing_is_noted(self, store: BlobStore) -> None:
        store.put(blob_name(1), [b"x"])
        assert store.notes == ()


class TestSeaweedFS(HonouringS3):
    @pytest.fixture(autouse=True)
    def at(self, seaweed_service: S3Service) -> None:
        pytest.importorskip("obstore")
        self.service = seaweed_service


@pytest.mark.slow
class TestMoto(HonouringS3):
    # moto looks whether there is such an object and writes it without a lock.
    refuses_second = False

    @pytest.fixture(autouse=True)
    def at(self, moto_service: S3Service) -> None:
        pytest.importorskip("obstore")
        self.service = moto_service


class TestRclone(OnS3):
    """A server that ignores If-None-Match and ranges."""

    refuses_second = False

    @pytest.fixture(autouse=True)
    def at(self, rclone_service: S3Service) -> None:
        pytest.importorskip("obstore")
        self.service = rclone_service

    def test_what_it_ignores_is_noted(self, store: BlobStore) -> None:
        store.put(blob_name(1), [b"x"])
        assert len(store.notes) == 2
        assert "If-None-Match" in store.notes[0]
        assert "ranges" in store.notes[1]
        assert store.blob_bytes_max == 4 << 20


class TestRedis(BlobContract):
    @pytest.fixture(autouse=True)
    def at(self, redis_service: RedisService) -> None:
        pytest.importorskip("valkey")
        self.service = redis_service

    def open_store(self, space: str, clock: Clock) -> BlobStore:
        return open_blobs(f"redis://127.0.0.1:{self.service.port}/0?prefix={space}", clock=clock)


class OnMooncake(BlobContract):
    """Mooncake takes a second put and says nothing: of several at once more than one may be told that it created."""

    refuses_second = False

    @pytest.fixture(autouse=True)
    def at(self, mooncake_service: MooncakeService) -> None:
        self.mooncake = mooncake_service

    def index(self, space: str) -> str:
        raise NotImplementedError

    def open_store(self, space: str, clock: Clock) -> BlobStore:
        return open_blobs(
            self.mooncake.url(self.index(space), f"&prefix={space}"), clock=clock, deadline_s=30.0
        )

    def test_a_name_without_a_value_is_no_blob_and_is_taken_out(self, store: BlobStore) -> None:
        from kvbm.tiers.remote.drivers.mooncake import MooncakeBlobs

        assert isinstance(store, MooncakeBlobs)
        for number in range(4):
            store.put(blob_name(number), [b"x"])
        store._index.put(blob_name(4), [b"1"])
        store._ask("remove", "delete", [blob_name(number) for number in (0, 1)])
        assert store.read(blob_name(0), 0, 1) is None
        assert [info.name for info in store._index.listing("")] == [
            blob_name(number) for number in (1, 2, 3, 4)
        ]
        assert [info.name for info in store.listing("packs/")] == [blob_name(number) for number in (2, 3)]
        assert [info.name for info in store._index.listing("")] == [blob_name(number) for number in (2, 3)]

    def test_a_value_without_a_name_gets_one_with_the_next_put(self, store: BlobStore) -> None:
        from kvbm.tiers.remote.drivers.mooncake import MooncakeBlobs

        assert isinstance(store, MooncakeBlobs)
        store.put(blob_name(1), [b"x"])
        store._index.delete([blob_name(1)])
        assert same(store.read(blob_name(1), 0, 1), b"x")
        assert list(store.listing("")) == []
        store.put(blob_name(1), [b"x"])
        assert [info.name for info in store.listing("")] == [blob_name(1)]


@pytest.mark.slow
class TestMooncakeWithDirectory(OnMooncake):
    @pytest.fixture(autouse=True)
    def root(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def index(self, space: str) -> str:
        (self.directory / space).mkdir(exist_ok=True)
        return f"file://{self.directory}/{space}"


@pytest.mark.slow
class TestMooncakeWithRedis(OnMooncake):
    @pytest.fixture(autouse=True)
    def at_redis(self, redis_service: RedisService) -> None:
        pytest.importorskip("valkey")
        self.redis = redis_service

    def index(self, space: str) -> str:
        return f"redis://127.0.0.1:{self.redis.port}/0?prefix={space}"
