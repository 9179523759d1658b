"""How all pictures look: colours, fonts, and matplotlib where it is installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

INK, FAINT, GRID = "#22262e", "#6b7280", "#e7e9ed"
STYLE: dict[str, object] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": GRID,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}
"""For `pyplot.rc_context`."""
NO_PICTURE = "no picture: matplotlib is not installed (pip install 'openkvbm[demo]')"


def find_pyplot() -> Any | None:
    """`matplotlib.pyplot`, drawing to files alone; None when it is not installed (extra `demo`)."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def grid_only(axes: Any, grid_axis: str, hidden_side: str) -> None:
    """Axes without ticks and with one side of their frame: not that side, and neither the top nor the right one."""
    for side in ("top", "right", hidden_side):
        axes.spines[side].set_visible(False)
    axes.grid(axis=grid_axis, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, which="both")


def plain_axes(axes: Any, grid_axis: str, title: str, note: str) -> None:
    """Axes without frame and ticks: a grid (`x`, `y` or `both`), a title, and a smaller note below it."""
    grid_only(axes, grid_axis, "left")
    axes.set_title(title, pad=22)
    axes.text(0.0, 1.02, note, transform=axes.transAxes, fontsize=9, color=FAINT)


def save_figure(figure: Any, path: Path) -> None:
    """Write the PNG, whole or not at all, and forget the figure."""
    from matplotlib import pyplot

    draft = path.with_name(f".{path.name}.tmp")
    figure.savefig(draft, format="png", facecolor="white")
    pyplot.close(figure)
    os.replace(draft, path)
