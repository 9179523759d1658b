"""The results: a verdict, what to do, a table for each kind of measurement, and one of all cases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_kit.cases import Case
from benchmarks.gpu_kit.ledger import FAILED, LATE, RIGHT, WRONG, Row

ADVICE = {
    WRONG: "report it, with results.jsonl",
    FAILED: "the end of its log is in results.jsonl",
    LATE: "step --again runs it once more",
}


class Outcome(NamedTuple):
    """The results in a few lines. `wrong` says whether a case was wrong, failed or ran out of time."""

    verdict: str
    advice: list[str]
    wrong: bool


def judge(rows: dict[str, Row], cases: Sequence[Case]) -> Outcome:
    """The verdict over the cases that have rows."""
    bad = [row for row in rows.values() if row["state"] in ADVICE]
    advice = [f"{row['case']}: {row.get('why')} ({ADVICE[row['state']]})" for row in bad]
    right = sum(row["state"] == RIGHT for row in rows.values())
    verdict = f"{right} cases right, {len(bad) or 'none'} wrong"
    if first := next((row for row in bad if row["case"].startswith("check/")), None):
        verdict = f"vLLM cannot run here: {first.get('why')}"
    if left := sum(case.name not in rows for case in cases):
        verdict += f"; {left} not run yet"
    return Outcome(verdict, advice, bool(bad))


def format_findings(rows: dict[str, Row], cases: Sequence[Case]) -> str:
    """A Markdown table for each kind of measurement."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        table = rows.get(case.name, {}).get("table", {})
        if table.get("rows"):
            tables.setdefault(table["title"], []).extend(table["rows"])
    lines = []
    for title, found in tables.items():
        columns = list(dict.fromkeys(name for row in found for name in row))
        lines += [f"## {title}", "", *_head(columns)]
        lines += [_line([_cell(row.get(name)) for name in columns]) for row in found]
        lines.append("")
    return "\n".join(lines)


def format_cases(rows: dict[str, Row], cases: Sequence[Case]) -> str:
    """A Markdown table of all cases, those that have not run as well."""
    lines = _head(["case", "state", "seconds", "why"])
    for case in cases:
        row = rows.get(case.name, {"state": "not run"})
        why = row.get("why", "").replace("\n", " ").replace("|", "\\|")
        lines.append(_line([case.name, row["state"], _cell(row.get("seconds")), why]))
    return "\n".join(lines)


def _head(columns: list[str]) -> list[str]:
    return [_line(columns), _line(["---"] * len(columns))]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
    return "" if value is None else str(value)


def write(outcome: Outcome, rows: dict[str, Row], cases: Sequence[Case], folder: Path) -> None:
    """Write `table.md`; the full rows are in `results.jsonl` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    found = rows.get("check/machine", {}).get("data", {})
    machine = ", ".join(f"{name} {value}" for name, value in found.items())
    lines = ["# KVBM on this machine", "", outcome.verdict, "", machine, ""]
    lines += [f"- {line}" for line in outcome.advice] + [""] * bool(outcome.advice)
    lines += [format_findings(rows, cases), "## Cases", "", format_cases(rows, cases), ""]
    (folder / "table.md").write_text("\n".join(lines))
