"""The kit's commands. `build` runs where there is a network; the others where the parts are carried to.

python3 -m benchmarks.gpu_kit build [--rehearse]        writes build/gpu-kit/part-*.tar.xz
python3 -m benchmarks.gpu_kit unpack PART…              brings parts together in .gpu-kit
python3 -m benchmarks.gpu_kit step [NAME…] --output DIR runs what is left of these steps, or of all
python3 -m benchmarks.gpu_kit status                    what is there and what is left
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_kit import building, table
from benchmarks.gpu_kit.cases import STEPS, Case, all_cases
from benchmarks.gpu_kit.ledger import Ledger
from benchmarks.gpu_kit.running import BUDGET_S, ROOT, Runner
from benchmarks.gpu_kit.unpacking import Site

KIT = ROOT / ".gpu-kit"
PARTS = ROOT / "build" / "gpu-kit"


def say(line: str) -> None:
    """One line of progress, at once: a call may be cut short."""
    print(line, flush=True)


def tree_bytes() -> int:
    """How large the tree is that travels with a part: what git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    paths = (ROOT / name for name in listed.decode().split("\0") if name)
    return sum(path.stat().st_size for path in paths if path.is_file())


def build(options: argparse.Namespace) -> int:
    """Write the parts."""
    mode = "cpu" if options.rehearse else "cuda"
    folder = options.parts / mode
    engine, others = building.download(options.parts / "wheels", mode)
    for path in building.build(engine, others, folder, mode, tree_bytes()):
        say(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


def unpack(options: argparse.Namespace) -> int:
    """Bring parts together."""
    site = Site(options.folder)
    for part in options.part:
        say(site.unpack(part))
    missing = site.missing()
    say(f"missing: {', '.join(missing)}" if missing else "all parts are there; next: step check")
    return 0


def step(options: argparse.Namespace) -> int:
    """Run what is left of some steps; 0 when nothing is left and nothing was wrong, 3 when time ran out."""
    missing = Site(options.folder).missing()
    if missing:
        raise building.Refused(f"unpack first; missing parts: {', '.join(missing)}")
    ledger = Ledger(options.folder, options.output, options.earlier)
    unknown = [name for name in options.name if name not in STEPS]
    if unknown:
        raise building.Refused(f"step {unknown[0]!r}: accepted are {', '.join(STEPS)}")
    steps = options.name or STEPS
    cases = [case for case in all_cases() if case.step in steps and _meant(case, options.only)]
    runner = Runner(options.folder, ledger, say)
    left = runner.run(cases, options.budget, options.again)
    return finish(options, ledger, left)


def _meant(case: Case, only: list[str]) -> bool:
    return not only or any(part in case.name for part in only)


def finish(options: argparse.Namespace, ledger: Ledger, left: list[str]) -> int:
    """Write the table where the results go, and say what is left."""
    outcome = table.outcome(ledger.rows, all_cases())
    folder = options.output or options.folder
    table.write(outcome, ledger.rows, folder)
    say(f"verdict: {outcome.verdict}")
    for line in outcome.advice:
        say(f"  {line}")
    if left:
        say(f"no time was left for {len(left)} cases; call again: {', '.join(left)}")
        return 3
    return int(outcome.wrong)


def status(options: argparse.Namespace) -> int:
    """What is unpacked and what was found so far."""
    missing = Site(options.folder).missing()
    say(f"missing parts: {', '.join(missing) or 'none'}")
    rows = Ledger(options.folder, options.output, options.earlier).rows
    say(table.text(rows, all_cases()))
    return 0


def main() -> int:
    """0 when all went well; 1 when something was wrong, 2 for a refusal, 3 when cases are left."""
    parser = argparse.ArgumentParser(
        prog="gpu_kit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    builder = commands.add_parser("build", help="write the parts")
    builder.add_argument("--rehearse", action="store_true", help="from CPU wheels, to run here")
    builder.add_argument("--parts", type=Path, default=PARTS, help="where they go")
    builder.set_defaults(run=build)
    unpacker = commands.add_parser("unpack", help="bring parts together")
    unpacker.add_argument("part", type=Path, nargs="+")
    unpacker.set_defaults(run=unpack)
    stepper = commands.add_parser("step", help="run what is left of some steps")
    stepper.add_argument("name", nargs="*", metavar="NAME", help=f"all in turn, or of: {', '.join(STEPS)}")
    stepper.add_argument("--budget", type=float, default=BUDGET_S, help="seconds that this call may take")
    stepper.add_argument("--only", nargs="+", default=[], help="cases whose name contains one of these")
    stepper.add_argument("--again", action="store_true", help="also cases that were not right")
    stepper.set_defaults(run=step)
    teller = commands.add_parser("status", help="what is there and what is left")
    teller.set_defaults(run=status)
    for command in (unpacker, stepper, teller):
        command.add_argument("--folder", type=Path, default=KIT, help="what the steps leave for later ones")
        command.add_argument("--output", type=Path, help="where rows and table are written as well")
        command.add_argument(
            "--earlier", type=Path, help="results.jsonl of another call, for a fresh machine"
        )
    options = parser.parse_args()
    if "folder" in options:
        # Cases run elsewhere.
        options.folder = options.folder.absolute()
    try:
        return int(options.run(options))
    except building.Refused as refused:
        print(refused, file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
