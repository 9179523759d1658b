"""The rows of all cases, as they come: one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROWS = "results.jsonl"
RIGHT, WRONG, FAILED, LATE, LEFT_OUT = "right", "wrong", "failed", "out of time", "left out"
"""A case showed what it should, showed something else, ended with an error, ran past its limit, or cannot run here."""
Row = dict[str, Any]


def make_row(
    wrong: list[str],
    data: dict[str, Any] | None = None,
    title: str = "",
    rows: list[dict[str, Any]] | None = None,
    state: str = "",
    why: str = "",
) -> Row:
    """The row of a case that ran: wrong with these reasons, or right; `rows` go into the table named `title`."""
    return {
        "state": state or (WRONG if wrong else RIGHT),
        "why": why or "; ".join(wrong),
        "data": data or {},
        "table": {"title": title, "rows": rows or []},
    }


class Ledger:
    """Rows by case. Each is on disk before the next case begins, so that a call that is cut short loses one case."""

    def __init__(self, folder: Path) -> None:
        """Reads the rows that an earlier call left in this folder."""
        self._file = folder / ROWS
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self.rows: dict[str, Row] = {row["case"]: row for row in _read(self._file)}

    def add(self, row: Row) -> None:
        """Keep the row of a case; it replaces an earlier one."""
        self.rows[row["case"]] = row
        draft = self._file.with_suffix(".draft")
        draft.write_text("".join(json.dumps(row) + "\n" for row in self.rows.values()))
        draft.replace(self._file)

    def is_done(self, case: str, again: bool = False) -> bool:
        """Whether a case need not run. What was left out is tried again; with `again` all that was not right is."""
        row = self.rows.get(case)
        if row is None or row["state"] == LEFT_OUT:
            return False
        return bool(row["state"] == RIGHT) or not again


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
