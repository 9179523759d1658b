"""The rows of all cases, as they come: one JSON object a line, in the kit's folder and in the folder of results."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

ROWS = "results.jsonl"
RIGHT, WRONG, FAILED, LATE, LEFT_OUT = "right", "wrong", "failed", "out of time", "left out"
"""What becomes of a case: it showed what it should, it showed something else, it ended with an error, it ran past its
limit, or it cannot run on this machine."""
Row = dict[str, Any]


class Ledger:
    """Rows by case. Each is on disk before the next case begins, so that a call that is cut short loses one case."""

    def __init__(self, folder: Path, output: Path | None = None, earlier: Path | None = None) -> None:
        """`earlier` is a file of rows that another call brought back, for a machine that has lost its own."""
        self._files = [folder / ROWS, *([output / ROWS] if output is not None else [])]
        self.rows: dict[str, Row] = {}
        for path in (folder / ROWS, *([earlier] if earlier is not None else [])):
            for row in _read(path):
                self.rows.setdefault(row["case"], row)
        for path in self._files:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def add(self, row: Row) -> None:
        """Keep the row of a case; it replaces an earlier one."""
        self.rows[row["case"]] = row
        self._write()

    def done(self, case: str, again: bool = False) -> bool:
        """Whether a case need not run. What was left out is looked at anew; with `again` all that was not right is."""
        row = self.rows.get(case)
        if row is None or row["state"] == LEFT_OUT:
            return False
        return row["state"] == RIGHT or not again

    def _write(self) -> None:
        text = "".join(json.dumps(row) + "\n" for row in self.rows.values())
        for path in self._files:
            draft = path.with_suffix(".draft")
            draft.write_text(text)
            os.replace(draft, path)


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    rows: list[Row] = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the machine went away in the middle of a line
        if isinstance(row, dict) and "case" in row and "state" in row:
            rows.append(row)
    return rows
