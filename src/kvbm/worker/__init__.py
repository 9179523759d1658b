"""Rank side: moves bytes between G1 and G2. Decides nothing."""

from kvbm.worker.worker import FinishedLoad, Worker

__all__ = ["FinishedLoad", "Worker"]
