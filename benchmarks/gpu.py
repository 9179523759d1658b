"""Everything about KVBM on a CUDA card: is every byte right, and how close to the link's limit is it.

    PYTHONPATH=src python benchmarks/gpu.py [--output gpu.json]

Some minutes on a machine that has torch and triton and needs no network. Each part, and each way of copying within
`bytes`, `order` and `descriptors`, is a process of its own with a time limit: an illegal address, a hang or too little
memory costs that part. Results are written as they come, and a later call with the same --output goes on where an
earlier one ended. Every ratio with a bar is to something that is timed beside it, by turns. What a machine lacks is
left out, and named: `outputs`, `hits`, `decode-mover` and the bars of `loads-busy` need kvbm's own dependencies.
`--rehearse` runs the same code on a CPU with small sizes, to see that it runs: its figures mean nothing. Exits with 1
when a byte or an output is wrong, or a part ended early; not for a bar that is missed.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_beside import check_layerwise, time_stores
from gpu_busy import time_decode, time_loads
from gpu_bytes import check_bytes, check_order
from gpu_children import run_in_child
from gpu_copies import time_both_ways, time_copies
from gpu_descriptors import sweep_descriptors
from gpu_engine import check_outputs, time_hits
from gpu_layouts import compare_layouts
from gpu_locking import check_captures, check_untouched_captures, time_arena, time_replays
from gpu_processes import check_two_processes
from gpu_report import Report
from gpu_rig import SMALL, Trial
from gpu_rows import FAULTS, PartRecord, Result

WAYS = ("batch", "rows", "kernel", "auto")
ANOTHER_WAY = "do not let that way copy: DYN_KVBM_CUDA_COPY=rows, or another one that is right here"


@dataclass(frozen=True)
class Part:
    """`run` has `limit_s` seconds. `ways`: a process for each way of copying. `advice` is for what goes wrong in it."""

    run: Callable[[Trial], None]
    limit_s: float
    ways: tuple[str, ...] = ()
    advice: str = "report it, with this file"


PARTS: dict[str, Part] = {
    "bytes": Part(lambda trial: check_bytes(trial, SMALL), 90, WAYS, ANOTHER_WAY),
    "order": Part(lambda trial: check_order(trial, SMALL), 60, WAYS, ANOTHER_WAY),
    "captures": Part(lambda trial: check_captures(trial, SMALL), 60),
    "capture-untouched": Part(check_untouched_captures, 90),
    "two-processes": Part(check_two_processes, 120, advice="give each engine a manager of its own"),
    "copies": Part(time_copies, 120),
    "both-ways": Part(time_both_ways, 60),
    "loads-busy": Part(time_loads, 180),
    "decode-mover": Part(time_decode, 120),
    "stores": Part(time_stores, 120),
    "layers": Part(check_layerwise, 90, advice="leave DYN_KVBM_ONBOARD_MODE unset"),
    "arena": Part(time_arena, 120),
    "replay-locking": Part(time_replays, 120),
    "layouts": Part(compare_layouts, 120, advice="leave DYN_KVBM_KV_LAYOUT unset"),
    "descriptors": Part(sweep_descriptors, 120, WAYS[:-1], ANOTHER_WAY),
    "outputs": Part(check_outputs, 180),
    "hits": Part(time_hits, 180),
}
"""What is right comes before what is fast, and what costs most time last."""

MACHINE_LIMIT_S = 90.0
HANG_S = 1.0
"""The limit of a part that hangs because it was asked to."""
NO_CARD = "none"


def processes(rehearse: bool) -> dict[str, tuple[str, str]]:
    """All processes by name, as `copies` or `bytes:rows`: the part, and the way of copying or nothing."""
    found = {}
    for name, part in PARTS.items():
        # A CPU has one way, which has no name to choose it by.
        ways = tuple("cpu" if way == WAYS[0] else way for way in part.ways if way in (WAYS[0], "auto"))
        for way in (ways if rehearse else part.ways) or ("",):
            found[f"{name}:{way}" if way else name] = (name, way)
    return found


def describe_machine(trial: Trial) -> None:
    """What the table's caption says."""
    tell = trial.result.fact
    tell("torch", torch.__version__)
    if trial.rehearse or not torch.cuda.is_available():
        tell("device", "CPU, rehearsal" if trial.rehearse else NO_CARD)
        return
    from kvbm.transfer.cuda.driver import CudaDriver

    version = CudaDriver().version
    tell("device", torch.cuda.get_device_name())
    tell("memory", f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB")
    tell("driver", f"CUDA {version // 1000}.{version % 1000 // 10}")
    tell("triton", next((found.version for found in distributions(name="triton")), "none"))


def live(run: Callable[[Trial], None], make_trial: Callable[[Result], Trial], result: Result) -> None:
    """What a part's process does."""
    trial = make_trial(result)
    try:
        run(trial)
    finally:
        if "rig" in vars(trial):
            for what, why in trial.rig.refused.items():
                result.leave_out(what, why)


class Run:
    """One call: the processes, one after the other, and what comes of them. It never touches the device itself."""

    def __init__(self, options: argparse.Namespace, report: Report, lines: Path) -> None:
        self._options, self._report, self._lines = options, report, lines
        self._begun_s = time.monotonic()
        self._known = processes(options.rehearse)

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._begun_s

    def machine(self) -> PartRecord:
        """What the machine is, as a process finds that may use the device."""
        record = PartRecord()
        make_trial = partial(Trial, rehearse=self._options.rehearse)
        self._do(record, partial(live, describe_machine, make_trial), MACHINE_LIMIT_S)
        return record

    def parts(self, names: list[str]) -> list[str]:
        """Every process, whatever became of those before it; those that are left when the time is over."""
        for place, name in enumerate(names):
            if self.passed_s >= self._options.limit:
                return names[place:]
            print(f"{name} ({self.passed_s:.0f} s)", flush=True)
            part, way = self._known[name]
            record = self._report.parts[name] = PartRecord()
            broken = frozenset() if way else self._broken()
            make_trial = partial(Trial, rehearse=self._options.rehearse, method=way, broken=broken)
            work = partial(live, PARTS[part].run, make_trial)
            self._do(record, work, PARTS[part].limit_s, self._options.fault.get(name, ""), self._report.write)
            if record.state != "finished":
                print(f"  ENDED EARLY: {record.why}", flush=True)
        return []

    def _do(
        self,
        record: PartRecord,
        work: Callable[[Result], None],
        limit_s: float,
        fault: str = "",
        write: Callable[[], None] = lambda: None,
    ) -> None:
        begun_s = time.monotonic()

        def take(line: dict[str, Any]) -> None:
            record.take(line)
            record.seconds = round(time.monotonic() - begun_s, 1)
            write()

        limit_s = HANG_S if fault == "hang" else min(limit_s, self._options.part_limit)
        why = run_in_child(work, self._lines, limit_s, take, fault)
        record.end(why, time.monotonic() - begun_s)
        write()

    def _broken(self) -> frozenset[str]:
        """Ways of copying that ended a process of their own: no part that is about all of them uses them."""
        parts = self._report.parts
        return frozenset(
            way
            for name, (_, way) in self._known.items()
            if way and name in parts and parts[name].state == "ended early"
        )


def chosen(options: argparse.Namespace, report: Report) -> list[str]:
    """What this call is to run. What ended a process early, or cut a call off, comes last: it may do so again."""
    order = {"running": 1, "ended early": 2}
    names = []
    for name, (part, _) in processes(options.rehearse).items():
        state = report.parts[name].state if name in report.parts else ""
        if {name, part} & set(options.only) and (options.again or state != "finished"):
            names.append((order.get(state, 0), name))
    return [name for _, name in sorted(names, key=lambda entry: entry[0])]


def read_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What the user asks for. Exits with 2 for what cannot be done."""
    parser.add_argument("--output", type=Path, help="where the JSON goes, and what this call goes on from")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, small: the figures mean nothing")
    parser.add_argument(
        "--only",
        nargs="+",
        default=list(PARTS),
        metavar="PART",
        help=f"some parts alone: {', '.join(PARTS)}; or one way of copying of a part: bytes:kernel",
    )
    parser.add_argument("--again", action="store_true", help="run what --output has finished, too")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), metavar="S", help="begin no part after so many seconds"
    )
    parser.add_argument(
        "--part-limit", type=float, default=float("inf"), metavar="S", help="end a part that takes longer"
    )
    parser.add_argument("--fault", action="append", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    known = processes(options.rehearse)
    for name in options.only:
        if name not in PARTS and name not in known:
            parser.error(f"--only {name}: the parts are {', '.join(PARTS)}, and of those {', '.join(known)}")
    if options.output is not None and not options.output.absolute().parent.is_dir():
        parser.error(f"--output {options.output}: there is no such folder")
    # For tests: `copies=crash` lets that part run into it.
    options.fault = dict(fault.split("=") for fault in options.fault)
    for name, fault in options.fault.items():
        if name not in known or fault not in FAULTS:
            parser.error(f"--fault {name}={fault}: a part and one of {', '.join(FAULTS)}")
    return options


def lines_file(output: Path | None) -> Path:
    """Where parts' lines go: beside the output, so that a call that is killed leaves nothing elsewhere."""
    if output is not None:
        return output.with_name(f"{output.name}.lines")
    file, path = tempfile.mkstemp(prefix="kvbm-gpu-")
    os.close(file)
    return Path(path)


def main() -> int:
    """Check, time, print; 1 when something was wrong or ended early."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options = read_options(parser)
    logging.basicConfig(level=logging.INFO, format="  %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and so end the part that runs
    report = Report(options.output)
    lines = lines_file(options.output)
    try:
        run = Run(options, report, lines)
        machine = run.machine()
        if machine.state != "finished":
            print(f"what the machine is could not be found out: {machine.why}", file=sys.stderr)
            return 1
        if machine.facts["device"] == NO_CARD:
            parser.error("no CUDA card is there; --rehearse runs the same code on a CPU")
        try:
            report.read()
        except ValueError as error:
            parser.error(str(error))
        if report.machine and report.machine != machine.facts:
            parser.error(f"{options.output} is of another machine, {report.machine}: this is {machine.facts}")
        report.machine = machine.facts
        report.advice = {name: PARTS[part].advice for name, (part, _) in processes(options.rehearse).items()}
        left = run.parts(chosen(options, report))
    finally:
        lines.unlink(missing_ok=True)
    report.write()
    print("\n".join(report.table()))
    if left:
        print(f"left for another call with the same --output: {', '.join(left)}")
    print(f"{run.passed_s:.0f} s")
    return bool(report.wrong)


if __name__ == "__main__":
    raise SystemExit(main())
