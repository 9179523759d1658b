"""How long requests wait for a manager that is stopped (SIGSTOP, swapped out), and for one that goes on again.

    python -m benchmarks.stopped_manager [--requests 100] [--output DIR]

Requests of 8 blocks come one after the other to the scheduler's half of the connector, over a real manager: it answers,
it is stopped, it goes on. A request takes from its arrival to the step after its end; nothing is computed.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import struct
import tempfile
import time
from pathlib import Path

from benchmarks.scheduler_thread import Engine
from kvbm.present.tables import console, plain_table, save_json

BLOCKS = 8
POLL_S = 0.001


def manager_pid(engine: Engine) -> int:
    """The process at the other end of the rank's session."""
    with socket.socket(fileno=os.dup(engine.rank.fileno())) as connection:
        told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", told)[0])


def serve(engine: Engine, state: str, count: int) -> float:
    """So many requests, one after the other; seconds."""
    began_s = time.perf_counter()
    for number in range(count):
        request = engine.request(f"{state} {number}", BLOCKS)
        engine.side.added(request)
        while engine.side.matched(request, 0)[0] is None:
            time.sleep(POLL_S)
            engine.step({})
        engine.side.allocated(request, None, 0)
        engine.step({request.request_id: 1})
        engine.side.finished(request)
        engine.step({})
    return time.perf_counter() - began_s


def measure(count: int) -> list[tuple[str, float]]:
    """What the manager does, and how long the requests take meanwhile, in seconds."""
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as directory:
        os.chmod(directory, 0o700)
        engine = Engine(directory, 256, 256, BLOCKS)
        pid = manager_pid(engine)
        rows = [("it answers", serve(engine, "answers", count))]
        os.kill(pid, signal.SIGSTOP)
        try:
            rows.append(("it is stopped", serve(engine, "stopped", count)))
        finally:
            os.kill(pid, signal.SIGCONT)
        time.sleep(1.0)
        rows.append(("it goes on", serve(engine, "goes on", count)))
        engine.side.close()
        engine.rank.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    options = parser.parse_args()
    found = measure(options.requests)
    table = plain_table(("the manager", f"{options.requests} requests, s", "each, ms"), words={"the manager"})
    for state, seconds in found:
        table.add_row(state, f"{seconds:.2f}", f"{seconds / options.requests * 1e3:.1f}")
    console().print(table)
    if options.output is not None:
        save_json(dict(found), options.output / "stopped_manager.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
