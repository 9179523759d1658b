"""The earliest moment at which an engine can have read weights."""

from __future__ import annotations

from kvbm.weights import process_start_s


def engine_start_s() -> float:
    """No weights were loaded before this moment, in seconds of the system's clock; 0 where that is not known."""
    try:
        return process_start_s()
    except OSError:
        return 0.0
