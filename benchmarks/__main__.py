"""All measurements, one after the other: `python -m benchmarks [--only copy,disk,…]`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

PARTS = {
    "copy": "benchmarks.transfer_copy",
    "disk": "benchmarks.disk",
    "frozen": "benchmarks.frozen_disk",
    "manager": "benchmarks.manager",
    "crowd": "benchmarks.crowd_manager",
    "turns": "benchmarks.loop_turns",
    "events": "benchmarks.events",
    "scheduler": "benchmarks.scheduler_thread",
    "stopped": "benchmarks.stopped_manager",
    "steps": "benchmarks.scheduler_steps",
    "ttft": "benchmarks.ttft",
    "overhead": "benchmarks.overhead",
    "shared": "benchmarks.shared_prefix",
    "conversations": "benchmarks.conversations",
    "policies": "benchmarks.policies",
    "simulator": "benchmarks.simulator",
    "groups": "benchmarks.groups",
    "modes": "benchmarks.modes",
    "packs": "benchmarks.packs",
    "remote": "benchmarks.remote_loads",
}


def main() -> int:
    """Each part in a process of its own; the number of those that could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated: " + ", ".join(PARTS))
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="where the JSON goes")
    options = parser.parse_args()
    chosen = options.only.split(",")
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        parser.error(f"--only {unknown[0]}: accepted are {', '.join(PARTS)}")
    options.output.mkdir(parents=True, exist_ok=True)
    failed = 0
    for part in chosen:
        command = [sys.executable, "-m", PARTS[part]]
        command += (
            ["--json", str(options.output / "copy.json")]
            if part == "copy"
            else ["--output", str(options.output)]
        )
        failed += subprocess.run(command, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
