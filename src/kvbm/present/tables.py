"""Tables, consoles and JSON, as every command writes them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 150
"""Columns where there is no terminal to ask: no table is wider."""


def console() -> Console:
    """For results on standard output. Names that come from elsewhere may look like markup: none is read."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def plain_table(
    headings: Iterable[str], words: Collection[str] = (), folded: Collection[str] = (), title: str = ""
) -> Table:
    """A table without a frame. Columns of numbers are aligned right; those in `words` and `folded`, left.

    Only cells of `folded` columns are broken where the table is too wide.
    """
    heading_text = Text(title, style="bold") if title else None
    table = Table(title=heading_text, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        if heading in folded:
            table.add_column(heading, overflow="fold")
        else:
            table.add_column(heading, justify="left" if heading in words else "right", no_wrap=True)
    return table


def title_line(text: str) -> Text:
    """A title above a table. The table's own title would be broken to the width of the table."""
    return Text(text, style="bold", no_wrap=True)


def json_text(document: Any) -> str:
    """A document as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def save_json(document: Any, path: Path) -> None:
    """Write a document as indented JSON."""
    path.write_text(json_text(document) + "\n")
