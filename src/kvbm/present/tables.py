"""Tables, consoles and JSON, as every command writes them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

PIPE_WIDTH = 150
"""Columns where there is no terminal to ask: no table is wider."""
FOLDED_MIN = 12
"""Characters to which names are broken, at least."""
_ENDLESS = 1 << 16
_GAP, _INDENT = "  ", "  "


def console() -> Console:
    """For results on standard output. Names that come from elsewhere may look like markup: none is read."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


class FittingTable(Table):
    """A table whose cells are never cut. Where it is too wide, `spare` columns are left out, in their order; where that
    is not enough, each row is a paragraph of headings and cells.

    Cells are `str` or `Text`. Cells of columns that may wrap are broken to `FOLDED_MIN` characters at least.
    """

    def __init__(self, spare: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**options)
        self._spare = spare

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Rich calls this to draw the table."""
        table = copy.copy(self)
        for heading in (None, *self._spare):
            table.columns = [column for column in table.columns if column.header != heading]
            if table._narrowest(console, options) <= options.max_width:
                yield from Table.__rich_console__(table, console, options)
                return
        yield from self._paragraphs(options.max_width)

    def _narrowest(self, console: Console, options: ConsoleOptions) -> int:
        """The width below which a cell would be cut."""
        whole = Measurement.get(console, options.update_width(_ENDLESS), self).maximum
        folds = (_width_of(column) for column in self.columns if not column.no_wrap)
        return whole - sum(max(0, width - FOLDED_MIN) for width in folds)

    def _paragraphs(self, width: int) -> Iterator[Text]:
        if self.title:
            yield Text.assemble(self.title if isinstance(self.title, Text) else str(self.title))
        labels = _labels(column.header for column in self.columns)
        cells = zip(*(column.cells for column in self.columns), strict=True)
        for row, texts in zip(self.rows, cells, strict=True):
            paragraph, used = Text(style=row.style or "", overflow="fold"), 0
            for label, cell in zip(labels, texts, strict=True):
                shown = cell if isinstance(cell, Text) else Text(str(cell))
                if not label or not shown.plain:
                    continue
                length = cell_len(label) + 1 + shown.cell_len
                if used and used + len(_GAP) + length > width:
                    paragraph.append("\n" + _INDENT)
                    used = len(_INDENT)
                elif used:
                    paragraph.append(_GAP)
                    used += len(_GAP)
                paragraph.append(label + " ", style="dim").append_text(shown)
                used += length
            yield paragraph


def plain_table(
    headings: Iterable[str],
    words: Collection[str] = (),
    folded: Collection[str] = (),
    title: str = "",
    spare: Sequence[str] = (),
) -> FittingTable:
    """A table without a frame. Columns of numbers are aligned right; those in `words` and `folded`, left.

    Only cells of `folded` columns are broken where the table is too wide; `spare` ones are left out first.
    """
    heading_text = Text(title, style="bold") if title else None
    table = FittingTable(spare, title=heading_text, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        if heading in folded:
            table.add_column(heading, overflow="fold")
        else:
            table.add_column(heading, justify="left" if heading in words else "right", no_wrap=True)
    return table


def screen_table(headings: Sequence[str], words: int = 2, spare: Sequence[str] = ()) -> FittingTable:
    """A table without lines, for a screen; the first `words` columns are words."""
    table = FittingTable(spare, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold cyan")
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="left" if column < words else "right", no_wrap=True)
    return table


def side_by_side(left: RenderableType, right: RenderableType) -> RenderableType:
    """Two parts beside each other."""
    grid = Table.grid(padding=(0, 4))
    grid.add_row(left, right)
    return grid


def title_line(text: str) -> Text:
    """A title above a table. The table's own title would be broken to the width of the table."""
    return Text(text, style="bold", overflow="fold")


def _labels(headings: Iterable[object]) -> list[str]:
    """Headings on one line. Those of several columns have the first line in the first of them alone."""
    labels, group = [], ""
    for heading in map(str, headings):
        first, broken, second = heading.partition("\n")
        group = first or group
        labels.append(f"{group} {second}" if broken else heading)
    return labels


def _width_of(column: Column) -> int:
    texts = (str(each) for each in (column.header, *column.cells))
    return max(cell_len(line) for text in texts for line in text.split("\n"))


def json_text(document: Any) -> str:
    """A document as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def save_json(document: Any, path: Path) -> None:
    """Write a document as indented JSON."""
    path.write_text(json_text(document) + "\n")
