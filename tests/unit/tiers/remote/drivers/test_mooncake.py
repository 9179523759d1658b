"""Mooncake on bad days: masters, holders and its own process that end or stop; what a node sees of it, and when."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbm.block import BlockKey, Outcome
from kvbm.clock import ManualClock
from kvbm.testing.blob_contract import blob_bytes, blob_name, same
from kvbm.testing.stored_runs import LAYOUT, NAMESPACE, RunMemory, make_key
from kvbm.tiers.contract import BlockHead, Completion
from kvbm.tiers.remote.blob_tier import BlobTier, open_blob_tier
from kvbm.tiers.remote.blobs import Put, StoreError
from kvbm.tiers.remote.drivers.mooncake import MooncakeBlobs
from kvbm.tiers.remote.drivers.mooncake_calls import RESTART_S
from kvbm.tiers.remote.drivers.mooncake_wire import CONNECTIONS
from kvbm.tiers.remote.drivers.opening import open_blobs
from kvbm.tiers.remote.options import RemoteOptions
from rigs.blob_services import MooncakeService, mooncake, mooncake_master
from rigs.manager_probe import free_port, wait_for

pytestmark = pytest.mark.slow

WAIT_S = 40.0
Opener = Callable[..., MooncakeBlobs]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[MooncakeService]:
    with mooncake(tmp_path) as running:
        yield running


@pytest.fixture
def opened(tmp_path: Path, clock: ManualClock) -> Iterator[Opener]:
    """Opens stores on one index."""
    stores: list[MooncakeBlobs] = []
    (tmp_path / "index").mkdir()

    def opens(service: MooncakeService, more: str = "", deadline_s: float = 15.0) -> MooncakeBlobs:
        url = service.url(f"file://{tmp_path}/index", more)
        store = open_blobs(url, clock=clock, deadline_s=deadline_s)
        assert isinstance(store, MooncakeBlobs)
        stores.append(store)
        return store

    yield opens
    for store in stores:
        store.close()


def process_of(store: MooncakeBlobs) -> int:
    pid = store._calls.pid
    assert pid is not None
    return pid


def trouble(ask: Callable[[], object]) -> StoreError:
    with pytest.raises(StoreError) as caught:
        ask()
    return caught.value


def ended(tier: BlobTier) -> Completion:
    """The completion of the one job that is pending, within its deadline and a little."""
    end_s = time.monotonic() + 15.0
    while not (found := tier.poll()):
        left_s = end_s - time.monotonic()
        assert left_s > 0.0, "it does not complete"
        select.select([tier.fileno()], [], [], left_s)
    (completion,) = found
    return completion


def load(tier: BlobTier, keys: list[BlockKey]) -> tuple[Completion, bool]:
    """How a load of known blocks ends, and whether it brought the right bytes."""
    buffers = [RunMemory(LAYOUT) for _ in keys]
    views = [buffer.views for buffer in buffers]
    assert tier.submit_load(2, keys, tier.places(keys)[0], views, None) is Outcome.PENDING
    return ended(tier), all(buffer.holds(key) for buffer, key in zip(buffers, keys, strict=True))


def comes(ask: Callable[[], bool]) -> bool:
    """Whether it comes true: asked again and again, an error being another no."""

    def asked() -> bool:
        try:
            return ask()
        except StoreError:
            return False

    wait_for(asked, WAIT_S, "it did not come true")
    return True


def test_a_node_that_gives_memory_and_one_that_does_not(tmp_path: Path, opened: Opener) -> None:
    with mooncake_master(tmp_path) as service:
        giver, other = opened(service, "&segment=64MiB"), opened(service)
        assert trouble(lambda: other.put(blob_name(1), [b"x"])).trouble == "full"
        assert giver.read(blob_name(1), 0, 1) is None  # it is in the pool from now on
        blob = blob_bytes(2, 16 << 20)
        assert other.put(blob_name(2), [blob]) is Put.CREATED
        assert same(giver.read(blob_name(2), 0, len(blob)), blob)
        giver.close()
        # What it gave has gone with it, sooner or later; nothing hangs and nothing is wrong.
        assert comes(lambda: other.read(blob_name(2), 0, 10) is None)
        assert list(other.listing("")) == []


def test_no_master_is_said_at_once(tmp_path: Path, opened: Opener, clock: ManualClock) -> None:
    nobody = opened(MooncakeService(free_port(), None, None))  # type: ignore[arg-type]
    error = trouble(lambda: nobody.read(blob_name(1), 0, 1))
    assert error.trouble == "unreachable"
    assert "the master at 127.0.0.1:" in str(error)
    assert "cannot be reached" in str(trouble(lambda: nobody.put(blob_name(1), [b"x"])))
    with mooncake_master(tmp_path, port=int(nobody.place.split(":")[2].partition("?")[0])):
        clock.advance(RESTART_S)
        assert nobody.read(blob_name(1), 0, 1) is None


def test_the_library_s_process_is_killed(
    service: MooncakeService, opened: Opener, clock: ManualClock
) -> None:
    store = opened(service)
    store.put(blob_name(1), [b"kept"])
    first = process_of(store)
    os.kill(first, signal.SIGKILL)
    error = trouble(lambda: store.read(blob_name(1), 0, 10))
    assert error.trouble == "unreachable"
    assert "killed by signal 9" in str(error)
    clock.advance(RESTART_S)
    assert same(store.read(blob_name(1), 0, 10), b"kept")
    assert process_of(store) != first


def test_closing_ends_the_process(service: MooncakeService, opened: Opener) -> None:
    store = opened(service)
    store.put(blob_name(1), [b"x"])
    pid = process_of(store)
    store.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert trouble(lambda: store.read(blob_name(1), 0, 1)).trouble == "unreachable"


def test_the_process_ends_with_its_node(service: MooncakeService, opened: Opener) -> None:
    """However that ends: all that the process sees of it is the end of its input."""
    store = opened(service)
    store.put(blob_name(1), [b"x"])
    process = store._calls._process
    assert process is not None
    process.control.close()
    assert process._child.wait(10.0) == 0


def test_a_silent_master_is_given_up_at_the_deadline(service: MooncakeService, opened: Opener) -> None:
    store, other = opened(service, deadline_s=15.0), opened(service, deadline_s=0.3)
    store.put(blob_name(1), [b"kept"])
    assert comes(lambda: other.read(blob_name(1), 0, 1) is not None)  # its process takes longer to start
    service.master.send_signal(signal.SIGSTOP)
    try:
        begun_s = time.monotonic()
        for ask in (
            lambda: other.read(blob_name(1), 0, 1),
            lambda: other.put(blob_name(2), [b"x"]),
            lambda: list(other.listing("packs/")),
            lambda: other.delete([blob_name(1)]),
        ):
            assert trouble(ask).trouble == "slow"
        assert time.monotonic() - begun_s < 10.0  # Mooncake itself waits 30 s in each of them
    finally:
        service.master.send_signal(signal.SIGCONT)
    assert comes(lambda: store.put(blob_name(3), [b"x"]) is Put.CREATED)


def test_a_process_that_answers_nothing_is_replaced(
    service: MooncakeService, opened: Opener, clock: ManualClock
) -> None:
    store = opened(service)
    store.put(blob_name(1), [b"kept"])
    first = process_of(store)
    os.kill(first, signal.SIGSTOP)
    store._calls._deadline_s = 0.05
    for _ in range(CONNECTIONS):
        assert trouble(lambda: store.read(blob_name(1), 0, 10)).trouble == "slow"
    store._calls._deadline_s = 15.0
    assert "in a row" in str(trouble(lambda: store.read(blob_name(1), 0, 10)))
    clock.advance(RESTART_S)
    assert same(store.read(blob_name(1), 0, 10), b"kept")
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_the_node_that_held_a_blob_is_killed(service: MooncakeService, opened: Opener) -> None:
    store = opened(service)
    store.put(blob_name(1), [b"x" * 5000])
    assert service.holder is not None
    service.holder.kill()
    service.holder.wait()
    # At first the master thinks that it is there, and reading fails; then there is no such blob.
    assert comes(lambda: store.read(blob_name(1), 0, 10) is None)
    assert list(store._index.listing("")) == []


def test_the_master_is_killed_and_comes_back(
    service: MooncakeService, opened: Opener, tmp_path: Path
) -> None:
    store = opened(service)
    store.put(blob_name(1), [b"x"])
    store.put(blob_name(2), [b"x"])
    service.master.kill()
    service.master.wait()
    assert trouble(lambda: store.read(blob_name(1), 0, 10)).trouble == "unreachable"
    assert trouble(lambda: list(store.listing(""))).trouble == "unreachable"
    assert len(list(store._index.listing(""))) == 2, "nobody knows that it has gone"
    (tmp_path / "again").mkdir()
    with mooncake_master(tmp_path / "again", port=service.port):
        assert comes(lambda: store.put(blob_name(3), [b"new"]) is Put.CREATED)
        assert [info.name for info in store.listing("")] == [blob_name(3)]
        assert store.read(blob_name(1), 0, 10) is None
        assert store.put(blob_name(2), [b"yy"]) is Put.CREATED
        assert same(store.read(blob_name(2), 0, 10), b"yy")


def test_a_full_pool_evicts_or_says_so(tmp_path: Path, opened: Opener) -> None:
    with mooncake_master(tmp_path) as service:
        store = opened(service, "&segment=64MiB")
        blob = blob_bytes(1, 8 << 20)
        said = []
        for number in range(16):
            try:
                store.put(blob_name(number), [blob])
            except StoreError as error:
                said.append(error.trouble)
        assert set(said) <= {"full"}
        listed = list(store.listing("packs/"))
        assert 0 < len(listed) <= 8
        assert all(info.size == len(blob) for info in listed)
        assert {info.name for info in listed} <= {info.name for info in store._index.listing("packs/")}


def test_what_one_node_s_tier_stores_another_s_loads_until_the_pool_has_gone(
    service: MooncakeService, opened: Opener, tmp_path: Path
) -> None:
    options = RemoteOptions(poll_s=0.05, poll_max_s=0.1, collect=False, load_deadline_s=5.0)
    one, other = (
        open_blob_tier(opened(service), LAYOUT, NAMESPACE, options, jitter=random.Random(seed))
        for seed in (1, 2)
    )
    keys = [make_key(number) for number in range(6)]
    heads = [BlockHead(key, keys[number - 1] if number else None) for number, key in enumerate(keys)]
    sources = [RunMemory.of([key], LAYOUT).views for key in keys]
    assert one.submit_store(1, heads, sources, None) is Outcome.PENDING
    assert ended(one).outcome is Outcome.HIT

    def told() -> bool:
        for tier in (one, other):
            tier.tick()
            assert tier.poll() == []
        return min(other.places(keys)) >= 0

    wait_for(told, WAIT_S, "the other node learns nothing")
    completion, right = load(other, keys)
    assert completion.outcome is Outcome.HIT
    assert right
    service.master.kill()
    service.master.wait()
    assert load(other, keys)[0].outcome is Outcome.RETRY
    (tmp_path / "again").mkdir()
    with mooncake_master(tmp_path / "again", port=service.port):
        outcome = Outcome.RETRY
        while outcome is Outcome.RETRY:
            wait_for(lambda: told() and not other.fault, WAIT_S, lambda: other.fault)
            completion, _ = load(other, keys)
            outcome = completion.outcome
        assert outcome is Outcome.MISS
        assert not completion.corrupt
        assert [info.name for info in opened(service)._index.listing("") if "/packs/" in info.name] == []
    one.close()
    other.close()
