"""What a part of `gpu.py` tells, line by line: its own end, however sudden, costs no line that it has written."""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import asdict, dataclass, field
from typing import IO, Any

FAULTS = ("crash", "hang", "raise")
"""What a part can be made to run into, to see that it costs that part alone."""


@dataclass(frozen=True)
class Row:
    """One line of the result. `bar` is the least (or, for what is slower, the most) that is asked; None: told only.

    `advice` says what it means that the bar is missed, or which setting helps.
    """

    what: str
    value: float
    unit: str
    bar: float | None = None
    at_most: bool = False
    advice: str = ""

    @property
    def met(self) -> bool:
        return self.bar is None or (self.value <= self.bar if self.at_most else self.value >= self.bar)

    @property
    def asked(self) -> str:
        """The bar as the table shows it; empty where there is none."""
        return "" if self.bar is None else f"{'≤' if self.at_most else '≥'} {self.bar:g}"


class Result:
    """Takes a part's rows and checks. Each is a line of JSON, and on disk when the call returns.

    `fault`, one of `FAULTS`, strikes when the first line has been written.
    """

    def __init__(self, file: IO[str], fault: str = "") -> None:
        self._file, self._fault = file, fault

    def add(
        self,
        what: str,
        value: float,
        unit: str = "",
        bar: float | None = None,
        at_most: bool = False,
        advice: str = "",
    ) -> None:
        """One figure."""
        print(f"  {what}: {value:.3g} {unit}", flush=True)
        self._write({"row": asdict(Row(what, float(value), unit, bar, at_most, advice))})

    def check(self, what: str, right: bool) -> None:
        """One thing that must be so."""
        if not right:
            print(f"  WRONG: {what}", flush=True)
        self._write({"check": what, "right": right})

    def leave_out(self, what: str, why: object) -> None:
        """What this machine cannot run, and why."""
        told = str(why).strip().partition("\n")[0]
        print(f"  {what} is left out: {told}", flush=True)
        self._write({"left_out": what, "why": told})

    def begin(self, what: str) -> None:
        """What is done next: should the process end in it, this says where."""
        self._write({"doing": what})

    def suggest(self, line: str) -> None:
        """A line for the list of what to do."""
        self._write({"suggest": line})

    def fact(self, name: str, value: str) -> None:
        """Something about the machine, for the table's caption."""
        self._write({"fact": name, "value": value})

    def end(self, error: BaseException | None = None) -> None:
        """The last line: the part went through, or this ended it."""
        if error is None:
            self._write({"over": True})
        else:
            self._write({"error": f"{type(error).__name__}: {error}".strip().partition("\n")[0]})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        fault, self._fault = self._fault, ""
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif fault == "hang":
            threading.Event().wait()
        elif fault == "raise":
            raise RuntimeError("a fault that was asked for")


@dataclass
class PartRecord:
    """What is known of one part: gathered from its lines, and kept in the output between calls."""

    state: str = "running"
    """`running`, `finished`, or `ended early` for the reason in `why`. A call that was cut off leaves `running`."""
    why: str = ""
    doing: str = ""
    seconds: float = 0.0
    checks: int = 0
    rows: list[Row] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    suggested: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, kept: dict[str, Any]) -> PartRecord:
        """A record as `written` made it. Raises TypeError or KeyError for anything else."""
        rows = [Row(**{name: row[name] for name in Row.__annotations__}) for row in kept["rows"]]
        return cls(**{**kept, "rows": rows})

    def written(self) -> dict[str, Any]:
        """For the output."""
        return {**asdict(self), "rows": [{**asdict(row), "met": row.met} for row in self.rows]}

    def take(self, line: dict[str, Any]) -> None:
        """Add a line of a `Result`."""
        if "row" in line:
            self.rows.append(Row(**line["row"]))
        elif "check" in line:
            self.checks += 1
            if not line["right"]:
                self.wrong.append(line["check"])
        elif "left_out" in line:
            self.left_out[line["left_out"]] = line["why"]
        elif "doing" in line:
            self.doing = line["doing"]
        elif "suggest" in line:
            self.suggested.append(line["suggest"])
        elif "fact" in line:
            self.facts[line["fact"]] = line["value"]
        elif "error" in line:
            self.why = line["error"]

    def end(self, why: str, seconds: float) -> None:
        """The part is over; `why` is empty if it went through to its end."""
        self.seconds = round(seconds, 1)
        self.state = "ended early" if why else "finished"
        self.why = why
        if not why:
            self.doing = ""
