"""Rank side: moves bytes between G1 and G2. Decides nothing."""

from kvbm.worker.jobs import FinishedLoad
from kvbm.worker.worker import Worker

__all__ = ["FinishedLoad", "Worker"]
