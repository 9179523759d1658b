"""How fast loads go while the engine's thread needs the interpreter too: the rank's own copying thread, over a link
that is simulated.

The link moves 50 GB/s, one piece behind the other. Beginning a piece takes 0.3 µs for each run of bytes in it, without
the interpreter, as a call into a driver does. A load has 4 GB, in blocks of 2 MB. What is measured is how this thread
and the engine's take turns; it needs no GPU, and says nothing about one.

python -m benchmarks.load_windows [--runs 32] [--rounds 7] [--piece-mb 16 64 256]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from kvbm.client.finder import ManagerFinder
from kvbm.present.tables import console, plain_table, save_json
from kvbm.protocol import PROTOCOL_VERSION, Hello, Welcome
from kvbm.step_plan import LoadPlan
from kvbm.worker import Mover, loading
from kvbm.worker.jobs import LoadJob
from kvbm.worker.mapping import Mapping, Mark

LINK_BYTES_PER_S = 50e9
BEGIN_RUN_S = 0.3e-6
BLOCK_BYTES = 2 << 20
LOAD_BLOCKS = 2048
TURN_S = 0.005
"""An engine's thread that is half busy computes so long, and then waits for as long."""

_without_interpreter = ctypes.CDLL(None)


class OnLink:
    """A copy that ends when the link has got to it."""

    def __init__(self, end_s: float) -> None:
        self._end_s = end_s

    def done(self) -> bool:
        return time.perf_counter() >= self._end_s

    def wait(self) -> None:
        """Sleeps until then."""
        time.sleep(max(0.0, self._end_s - time.perf_counter()))


class SimulatedDevice:
    """A mapping and its copier; `runs` of bytes make up a block."""

    epoch = 1
    layers = ("all",)
    slot_bytes = BLOCK_BYTES

    def __init__(self, runs: int) -> None:
        self.copier = self
        self._runs = runs
        self._free_s = 0.0

    def adopt_thread(self) -> None:
        """Any thread may call."""

    def intact(self, slots: Sequence[int], generations: Sequence[int]) -> int:
        """Looks at every slot, as a real one does."""
        return sum(generation == 0 for _, generation in zip(slots, generations, strict=True))

    def begin_load(self, pairs: Sequence[tuple[int, int]], after: Any, layer: str | None = None) -> OnLink:
        _without_interpreter.usleep(int(len(pairs) * self._runs * BEGIN_RUN_S * 1e6))
        begun_s = max(self._free_s, time.perf_counter())
        self._free_s = begun_s + len(pairs) * BLOCK_BYTES / LINK_BYTES_PER_S
        return OnLink(self._free_s)

    def close(self) -> None:
        """Nothing to give back."""


class QuietSession:
    """A session with a manager that says nothing."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._descriptor

    def take_fds(self) -> list[int]:
        return []

    def send(self, message: Any) -> None:
        """Nobody listens."""

    def close(self) -> None:
        os.close(self._descriptor)


class OneSession:
    """Finds that session."""

    def establish(self, hello: Hello, timeout_s: float, pause: object) -> tuple[QuietSession, Welcome]:
        return QuietSession(), Welcome(version=PROTOCOL_VERSION, epoch=SimulatedDevice.epoch)


@contextmanager
def mover_over(device: SimulatedDevice) -> Iterator[Mover]:
    """A mover that runs, in a session, over this device."""
    hello = Hello(version=PROTOCOL_VERSION, role="worker", engine="bench")
    mover = Mover(cast(ManagerFinder, OneSession()), hello, lambda welcome, fds: cast(Mapping, device))
    mover.attach(0.0)
    mover.start()
    try:
        yield mover
    finally:
        mover.stop()


def load_once(mover: Mover, device: SimulatedDevice) -> float:
    """Bytes per second of one load, as the engine's thread sees it."""
    blocks = tuple(range(LOAD_BLOCKS))
    plan = LoadPlan(
        request="r",
        lookup=1,
        epoch=device.epoch,
        slots=blocks,
        generations=(0,) * LOAD_BLOCKS,
        device_blocks=blocks,
        offset=0,
        ready=LOAD_BLOCKS,
    )
    now_s = time.monotonic()
    mark = Mark(cast(Mapping, device), None)
    begun_s = time.perf_counter()
    mover.put(LoadJob(plan, mark, ready=LOAD_BLOCKS, started_s=now_s, last_progress_s=now_s))
    assert not mover.loads.get().failed
    return LOAD_BLOCKS * BLOCK_BYTES / (time.perf_counter() - begun_s)


def idle() -> None:
    """An engine's thread that waits, for its device say."""
    time.sleep(TURN_S)


def half_busy() -> None:
    """One that computes in Python half of the time."""
    bound_to_python()
    time.sleep(TURN_S)


def bound_to_python() -> None:
    """One that never waits."""
    end_s = time.perf_counter() + TURN_S
    while time.perf_counter() < end_s:
        pass


ENGINES: dict[str, Callable[[], None]] = {
    "idle": idle,
    "half busy": half_busy,
    "bound to Python": bound_to_python,
}


def measure(engine: Callable[[], None], runs: int, rounds: int) -> float:
    """The median bytes per second of loads beside this engine's thread."""
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            engine()

    device = SimulatedDevice(runs)
    beside = threading.Thread(target=serve)
    with mover_over(device) as mover:
        beside.start()
        try:
            return statistics.median(load_once(mover, device) for _ in range(rounds))
        finally:
            over.set()
            beside.join()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=int, default=32, help="runs of bytes in a block (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="loads each (default: %(default)s)")
    pieces = [loading.PIECE_BYTES >> 20]
    parser.add_argument("--piece-mb", type=int, nargs="+", default=pieces, help="sizes of pieces, in MiB")
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    options = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    for piece in options.piece_mb:
        loading.PIECE_BYTES = piece << 20
        loading.FIRST_PIECE_BYTES = min(loading.FIRST_PIECE_BYTES, piece << 20)
        rows[f"{piece} MiB"] = {
            name: measure(engine, options.runs, options.rounds) / LINK_BYTES_PER_S
            for name, engine in ENGINES.items()
        }
    title = f"loads of 4 GB, of the simulated link's speed ({options.runs} runs of bytes in a block)"
    table = plain_table(
        ("pieces of", *(f"engine {name}" for name in ENGINES)), words=("pieces of",), title=title
    )
    for piece, values in rows.items():
        table.add_row(piece, *(f"{value:.2f}" for value in values.values()))
    console().print(table)
    if options.output:
        save_json({"runs": options.runs, "of the link": rows}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
