"""What `gpu.py` leaves behind: a file that the next call goes on from, the table, and what to do about it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gpu_rows import PartRecord


class Report:
    """The records of all parts, by name, and the machine that they are of."""

    def __init__(self, output: Path | None = None) -> None:
        self.output = output
        self.machine: dict[str, str] = {}
        self.parts: dict[str, PartRecord] = {}
        self.advice: dict[str, str] = {}
        """What it means that something is wrong in a part, by the part's name."""

    @property
    def wrong(self) -> list[str]:
        """What is wrong, a line each."""
        lines = []
        for name, record in self.parts.items():
            lines += [f"{name}: {what}" for what in record.wrong]
            if record.state == "ended early":
                while_doing = f", in: {record.doing}" if record.doing else ""
                lines.append(f"part {name} ended early: {record.why}{while_doing}")
        return lines

    @property
    def to_do(self) -> list[str]:
        """A line for each part in which something is wrong, for each bar that is missed, and what parts suggest."""
        lines = []
        for name, record in self.parts.items():
            if record.wrong or record.state == "ended early":
                lines.append(f"{name} is wrong: {self.advice.get(name, 'report it, with this file')}")
            for row in record.rows:
                if not row.met:
                    lines.append(f"{row.what}: {row.value:.3g} {row.unit}, asked {row.asked}: {row.advice}")
            lines += record.suggested
        return lines

    def read(self) -> None:
        """Go on from an earlier call's file, if there is one. Raises ValueError for anything that is none."""
        if self.output is None or not self.output.exists():
            return
        try:
            kept = json.loads(self.output.read_text())
            self.machine = kept["machine"]
            self.parts = {name: PartRecord.read(record) for name, record in kept["parts"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.output} is not what an earlier call has left ({error!r})") from error

    def write(self) -> None:
        """Replace the file in one go: there is a whole one at all times."""
        if self.output is None:
            return
        told: dict[str, Any] = {
            "machine": self.machine,
            "wrong": self.wrong,
            "to_do": self.to_do,
            "parts": {name: record.written() for name, record in self.parts.items()},
        }
        fresh = self.output.with_name(f"{self.output.name}.new")
        with fresh.open("w") as file:
            json.dump(told, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.output)

    def table(self) -> list[str]:
        """The short table, and what it is a table of; last what is wrong, and what to do."""
        lines = ["", ", ".join(f"{name} {value}" for name, value in self.machine.items())]
        for name, record in self.parts.items():
            lines.append(f"{name} ({record.state}, {record.seconds:.0f} s, {record.checks} checks)")
            for row in record.rows:
                bar = f"{row.asked}{'' if row.met else ' MISSED'}"
                lines.append(f"  {row.what:<70} {row.value:9.3f} {row.unit:<13} {bar}".rstrip())
            lines += [f"  left out: {what}: {why}" for what, why in record.left_out.items()]
        for title, told in (("wrong", self.wrong), ("what to do", self.to_do)):
            lines.append(f"{title}: {'' if told else 'nothing'}".rstrip())
            lines += [f"  {line}" for line in told]
        return lines
