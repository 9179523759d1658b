"""Run cases, each in a process group of its own that ends at its limit. Standard library only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.cases import Case
from benchmarks.gpu_kit.ledger import FAILED, LATE, LEFT_OUT, RIGHT, Ledger, Row
from benchmarks.gpu_kit.packing import Site

ROOT = Path(__file__).resolve().parents[2]
BUDGET_S = 520.0
TAIL_LINES = 25
END_S = 10.0
Report = Callable[[str], None]


class Runner:
    """Runs what is left of some cases within a budget of time."""

    def __init__(
        self,
        folder: Path,
        ledger: Ledger,
        report: Report,
        clock: Callable[[], float] = time.monotonic,
        rehearse: bool = False,
    ) -> None:
        self._folder = folder
        self._ledger = ledger
        self._report = report
        self._clock = clock
        self._rehearse = rehearse or Site(folder).mode() == "cpu"

    def run(self, cases: Iterable[Case], budget_s: float = BUDGET_S, again: bool = False) -> list[str]:
        """Run those that are not done; returns the names of those for which no time was left.

        A case begins only if its whole limit is left, so that a call never runs past its budget. A budget smaller than
        the limit of the first case shortens that limit: else that case would never run.
        """
        until_s = self._clock() + budget_s
        left: list[str] = []
        began = False
        for case in cases:
            if self._ledger.is_done(case.name, again):
                continue
            if refusal := self._refusal(case):
                self._ledger.add({"case": case.name, "state": LEFT_OUT, "why": refusal})
                self._report(f"{case.name}: left out: {refusal}")
                continue
            remaining_s = until_s - self._clock()
            # Behind one that waits for time others wait too: they may need it.
            if left or (began and remaining_s < case.limit_s) or remaining_s <= 0:
                left.append(case.name)
                continue
            began = True
            row = self._one(case, min(case.limit_s, remaining_s))
            self._ledger.add(row)
            self._report(f"{case.name}: {row['state']} in {row['seconds']:.0f} s{_because(row)}")
        return left

    def _refusal(self, case: Case) -> str:
        if case.card_only and self._rehearse:
            return case.card_only
        for name in case.needs:
            row = self._ledger.rows.get(name)
            if row is None:
                return f"{name} comes first"
            if row["state"] != RIGHT:
                return f"{name} is {row['state']}"
        return ""

    def _one(self, case: Case, limit_s: float) -> Row:
        work = self._folder / "work" / case.name.replace("/", "-")
        work.mkdir(parents=True, exist_ok=True)
        request, result, log = work / "request.json", work / "result.json", work / "log"
        reference = self._ledger.rows.get(case.reference, {})
        asked = {"case": case.name, "options": case.options, "rehearse": self._rehearse, "limit_s": limit_s}
        asked |= {"folder": str(self._folder), "work": str(work), "reference": reference.get("data")}
        request.write_text(json.dumps(asked))
        result.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.gpu_kit.child", case.module, str(request), str(result)]
        began_s = self._clock()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(self._folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        late = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            end_group(process)
        row: Row = {"case": case.name, "seconds": round(self._clock() - began_s, 1)}
        if late:
            return {**row, "state": LATE, "why": f"after {limit_s:.0f} s", "log": _tail(log)}
        try:
            return {**row, **json.loads(result.read_text())}
        except (OSError, ValueError):
            return {**row, "state": FAILED, "why": f"status {process.returncode}", "log": _tail(log)}


def environment(folder: Path) -> dict[str, str]:
    """The environment of a case: the unpacked modules before the machine's, and no access to any hub."""
    modules = (folder / "site", ROOT / "src", ROOT)
    caches = folder / "cache"
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "VLLM_"))},
        "PYTHONPATH": os.pathsep.join(map(str, modules)),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a process and whatever of its group is left, an engine's core above all. Bounded."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait(END_S)


def _because(row: Row) -> str:
    why = row.get("why", "")
    return f": {why}" if why else ""


def _tail(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
