"""Whether a manager's memory reaches a bound: a load for minutes, and what the manager takes.

    python -m benchmarks.soak [--minutes 40] [--rate 60] [--output DIR]

A `kvbm manager` of its own with host memory and a disk, both full after a minute. Sessions of seven tenants come back
with one block more, or anew; each request is looked up, read, stored and told of. Each minute the engine goes and comes
again, each tenth everything is reset. A row each minute: the manager's resident memory without host memory, which is
shared, and what its tables count and can count (`kvbm doctor`).
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.manager import LAYOUT, NAMESPACE, ask
from kvbm.admin_protocol import Describe, Description
from kvbm.client.admin import Admin
from kvbm.client.channel import Channel
from kvbm.hashing import chain_keys, join_keys
from kvbm.present.tables import console, plain_table, save_json
from kvbm.protocol import (
    PROTOCOL_VERSION,
    Commit,
    Finished,
    Hello,
    Lookup,
    LookupReply,
    Ready,
    Release,
    Reserve,
    ReserveReply,
    Reset,
    ResetReply,
    Welcome,
)
from kvbm.settings import Settings, process_environment

HOST_BLOCKS, DISK_BLOCKS = 4096, 16_384
SESSIONS, TENANTS, FIRST_BLOCKS, TURNS_MAX = 400, 7, 16, 32
RESET_MINUTES = 10
START_S = 60.0


class Soak:
    """A manager in a process of its own, an engine of one rank, and sessions whose prompts grow."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._socket = directory / "manager.sock"
        environment = {
            **process_environment(),
            "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(HOST_BLOCKS),
            "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": str(DISK_BLOCKS),
            "DYN_KVBM_DISK_CACHE_DIR": str(directory / "disk"),
            "DYN_KVBM_DISK_ADMISSION": "all",  # the filter's table takes hours to fill
            "DYN_KVBM_RUNTIME_DIR": str(directory),
        }
        command = [sys.executable, "-m", "kvbm.cli.main", "manager", "--socket", str(self._socket)]
        self.log = directory / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self._chance = random.Random(seed)
        self._sessions = [[self._chance.randrange(1 << 30)] for _ in range(SESSIONS)]
        self._number, self._engines = 0, 0
        self.connect()

    def connect(self) -> None:
        """An engine comes."""
        deadline_s = time.monotonic() + START_S
        while not self._socket.exists() and time.monotonic() < deadline_s:
            time.sleep(0.1)
        self._engines += 1
        engine = f"soak-{self._engines}"  # the manager may not have seen yet that the last one has gone
        self.leader = Channel.connect(str(self._socket))
        ask(self.leader, Hello(version=PROTOCOL_VERSION, role="leader", engine=engine), Welcome)
        self.worker = Channel.connect(str(self._socket))
        rank = Hello(
            version=PROTOCOL_VERSION, role="worker", engine=engine, namespace=NAMESPACE, layout=LAYOUT
        )
        self.worker.introduce(rank, START_S)
        while not any(isinstance(each, Ready) and each.ready for each in self.leader.receive()):
            time.sleep(0.01)

    def disconnect(self) -> None:
        """It goes."""
        self.leader.close()
        self.worker.close()

    def request(self) -> None:
        """One turn of a session: looked up, released, stored and told of."""
        session = self._chance.randrange(SESSIONS)
        seeds = self._sessions[session]
        if len(seeds) >= TURNS_MAX:
            seeds.clear()
        seeds.append(self._chance.randrange(1 << 30))
        blocks = FIRST_BLOCKS * LAYOUT.block_tokens
        tokens = [seeds[0] + offset for offset in range(blocks)]
        tokens += [seed + offset for seed in seeds[1:] for offset in range(LAYOUT.block_tokens)]
        keys = chain_keys(bytes(32), tokens, LAYOUT.block_tokens)
        tenant = f"tenant-{session % TENANTS}"
        self._number += 1
        look_up = Lookup(
            lookup=self._number,
            keys=join_keys(keys),
            tenant=tenant,
            request=f"request-{self._number}",
            prompt=keys[0],
            hint={"session": f"session-{session}"},
        )
        ask(self.leader, look_up, LookupReply)
        self.leader.send(Release(lookup=self._number))
        ask(
            self.leader,
            Reserve(store=self._number, parent=b"", keys=join_keys(keys), tenant=tenant),
            ReserveReply,
        )
        self.leader.send(Commit(store=self._number))
        self.leader.send(Finished(key=keys[-1], output_tokens=LAYOUT.block_tokens))

    def reset(self) -> None:
        """Everything is dropped."""
        ask(self.leader, Reset(), ResetReply)

    def row(self, minute: int) -> dict[str, Any]:
        """What the manager takes now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        with Admin(str(self._socket), Settings()) as admin:
            tables = admin.ask(Describe(), Description).tables
        return {
            "minute": minute,
            "requests": self._number,
            "memory_mb": int(anonymous.split()[1]) / 1024,
            "tables_mb": sum(each.count * each.entry_bytes for each in tables) / 1e6,
            "tables_most_mb": sum(each.most * each.entry_bytes for each in tables) / 1e6,
            "log_kb": self.log.stat().st_size / 1e3,
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=int, default=40, help="how long")
    parser.add_argument("--rate", type=float, default=60.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        soak = Soak(Path(directory), options.seed)
        for minute in range(1, options.minutes + 1):
            end_s = time.monotonic() + 60.0
            while (left_s := end_s - time.monotonic()) > 0.0:
                soak.request()
                time.sleep(min(left_s, 1.0 / options.rate))
            if minute % RESET_MINUTES == 0:
                soak.reset()
            soak.disconnect()
            soak.connect()
            rows.append(soak.row(minute))
            print(*(f"{name} {value:.0f}" for name, value in rows[-1].items()), flush=True)
        soak.process.terminate()
        soak.process.wait()
    table = plain_table(rows[0])
    for row in rows:
        table.add_row(*(f"{value:.0f}" for value in row.values()))
    console().print(table)
    if options.output is not None:
        save_json({"rows": rows}, options.output / "soak.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
