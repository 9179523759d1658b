"""Memory between a manager and its mover: places of one size, of a file that nobody can cut off."""

from __future__ import annotations

import os

import pytest

from kvbm.tiers.peers.staging import Staging, places_within
from kvbm.tiers.peers.wire import PLACES_MAX


@pytest.mark.parametrize(
    ("total", "block", "places"), [(100, 10, 10), (99, 10, 9), (9, 10, 0), (1 << 30, 1, PLACES_MAX)]
)
def test_places_within(total: int, block: int, places: int) -> None:
    assert places_within(total, block) == places


def test_places_are_taken_once_and_lie_apart() -> None:
    staging = Staging(4096, 3)
    taken = [staging.take() for _ in range(3)]
    assert sorted(taken) == [0, 1, 2] and staging.free == 0
    for place in taken:
        staging.view(place, 4096)[:] = bytes((place + 1,)) * 4096
    for place in taken:
        assert bytes(staging.view(place, 100)) == bytes((place + 1,)) * 100
    staging.give_back(1)
    assert staging.take() == 1
    staging.close()


def test_its_size_is_sealed_and_its_file_goes() -> None:
    staging = Staging(4096, 2)
    with pytest.raises(PermissionError):
        os.ftruncate(staging.fd, 4096)
    fd = staging.fd
    staging.forget_fd()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    staging.view(0, 4096)[:] = b"x" * 4096  # the memory stays
    staging.close()


def test_a_view_outlives_it() -> None:
    staging = Staging(4096, 1)
    view = staging.view(0, 4)
    staging.close()
    view[:] = b"four"
    assert bytes(view) == b"four"
