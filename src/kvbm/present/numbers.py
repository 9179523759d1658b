"""How numbers are written for people, and quantiles."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("kB", "MB", "GB", "TB", "PB")


def format_bytes(size_bytes: float) -> str:
    """A size in a sentence, in decimal units: `4 GB`, `402 MB`, `1.5 GB`, `0 B`."""
    value, unit = float(size_bytes), "B"
    for larger in _UNITS[:-1]:
        # From 999.5 on it would be written as 1000; the next unit reads better.
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    digits = 0 if unit == "B" or value >= 100 else 1
    return f"{value:.{digits}f}".removesuffix(".0") + f" {unit}"


def column_bytes(size_bytes: float) -> str:
    """A size in a column of a table, always with one decimal: `4.0 GB`, `402.7 MB`."""
    power = next((i for i in range(len(_UNITS), 1, -1) if size_bytes >= 1000**i), 1)
    return f"{size_bytes / 1000**power:,.1f} {_UNITS[power - 1]}"


def format_seconds(seconds: float) -> str:
    """Seconds without their unit: `0.123`, `1,234.57`."""
    return f"{seconds:.3f}" if seconds < 1.0 else f"{seconds:,.2f}"


def quantile(values: Sequence[float], fraction: float) -> float:
    """The smallest value that at least `fraction` of them do not exceed (nearest rank); 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = -int(-fraction * len(ordered) // 1)
    return ordered[max(rank, 1) - 1]


def name_ranks(ranks: Sequence[int]) -> str:
    """Ascending ranks for people: `rank 3`, `ranks 1, 4-7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join("-".join(map(str, run)) for run in runs)


def format_ms(seconds: float) -> str:
    """A short time in milliseconds: `0.04 ms`, `7.3 ms`, `1,200 ms`."""
    ms = seconds * 1e3
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2f} ms"
