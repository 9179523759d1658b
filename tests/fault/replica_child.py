"""One replica of several on one disk directory: a manager's disk tier in a process of its own.

Run as a program: ROOT FIRST COUNT. It prints, as JSON in one line, its directory and which test blocks it found there
and could load; then it stores the blocks FIRST to FIRST + COUNT - 1 and prints "stored". It ends in order when its
input does; killed, it leaves what it has.
"""

from __future__ import annotations

import json
import os
import sys

from kvbm.block import Outcome
from kvbm.testing.stored_runs import LAYOUT, NAMESPACE, load, make_key, store
from kvbm.tiers.disk.tier import open_disk_tier

SLOT_COUNT = 8
KEY_COUNT = 100


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def main() -> None:
    root, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    tier = open_disk_tier(root, LAYOUT, NAMESPACE, capacity_blocks=SLOT_COUNT, io_threads=1)
    numbers = {make_key(number): number for number in range(KEY_COUNT)}
    found = []
    for block in list(tier.recovered()):
        assert load(tier, LAYOUT, block.key, block.slot).outcome is Outcome.HIT
        found.append(numbers[block.key])
    say(json.dumps({"path": str(tier.path), "found": sorted(found)}))
    for slot in range(count):
        assert store(tier, LAYOUT, make_key(first + slot), slot).outcome is Outcome.HIT
    say("stored")
    sys.stdin.read()
    tier.close(keep=True)


if __name__ == "__main__":
    main()
