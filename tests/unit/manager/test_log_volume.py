"""How much a busy manager logs while nothing is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvbm.observe.log import LineFormatter
from kvbm.protocol import Release
from rigs.manager import KEYS, Client, ManagerBench, store

HOUR_BYTES_MAX = 200_000
ENGINES, CAME_AND_WENT, MINUTES = 24, 12, 5


class Volume(logging.Handler):
    """Counts the bytes of the lines as the manager writes them."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(LineFormatter())
        self.size = 0
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
        self.size += len(self.lines[-1]) + 1


def work(leader: Client, worker: Client, number: int) -> None:
    """A request that finds nothing and is stored, and one that finds it."""
    leader.take()
    keys = KEYS[4 * (number % 200) : 4 * (number % 200) + 2]
    leader.lookup(2 * number, keys)
    store(leader, worker, number, keys)
    leader.lookup(2 * number + 1, keys)
    leader.send(Release(lookup=2 * number + 1, loaded=2, seconds=0.01))


def test_a_busy_manager_logs_no_more_than_200_kilobytes_an_hour(
    make_manager: Callable[..., ManagerBench],
) -> None:
    """Two dozen engines with requests every five seconds, and a dozen others a minute that come and go."""
    volume = Volume()
    logger = logging.getLogger("kvbm")
    level = logger.level
    logger.setLevel(logging.INFO)  # not by the attribute: loggers keep what they found before
    logger.addHandler(volume)
    try:
        manager = make_manager(host_blocks=64)
        pairs = [manager.engine(f"engine-of-a-deployment-{number}") for number in range(ENGINES)]
        number = volume.size = 0
        for second in range(0, 60 * MINUTES, 5):
            for leader, worker in pairs:
                number += 1
                work(leader, worker, number)
            guest, rank = manager.engine(f"guest-with-a-long-name-{second}")
            work(guest, rank, 1)
            guest.close()
            rank.close()
            manager.tick(5.0)
    finally:
        logger.removeHandler(volume)
        logger.setLevel(level)
    assert volume.size * 60 / MINUTES <= HOUR_BYTES_MAX, "\n".join(volume.lines[-40:])
    assert sum("last 60 s:" in line for line in volume.lines) >= MINUTES - 1, "a summary each minute"
    named = [
        number for number in range(ENGINES) if any(f"deployment-{number}]" in line for line in volume.lines)
    ]
    assert named == list(range(ENGINES)), "each engine has its turn"
    assert any("such lines before it were left out" in line for line in volume.lines)
