"""How fast loads go while the engine's thread needs the interpreter too: the rank's own copying thread, over a link
that is simulated.

The link moves 50 GB/s, one copy behind the other. Addresses are made, and cut into calls, as for a CUDA driver that
takes batches; a call takes 0.3 µs for each run of bytes in it, without the interpreter. A load has 4 GB, in blocks of
2 MB. What is measured is how this thread and the engine's take turns; it needs no GPU, and says nothing about one.

python -m benchmarks.load_windows [--rounds 7] [--runs 1 32] [--piece-mb 64 256] [--window-mb 1024]
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from kvbm.client.finder import ManagerFinder
from kvbm.present.tables import console, plain_table, save_json
from kvbm.protocol import PROTOCOL_VERSION, Hello, Welcome
from kvbm.step_plan import LoadPlan
from kvbm.transfer.cuda.driver import BATCH_PIECES_MAX
from kvbm.transfer.cuda.pieces import Pieces, SlotRows, batches_of
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


def block_of(runs: int) -> Pieces:
    """A block in so many runs of bytes of one size, as far apart on the device as if every layer had them."""
    size = BLOCK_BYTES // runs
    offset = np.arange(runs, dtype=np.uint64) * np.uint64(size)
    return Pieces(
        device=offset * np.uint64(LOAD_BLOCKS),
        block_stride=np.full(runs, size, dtype=np.uint64),
        slot_offset=offset,
        size=np.full(runs, size, dtype=np.uint64),
        region=np.zeros(runs, dtype=np.uint64),
    )


class SimulatedDevice:
    """A mapping and its copier; `runs` of bytes make up a block."""

    epoch = 1
    layers = ("all",)
    slot_bytes = BLOCK_BYTES

    def __init__(self, runs: int) -> None:
        self.copier = self
        self._block = block_of(runs)
        self._free_s = 0.0

    def adopt_thread(self) -> None:
        """Any thread may call."""

    def intact(self, slots: Sequence[int], generations: Sequence[int]) -> int:
        """Looks at every slot, as a real one does."""
        return sum(generation == 0 for _, generation in zip(slots, generations, strict=True))

    def begin_load(self, pairs: Sequence[tuple[int, int]], after: Any, layer: str | None = None) -> OnLink:
        for batch in batches_of(self._block, pairs, SlotRows(0, BLOCK_BYTES), BATCH_PIECES_MAX):
            _without_interpreter.usleep(int(len(batch.size) * BEGIN_RUN_S * 1e6))
            begun_s = max(self._free_s, time.perf_counter())
            self._free_s = begun_s + int(batch.size.sum()) / LINK_BYTES_PER_S
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


class Case(NamedTuple):
    """One way to load; `runs` of bytes make up a block."""

    runs: int
    piece_mb: int
    window_mb: int


def measure_all(cases: Sequence[Case], rounds: int) -> Iterator[tuple[Case, dict[str, float]]]:
    """The share of the link's speed that each case reaches, beside each kind of engine's thread."""
    first = loading.FIRST_PIECE_BYTES
    for case in cases:
        loading.PIECE_BYTES = case.piece_mb << 20
        loading.FIRST_PIECE_BYTES = min(first, loading.PIECE_BYTES)
        loading.WINDOW_BYTES = case.window_mb << 20
        yield (
            case,
            {name: measure(engine, case.runs, rounds) / LINK_BYTES_PER_S for name, engine in ENGINES.items()},
        )


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    pieces, windows = [loading.PIECE_BYTES >> 20], [loading.WINDOW_BYTES >> 20]
    parser.add_argument("--rounds", type=int, default=7, help="loads each (default: %(default)s)")
    parser.add_argument("--runs", type=int, nargs="+", default=[32], help="runs of bytes in a block")
    parser.add_argument("--piece-mb", type=int, nargs="+", default=pieces, help="sizes of pieces, in MiB")
    parser.add_argument("--window-mb", type=int, nargs="+", default=windows, help="windows, in MiB")
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    return parser.parse_args()


def main() -> int:
    """Measure every combination and print."""
    options = parsed()
    cases = [Case(*case) for case in itertools.product(options.runs, options.piece_mb, options.window_mb)]
    words = ("runs of", "pieces of", "window of")
    table = plain_table(
        (*words, *ENGINES), words=words, title="loads of 4 GB, of the simulated link's speed, by engine"
    )
    rows: list[dict[str, Any]] = []
    for case, shares in measure_all(cases, options.rounds):
        run_kb = BLOCK_BYTES // case.runs >> 10
        sizes = (f"{run_kb} KiB", f"{case.piece_mb} MiB", f"{case.window_mb} MiB")
        table.add_row(*sizes, *(f"{share:.2f}" for share in shares.values()))
        rows.append({**case._asdict(), "of the link": shares})
    console().print(table)
    if options.output:
        save_json({"rows": rows}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
