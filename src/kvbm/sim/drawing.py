"""How all pictures look: colours, fonts, and matplotlib where it is installed."""

from __future__ import annotations

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


def find_pyplot() -> Any | None:
    """`matplotlib.pyplot`, drawing to files alone; None when it is not installed (extra `demo`)."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
