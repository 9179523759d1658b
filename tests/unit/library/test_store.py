"""A block manager with a store of its own, which others share: what is found there, and what is not."""

from __future__ import annotations

import base64
import contextlib
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("torch", reason="the library copies torch tensors; torch is not installed")

import torch

import kvbm
from kvbm.clock import ManualClock
from kvbm.library import local
from kvbm.library.store import await_listing
from kvbm.manager.remote_side import RemoteSide
from kvbm.tiers.remote.blob_tier import BlobTier
from kvbm.tiers.remote.blobs import BlobInfo, Buffer, Put
from kvbm.tiers.remote.drivers.directory import DirectoryBlobs
from rigs.library import BLOCK_TOKENS, NAMESPACE, LocalHouse, computed, content, layout, new_cache
from rigs.manager_probe import wait_for

BLOCKS = 6
TOKENS = list(range(BLOCKS * BLOCK_TOKENS))
PLACES = [4, 9, 0, 31, 7, 2]
OTHERS = [10, 11, 12, 13, 14, 15]
DEADLINE_S = 30.0

Open = Callable[..., kvbm.BlockManager]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The directory that all share."""
    directory = tmp_path / "shared"
    directory.mkdir()
    return directory


@pytest.fixture
def open_node(tmp_path: Path, store: Path) -> Iterator[Open]:
    """Opens block managers with nothing in common but the store."""
    with contextlib.ExitStack() as ends:
        count = iter(range(100))

        def open_one(**options: Any) -> kvbm.BlockManager:
            own = tmp_path / f"node-{next(count)}"
            own.mkdir()
            manager = LocalHouse(own).open(**{"host": "1MB", "remote": f"file://{store}", **options})
            return ends.enter_context(manager)

        yield open_one


def offload(manager: kvbm.BlockManager, **more: Any) -> int:
    """Offload the prompt's blocks as a model computes them."""
    cache = new_cache(1)
    for i, place in enumerate(PLACES):
        for name, layer in zip(cache, computed(TOKENS, i), strict=True):
            cache[name][place] = layer[0]
    return manager.offload(TOKENS, cache, PLACES, **more)


def onboard(manager: kvbm.BlockManager, **more: Any) -> tuple[int, int]:
    """How many blocks were found in the store, and how many came, each of which must be right."""
    cache = new_cache(2)
    before = content(cache, OTHERS)
    with manager.match(TOKENS, **more) as hit:
        found, arrived = hit.remote, hit.onboard(cache, OTHERS)
    for i in range(arrived):
        assert torch.equal(content(cache, [OTHERS[i]]), computed(TOKENS, i))
    assert torch.equal(content(cache, OTHERS[arrived:]), before[:, arrived:]), (
        "what did not come was left alone"
    )
    return found, arrived


def tier_of(manager: kvbm.BlockManager) -> BlobTier:
    """The remote tier, to look into."""
    (side,) = manager.backend.space.remotes  # type: ignore[attr-defined]
    assert isinstance(side.tier, BlobTier)
    return side.tier


def packs(store: Path) -> list[Path]:
    """The files of blocks."""
    return sorted(path for path in store.glob("*/packs/**/*") if path.is_file())


def test_what_one_stored_and_closed_the_next_finds_at_once(open_node: Open, store: Path) -> None:
    first = open_node()
    assert offload(first) == BLOCKS
    assert not packs(store), "blocks wait for the next ones of their chain"
    first.close()
    assert len(packs(store)) == 1
    second = open_node()
    assert onboard(second) == (BLOCKS, BLOCKS)
    assert second.metrics.value("kvbm_onboard_blocks_o2d") == BLOCKS
    assert second.metrics.value("kvbm_onboard_blocks_h2d") == 0
    assert onboard(second) == (0, BLOCKS), "they are in host memory now"


def test_what_lies_there_is_listed_before_the_first_lookup(
    open_node: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_node() as first:
        offload(first)
    gate, listing = threading.Event(), DirectoryBlobs.listing

    def gated(blobs: DirectoryBlobs, prefix: str) -> Iterator[BlobInfo]:
        assert gate.wait(DEADLINE_S)
        return listing(blobs, prefix)

    def awaiting(side: RemoteSide, turn: Callable[[], None], _: float) -> None:
        assert not side.tier.describe()["complete"]
        gate.set()
        await_listing(side, turn, DEADLINE_S)
        assert side.tier.describe()["complete"]

    monkeypatch.setattr(DirectoryBlobs, "listing", gated)
    monkeypatch.setattr(local, "await_listing", awaiting)
    assert onboard(open_node()) == (BLOCKS, BLOCKS)


def test_nobody_waits_for_a_store_that_is_away_or_longer_than_a_read() -> None:
    side = MagicMock(fault="away")
    side.tier.describe.return_value = {"complete": False}
    turn = MagicMock()
    await_listing(side, turn, 1e9)
    side.fault = ""
    await_listing(side, turn, 0.0)
    assert turn.call_count == 2


def test_flush_writes_what_waits_and_tells_those_who_run(open_node: Open, store: Path) -> None:
    clock = ManualClock(100.0)
    reader, writer = open_node(clock=clock), open_node(remote_linger_s=3600)
    assert onboard(reader) == (0, 0)
    offload(writer)
    assert writer.flush(DEADLINE_S)
    assert len(packs(store)) == 1

    def found() -> bool:
        clock.advance(10.0)
        reader.refresh()
        return onboard(reader)[1] == BLOCKS

    wait_for(found, DEADLINE_S, lambda: str(reader.status()))


def test_flush_says_when_a_store_takes_too_long(open_node: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, put = threading.Event(), DirectoryBlobs.put

    def gated(blobs: DirectoryBlobs, name: str, parts: Sequence[Buffer]) -> Put:
        if "packs/" in name:
            assert gate.wait(DEADLINE_S)
        return put(blobs, name, parts)

    monkeypatch.setattr(DirectoryBlobs, "put", gated)
    manager = open_node()
    offload(manager)
    assert not manager.flush(0.05)
    gate.set()
    assert manager.flush(DEADLINE_S)
    assert onboard(open_node()) == (BLOCKS, BLOCKS)


def test_what_other_weights_or_another_tenant_computed_is_never_found(open_node: Open) -> None:
    with open_node() as first:
        offload(first)
        offload(first, extras=b"tenant")
    other = kvbm.Namespace(model="test", fields=(("weights", "2"),))
    assert onboard(open_node(namespace=other)) == (0, 0)
    third = open_node()
    assert onboard(third, extras=b"another") == (0, 0)
    assert onboard(third, extras=b"tenant") == (BLOCKS, BLOCKS)


def test_a_flipped_bit_is_a_miss(open_node: Open, store: Path) -> None:
    with open_node() as first:
        offload(first)
    (pack,) = packs(store)
    data = bytearray(pack.read_bytes())
    data[len(data) // 3] ^= 1
    pack.write_bytes(data)
    second = open_node()
    found, arrived = onboard(second)
    assert found == BLOCKS, "only a read can tell"
    assert arrived < BLOCKS
    assert second.metrics.value("kvbm_failures_total", tier="remote", kind="corrupt") > 0


def test_a_pack_that_is_gone_is_a_miss(open_node: Open, store: Path) -> None:
    with open_node() as first:
        offload(first)
    second = open_node()
    for pack in packs(store):
        pack.unlink()
    assert onboard(second) == (BLOCKS, 0)
    assert offload(second) == BLOCKS, "it is computed, and kept"


def test_a_store_that_goes_away_costs_its_hits(open_node: Open, store: Path) -> None:
    with open_node() as first:
        offload(first)
    second = open_node()
    shutil.rmtree(store)
    assert onboard(second)[1] == 0
    assert offload(second) == BLOCKS
    assert onboard(second) == (0, BLOCKS), "host memory goes on"


@pytest.mark.parametrize("kind", ["nowhere", "closed", "silent"])
def test_a_store_that_is_away_at_the_start_is_no_error(open_node: Open, kind: str) -> None:
    """And no reason to wait for longer than a read may take."""
    if kind != "nowhere":
        pytest.importorskip("valkey")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if kind == "closed":
            server.close()
        url = "file:///nowhere/at/all" if kind == "nowhere" else f"redis://127.0.0.1:{port}/0"
        manager = open_node(remote=url, remote_deadline_ms=50)
        assert onboard(manager) == (0, 0)
        assert offload(manager) == BLOCKS
        assert onboard(manager) == (0, BLOCKS)


def test_the_disk_is_asked_first(open_node: Open, tmp_path: Path) -> None:
    disk = {"disk": "1MB"}
    house = LocalHouse(tmp_path)
    with house.open(host="1MB", remote=f"file://{tmp_path / 'shared'}", **disk) as first:
        offload(first)
    with house.open(host="1MB", remote=f"file://{tmp_path / 'shared'}", **disk) as second:
        with second.match(TOKENS) as hit:
            assert (hit.host, hit.disk, hit.remote) == (0, BLOCKS, 0)
    assert onboard(open_node()) == (BLOCKS, BLOCKS), "it lies in both"


def test_a_node_that_only_reads_writes_nothing(open_node: Open, store: Path) -> None:
    with open_node(remote_write=False) as first:
        assert offload(first) == BLOCKS
    assert not packs(store)


def test_the_arguments_are_those_of_a_manager(open_node: Open) -> None:
    manager = open_node(
        remote_linger_s=3, remote_deadline_ms=700, remote_ttl_hours=5, remote_bytes="2GB",
        remote_write_bytes="1GB", remote_collect=False, remote_admission="filter",
    )  # fmt: skip
    options = tier_of(manager)._options
    assert (options.load_deadline_s, options.ttl_s, options.collect) == (0.7, 5 * 3600.0, False)
    assert options.capacity_bytes == 2 * 10**9
    (side,) = manager.backend.space.remotes  # type: ignore[attr-defined]
    assert (side.rules.linger_s, side.rules.bytes_per_hour) == (3.0, 10**9)
    assert type(side.admission).__name__ != "AdmitAll"


def test_with_a_key_file_only_its_holders_read(open_node: Open, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    file = tmp_path / "keys"
    file.write_text("one:" + base64.b64encode(bytes(range(32))).decode() + "\n")
    file.chmod(0o600)
    with open_node(remote_key_file=str(file)) as first:
        offload(first, extras=b"tenant")
    assert onboard(open_node(), extras=b"tenant")[1] == 0
    assert onboard(open_node(remote_key_file=str(file)), extras=b"tenant") == (BLOCKS, BLOCKS)


def test_status_and_clear(open_node: Open, store: Path) -> None:
    manager = open_node()
    offload(manager)
    manager.flush(DEADLINE_S)
    (remote,) = manager.status()["remote"]  # type: ignore[misc]
    assert remote["place"].startswith(f"file://{store}/") and not remote["fault"]
    assert manager.clear() == BLOCKS, "of host memory"
    assert onboard(manager) == (BLOCKS, BLOCKS), "the store is others' too"
    assert manager.descriptors()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"remote": "ftp://a"}, "^remote="),
        ({"remote": "shared"}, "^remote="),
        ({"remote_ttl_hours": 0}, "^remote_ttl_hours="),
        ({"remote_deadline_ms": 1}, "^remote_deadline_ms="),
        ({"remote_bytes": "much"}, "^remote_bytes="),
        ({"remote_admission": "nope"}, "^remote_admission="),
        ({"remote_key_file": "/nowhere/keys"}, "^remote_key_file="),
        ({"namespace": None}, "^namespace=None.*or a store"),
        ({"host": None, "disk": "1MB"}, "^host=None.*remote tier"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(open_node: Open, given: dict[str, Any], says: str) -> None:
    with pytest.raises(kvbm.SettingsError, match=says):
        open_node(**given)


def test_a_store_of_ones_own_at_a_shared_manager_is_refused(tmp_path: Path) -> None:
    url: Any = "redis://user:swordfish@host:1/0"
    with pytest.raises(kvbm.SettingsError, match=r"^remote=.*shared manager.*--remote") as caught:
        kvbm.BlockManager.connect(str(tmp_path / "m.sock"), layout(), NAMESPACE, remote=url)
    assert "swordfish" not in str(caught.value)
