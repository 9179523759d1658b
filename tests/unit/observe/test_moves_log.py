"""The lines about blocks that move: the original's words, written by the actions themselves, only when asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from tests.rigs import leader as leader_rig
from tests.rigs.manager import KEYS, ManagerBench, store
from tests.rigs.space import KEYS as SPACE_KEYS
from tests.rigs.space import ME
from tests.rigs.space import Bench as SpaceBench

from kvbm.block import Tier
from kvbm.hashing import join_keys
from kvbm.observe import moves_log
from kvbm.protocol import Lookup, LookupReply, Release

FULL = "Target pool full. Skipping offload. This should only ever happen with very small pool sizes."


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.set_level(logging.DEBUG, logger="kvbm.moves")
    return Lines(caplog)  # type: ignore[return-value]


class Lines:
    """The messages of the log since the last look."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def take(self) -> list[str]:
        messages = [r.getMessage() for r in self._caplog.records if r.name == "kvbm.moves"]
        self._caplog.clear()
        return messages


@pytest.fixture
def bench() -> Iterator[SpaceBench]:
    bench = SpaceBench(host_slots=4, disk_slots=4)
    yield bench
    bench.close()


def test_blocks_on_their_way_down_are_named_once_for_each_tier(bench, lines):
    first, second = SPACE_KEYS[:2]
    bench.store([first, second])
    bench.finish_all()
    named = [f"Offloading block with sequence hash {key.hex()} to target pool." for key in (first, second)]
    assert lines.take() == [
        *(f"{line} source=device target=host" for line in named),
        "Adding blocks to pool blocks=2 tier=host",
        *(f"{line} source=host target=disk" for line in named),
        *["Adding blocks to pool blocks=1 tier=disk"] * 2,
    ]


def test_blocks_that_are_brought_up_are_counted(bench, lines):
    bench.only_on_disk(SPACE_KEYS[:3])
    lines.take()
    bench.space.lookup(ME, 1, SPACE_KEYS[:3], 0)
    assert lines.take() == ["Onboarding 3 blocks to target pool. source=disk target=host"]
    bench.finish_all()
    bench.space.release(ME, 1)
    assert lines.take() == ["Returning blocks to pool blocks=3 tier=host"]


def test_a_load_of_the_device_names_its_request(lines):
    bench = leader_rig.Bench()
    bench.load(5)
    assert lines.take() == ["Onboarding 5 blocks to target pool. source=host target=device request=r"]
    bench.leader.close()
    bench.manager.close()


def test_a_match_is_told_by_tier(tmp_path, lines):
    bench = ManagerBench(tmp_path)
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:3])
    lines.take()
    leader.send(Lookup(lookup=2, keys=join_keys(KEYS[:4]), request="chat-1"))
    assert leader.expect(LookupReply).sources == bytes([Tier.HOST] * 3)
    leader.send(Release(lookup=2))
    assert lines.take() == [
        "successfully matched 3 host blocks and 0 disk blocks; 3 total blocks asked=4 request=chat-1",
        "Returning blocks to pool blocks=3 tier=host",
    ]
    bench.close()


def test_a_tier_whose_blocks_are_all_in_use_is_warned_of_once_a_minute(bench, lines):
    bench.store(SPACE_KEYS[:4])
    assert bench.space.lookup(ME, 1, SPACE_KEYS[:4], 0) is not None
    bench.finish_all()
    lines.take()
    for number in (11, 12):
        bench.space.reserve(ME, number, None, SPACE_KEYS[10:12])
    assert lines.take() == [f"{FULL} target=host blocks=2"]
    bench.clock.advance(moves_log.FULL_INTERVAL_S)
    bench.space.reserve(ME, 13, None, SPACE_KEYS[10:12])
    assert lines.take() == [f"{FULL} target=host blocks=2"]


def test_whether_a_tier_is_full_is_looked_at_once_a_second_at_most(bench, lines):
    looks: list[float] = []

    def in_use() -> bool:
        looks.append(bench.clock())
        return len(looks) > 2

    full = moves_log.FullPool("host", bench.clock)
    for _ in range(5):
        full.skipped(1, in_use)
    assert len(looks) == 1, "the tier has room for others: that is not asked at every block"
    bench.clock.advance(moves_log.LOOK_INTERVAL_S)
    for _ in range(5):
        full.skipped(2, in_use)
    assert len(looks) == 2
    assert lines.take() == []
    bench.clock.advance(moves_log.LOOK_INTERVAL_S)
    for _ in range(5):
        full.skipped(3, in_use)
    assert len(looks) == 3
    assert lines.take() == [f"{FULL} target=host blocks=3"]


def test_a_full_disk_in_use_is_warned_of():
    bench = SpaceBench(host_slots=8, disk_slots=2, pending_limit=8)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    moves_log.log.addHandler(handler)
    bench.store(SPACE_KEYS[:6])  # the disk is still writing the first two
    moves_log.log.removeHandler(handler)
    assert [(r.levelno, r.getMessage()) for r in records][:1] == [
        (logging.WARNING, f"{FULL} target=disk blocks=1")
    ]
    assert len(records) == 1
    bench.finish_all()
    bench.close()


def test_a_pool_that_can_evict_is_not_full(bench, lines):
    bench.store(SPACE_KEYS[:4])
    bench.finish_all()
    bench.store(SPACE_KEYS[10:14])
    assert not [line for line in lines.take() if line.startswith("Target pool full")]


def test_blocks_are_not_even_looked_at_when_nobody_asked_for_debug_lines(caplog):
    caplog.set_level(logging.INFO, logger="kvbm.moves")

    def keys() -> Iterator[bytes]:
        raise AssertionError("looked at")
        yield b""

    moves_log.offloading(keys(), "device", "host")
    caplog.set_level(logging.DEBUG, logger="kvbm.moves")
    with pytest.raises(AssertionError):
        moves_log.offloading(keys(), "device", "host")
