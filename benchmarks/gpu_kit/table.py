"""What the rows say: a verdict, what to do, and a table of all cases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.cases import Case
from benchmarks.gpu_kit.ledger import FAILED, LATE, LEFT_OUT, RIGHT, WRONG, Row

BULKY = ("answers", "likelihoods", "token gaps ms")
CELL_MAX = 160


@dataclass
class Outcome:
    """All of it in a few lines. `wrong` is whether anything was wrong or failed."""

    verdict: str
    machine: dict[str, Any] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)
    wrong: bool = False


def outcome(rows: dict[str, Row], cases: Sequence[Case]) -> Outcome:
    """The verdict over the cases that have rows."""
    machine = rows.get("check/machine", {}).get("data", {})
    states = {
        state: [row for row in rows.values() if row["state"] == state]
        for state in (RIGHT, WRONG, FAILED, LATE)
    }
    left = [case.name for case in cases if case.name not in rows]
    advice = [f"{row['case']} is wrong: {row.get('why')}" for row in states[WRONG]]
    advice += [f"{row['case']} failed: {row.get('why')} (its log is in its row)" for row in states[FAILED]]
    advice += [f"{row['case']} ran out of time: step … --again runs it once more" for row in states[LATE]]
    bad = bool(states[WRONG] or states[FAILED] or states[LATE])
    first_bad = next(
        (name for name in ("check/machine", "check/libraries", "check/import") if _bad(rows, name)), ""
    )
    if first_bad:
        verdict = f"vLLM cannot run here: {rows[first_bad].get('why') or first_bad}"
    elif bad:
        verdict = f"{len(states[RIGHT])} cases right, {len(advice)} not"
    else:
        verdict = f"{len(states[RIGHT])} cases right, none wrong"
    if left:
        verdict += f"; {len(left)} not run yet"
    return Outcome(verdict, machine, advice, bad)


def _bad(rows: dict[str, Row], name: str) -> bool:
    return name in rows and rows[name]["state"] in (WRONG, FAILED, LATE)


def text(rows: dict[str, Row], cases: Sequence[Case]) -> str:
    """A Markdown table of all cases, those without a row as well."""
    lines = ["| case | state | seconds | what |", "| --- | --- | ---: | --- |"]
    for case in cases:
        row = rows.get(case.name, {"state": "not run"})
        seconds = f"{row['seconds']:.0f}" if "seconds" in row else "–"
        told = row.get("why") if row["state"] != RIGHT else _short(row.get("data", {}))
        lines.append(f"| {case.name} | {row['state']} | {seconds} | {told or ''} |")
    return "\n".join(lines)


def _short(data: dict[str, Any]) -> str:
    parts = [
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in data.items()
        if name not in BULKY and isinstance(value, str | int | float)
    ]
    told = ", ".join(parts)
    return told if len(told) <= CELL_MAX * 3 else told[: CELL_MAX * 3] + " …"


def write(outcome: Outcome, rows: dict[str, Row], folder: Path) -> None:
    """`table.md` for people and `table.json` for programs; the full rows are in `results.jsonl` beside them."""
    from benchmarks.gpu_kit.cases import all_cases

    folder.mkdir(parents=True, exist_ok=True)
    head = [f"Verdict: {outcome.verdict}", ""]
    head += [", ".join(f"{name} {value}" for name, value in outcome.machine.items()), ""]
    head += [f"- {line}" for line in outcome.advice] + [""] * bool(outcome.advice)
    (folder / "table.md").write_text("\n".join([*head, text(rows, all_cases()), ""]))
    brief = {
        name: {**row, "data": {k: v for k, v in row.get("data", {}).items() if k not in BULKY}}
        for name, row in rows.items()
        if row["state"] != LEFT_OUT or row.get("why")
    }
    (folder / "table.json").write_text(json.dumps({**asdict(outcome), "rows": brief}, indent=1) + "\n")
