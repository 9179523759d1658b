"""A client's mirror of a shared manager: it follows what others store and evict, and forgets with the session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the library copies torch tensors; torch is not installed")

import kvbm
from kvbm.client.channel import readable_among
from kvbm.client.mirror import Mirror
from kvbm.library.attachment import Attachment
from rigs.library import BLOCK_TOKENS, NAMESPACE, SharedHouse, layout, new_cache
from rigs.served import DEADLINE_S

TOKENS = list(range(6 * BLOCK_TOKENS))
KEYS = kvbm.Chain(layout(), NAMESPACE, TOKENS).keys


@pytest.fixture
def house(tmp_path: Path) -> Iterator[SharedHouse]:
    house = SharedHouse(tmp_path)
    yield house
    house.close()


def mirrored(house: SharedHouse, mirror: Mirror) -> kvbm.BlockManager:
    """A client with a mirror."""
    assert house.served is not None
    attachment = Attachment.at(house.served.path)
    return kvbm.BlockManager.attach(
        attachment, layout(), NAMESPACE, reply_timeout_s=DEADLINE_S, mirror=mirror
    )


def until(client: kvbm.BlockManager, condition: Callable[[], object]) -> None:
    """Refresh the client whenever there is something to read, until the condition holds."""
    deadline_s = time.monotonic() + DEADLINE_S
    client.refresh()
    while not condition():
        assert time.monotonic() < deadline_s, "it was never told"
        readable_among(client.descriptors(), 0.05)
        client.refresh()


def test_a_mirror_follows_what_other_clients_do(house: SharedHouse) -> None:
    """It has room for 8 blocks: those that go are told of too."""
    mirror = Mirror()
    with house.open(host=None, host_blocks=8) as other, mirrored(house, mirror) as client:
        until(client, lambda: mirror.complete)
        assert mirror.held(KEYS) == 0
        assert other.offload(TOKENS, new_cache(1), range(6)) == 6
        until(client, lambda: mirror.in_host(KEYS) == 6)
        later = list(range(500, 500 + 5 * BLOCK_TOKENS))
        keys = kvbm.Chain(layout(), NAMESPACE, later).keys
        assert other.offload(later, new_cache(2), range(5)) == 5
        until(client, lambda: mirror.in_host(keys) == 5 and sum(mirror.each_in_host(KEYS)) == 3)
        held = house.with_space(lambda space: {key for _, key in space.host_pool.resident()})
        assert mirror.each_in_host(KEYS) == [key in held for key in KEYS]
        other.close()
        assert house.served is not None
        while house.served.ask(lambda server: server.engine_count) > 1:
            pass
        assert client.clear() == 8
        until(client, lambda: not any(mirror.each_in_host([*KEYS, *keys])))


def test_a_mirror_forgets_with_the_manager_and_is_told_again_by_the_next(house: SharedHouse) -> None:
    """What lies on disk only is held, and not in host memory."""
    mirror = Mirror()
    with house.open(disk="1MB") as other:
        client = mirrored(house, mirror)
        assert other.offload(TOKENS, new_cache(1), range(6)) == 6
        assert other.flush()
        until(client, lambda: mirror.complete and mirror.in_host(KEYS) == 6)
        house.with_space(lambda space: space.clear("host"))
        until(client, lambda: mirror.in_host(KEYS) == 0)
        assert mirror.held(KEYS) == 6
    house.close()
    until(client, lambda: not mirror.complete)
    assert mirror.held(KEYS) == 0
    house.open(disk="1MB").close()
    until(client, lambda: mirror.complete)
    assert (mirror.held(KEYS), mirror.in_host(KEYS)) == (6, 0), "its files were found again"
    with client.match(TOKENS) as hit:
        assert (hit.blocks, hit.disk) == (6, 6)
        assert hit.onboard(new_cache(2), range(6)) == 6
        until(client, lambda: mirror.in_host(KEYS) == 6)
    client.close()


def test_a_client_without_a_mirror_is_told_nothing(house: SharedHouse) -> None:
    with house.open() as manager:
        manager.offload(TOKENS, new_cache(1), range(6))
        assert house.served is not None
        listening = house.served.ask(lambda server: len(server._announcements._accounts))
        assert listening == 0
        with mirrored(house, Mirror()):
            assert house.served.ask(lambda server: len(server._announcements._accounts)) == 1
        while house.served.ask(lambda server: len(server._announcements._accounts)):
            pass
        assert house.with_space(lambda space: len(space.held._listeners)) == 0
