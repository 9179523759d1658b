"""kill -9 at any instant: what is found afterwards is right, what was complete is found, and the audit can tell."""

from __future__ import annotations

import mmap
import os
import random
import select
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fault import disk_crash_child as child
from kvbm.block import Outcome, SlotIndex
from kvbm.testing.stored_runs import by_slot
from kvbm.tiers.disk import block_io
from kvbm.tiers.disk.tier import DiskTier

DEADLINE_S = 30.0
NUMBERS = {child.make_key(number): number for number in range(child.KEY_COUNT)}


def crash_once(
    root: Path, log: Path, seed: int, order: str = "right", inside_a_write: bool | None = None
) -> None:
    """Run a child and have it killed: in the middle of a write by itself, or by us at any instant."""
    chance = random.Random(seed)
    if inside_a_write is None:
        inside_a_write = seed % 2 == 0
    writes = chance.randrange(150) if inside_a_write else -1
    command = [sys.executable, str(Path(child.__file__)), str(root), str(log), str(seed), str(writes), order]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert select.select([process.stdout], [], [], DEADLINE_S)[0]
        said = process.stdout.readline()
        if not inside_a_write:
            # The random instant of the blow is the point here; nothing waits for the time to pass.
            select.select([process.stderr], [], [], chance.uniform(0.0, 0.06))
            process.kill()
        _, complaint = process.communicate(timeout=DEADLINE_S)
    assert said == b"ready\n", complaint.decode()
    assert process.returncode == -signal.SIGKILL, complaint.decode()


class Audit:
    """Opens what a crash left, reads every block, and counts right, wrong and rejected ones."""

    def __init__(self, root: Path) -> None:
        self.tier: DiskTier = child.open_tier(root, seed=0)
        self.recovered = {slot: NUMBERS[block.key] for slot, block in by_slot(self.tier.recovered()).items()}
        self.counts: Counter[str] = Counter()
        self.right: set[int] = set()
        memory = memoryview(mmap.mmap(-1, child.LAYOUT.block_bytes))
        for slot, number in self.recovered.items():
            self._read(slot, number, memory)
        # All the other slots: whatever lies there, no key may find it.
        for slot in set(range(child.SLOT_COUNT)) - set(self.recovered):
            self._read(slot, slot, memory)
        self.tier.close(keep=True)

    def _read(self, slot: int, number: int, memory: memoryview) -> None:
        size = child.LAYOUT.slot_bytes
        self.tier.submit_load(0, [child.make_key(number)], SlotIndex(slot), [memory[:size], memory[size:]])
        assert self.tier.drain(DEADLINE_S)
        (completion,) = self.tier.poll()
        if completion.outcome is Outcome.HIT:
            is_right = memory == child.make_bytes(number)
            self.counts["right" if is_right else "wrong"] += 1
            if is_right:
                self.right.add(slot)
        elif completion.corrupt:
            self.counts["corrupt"] += 1
        else:
            self.counts["miss"] += 1
            assert slot not in self.recovered

    def lost_and_undead(self, log: Path) -> tuple[list[int], list[int]]:
        """Slots whose store completed and that are not there; slots that were forgotten and are."""
        last: dict[int, list[str]] = {}
        for line in log.read_text().splitlines():
            event, slot, *rest = line.split()
            last[int(slot)] = [event, *rest]
        lost, undead = [], []
        for slot, (event, *rest) in last.items():
            elsewhere = event == "stored" and int(rest[0]) in self.recovered.values()
            if event == "stored" and self.recovered.get(slot) != int(rest[0]) and not elsewhere:
                lost.append(slot)
            if event == "forgot" and slot in self.recovered:
                undead.append(slot)
        return lost, undead


@pytest.mark.parametrize("kill_count", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_after_a_kill_every_block_is_right_or_a_miss(tmp_path: Path, kill_count: int) -> None:
    """All crashes hit one directory, each run taking over what the one before left."""
    total: Counter[str] = Counter()
    for seed in range(kill_count):
        log = tmp_path / f"log-{seed}"
        crash_once(tmp_path / "cache", log, seed)
        audit = Audit(tmp_path / "cache")
        assert audit.counts["wrong"] == 0, f"seed {seed}: wrong bytes came back as a HIT"
        assert audit.counts["corrupt"] == 0, (
            f"seed {seed}: a record was there before its bytes or outlived them"
        )
        assert audit.lost_and_undead(log) == ([], []), f"seed {seed}"
        total += audit.counts
    assert len(list((tmp_path / "cache").iterdir())) == 1, "every run took the directory of the one before"
    assert total["right"] > kill_count * 3, f"too few blocks were there to be checked: {total}"


def test_the_audit_notices_records_that_come_before_their_bytes(tmp_path: Path) -> None:
    """Control: with the order of writes turned round, verification rejects what the crash tore."""
    corrupt = 0
    for seed in range(40):
        crash_once(tmp_path / "cache", tmp_path / "log", seed, order="wrong", inside_a_write=True)
        audit = Audit(tmp_path / "cache")
        assert audit.counts["wrong"] == 0, "the checksum holds even so"
        corrupt += audit.counts["corrupt"]
        if corrupt:
            return
    pytest.fail("40 crashes with the wrong order of writes went unnoticed")


def test_the_audit_notices_wrong_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with the checksum switched off too, wrong bytes come back, and the audit sees them."""

    class EqualToAll(bytes):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = bytes.__hash__

    monkeypatch.setattr(block_io, "block_checksum", lambda *_: EqualToAll(16))
    for seed in range(40):
        crash_once(tmp_path / "cache", tmp_path / "log", seed, order="wrong", inside_a_write=True)
        if Audit(tmp_path / "cache").counts["wrong"]:
            return
    pytest.fail("40 crashes without any protection went unnoticed")
