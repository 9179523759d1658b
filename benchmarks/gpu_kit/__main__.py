"""The kit's commands. `build` needs a network; the others run on the card's machine.

python3 -m benchmarks.gpu_kit step [NAME…] --output DIR runs the cases of these steps, or of all, that have no row yet
python3 -m benchmarks.gpu_kit build [--rehearse]        writes build/gpu-kit/*/*.part
python3 -m benchmarks.gpu_kit unpack PART…              keeps parts in .gpu-kit, and unpacks them when all are there
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.gpu_kit import packing, table
from benchmarks.gpu_kit.cases import STEPS, all_cases
from benchmarks.gpu_kit.ledger import Ledger
from benchmarks.gpu_kit.running import BUDGET_S, ROOT, Runner

KIT = ROOT / ".gpu-kit"
PARTS = ROOT / "build" / "gpu-kit"
TIME_LEFT = 3
"""The exit status of a call that left cases to the next one."""


def report(line: str) -> None:
    """Print one line at once: a call may be cut short."""
    print(line, flush=True)


def build(options: argparse.Namespace) -> int:
    """Write the parts."""
    mode = "cpu" if options.rehearse else "cuda"
    engine, others = packing.download(PARTS / "wheels", mode)
    for path in packing.build(engine, others, PARTS / mode, mode):
        report(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


def unpack(options: argparse.Namespace) -> int:
    """Keep parts, and unpack them when all are there."""
    site = packing.Site(options.folder)
    for part in options.part:
        report(site.take(part))
    return 0


def step(options: argparse.Namespace) -> int:
    """Run what is left of some steps; 0 when nothing is left and nothing was wrong, 3 when time ran out."""
    if missing := packing.Site(options.folder).missing():
        raise packing.Refused(f"{missing} parts are missing: unpack them first")
    if unknown := [name for name in options.name if name not in STEPS]:
        raise packing.Refused(f"step {unknown[0]!r}: accepted are {', '.join(STEPS)}")
    output, cases = options.output or options.folder, all_cases()
    ledger = Ledger(output)
    chosen = [
        case
        for case in cases
        if case.step in (options.name or STEPS)
        and (not options.only or any(word in case.name for word in options.only))
    ]
    runner = Runner(options.folder, ledger, report, rehearse=options.rehearse)
    left = runner.run(chosen, options.budget, options.again)
    outcome = table.judge(ledger.rows, cases)
    table.write(outcome, ledger.rows, cases, output)
    report(table.format_findings(ledger.rows, cases))
    report("\n".join([outcome.verdict, *(f"  {line}" for line in outcome.advice)]))
    if left:
        report(f"no time was left for {len(left)} cases; call again: {', '.join(left)}")
        return TIME_LEFT
    return int(outcome.wrong)


def read_options() -> argparse.Namespace:
    """The command and its options."""
    parser = argparse.ArgumentParser(
        prog="gpu_kit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    stepper = commands.add_parser("step", help="run what is left of some steps")
    stepper.add_argument("name", nargs="*", metavar="NAME", help=f"all in turn, or of: {', '.join(STEPS)}")
    stepper.add_argument(
        "--output", type=Path, help="where rows and table go, and what this call goes on from"
    )
    stepper.add_argument("--budget", type=float, default=BUDGET_S, help="seconds that this call may take")
    stepper.add_argument("--only", nargs="+", default=[], help="cases whose name contains one of these")
    stepper.add_argument("--again", action="store_true", help="also cases that were not right")
    stepper.add_argument(
        "--rehearse", action="store_true", help="on the CPU, small: the figures mean nothing"
    )
    stepper.set_defaults(run=step)
    builder = commands.add_parser("build", help="write the parts")
    builder.add_argument("--rehearse", action="store_true", help="from CPU wheels, to run here")
    builder.set_defaults(run=build)
    unpacker = commands.add_parser("unpack", help="keep parts, and unpack them when all are there")
    unpacker.add_argument("part", type=Path, nargs="+")
    unpacker.set_defaults(run=unpack)
    for command in (stepper, unpacker):
        command.add_argument("--folder", type=Path, default=KIT, help="where parts and models are kept")
    options = parser.parse_args()
    if "folder" in options:
        options.folder = options.folder.absolute()  # cases run elsewhere
    return options


def main() -> int:
    """0 when all went well; 1 when something was wrong, 2 for a refusal, 3 when cases are left."""
    options = read_options()
    try:
        return int(options.run(options))
    except packing.Refused as refused:
        print(refused, file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
