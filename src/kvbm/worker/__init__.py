"""Rank side: moves bytes between G1 and G2. Decides nothing."""

from kvbm.worker.jobs import FinishedLoad
from kvbm.worker.mapping import Mapping
from kvbm.worker.mover import Mover
from kvbm.worker.worker import Worker

__all__ = ["FinishedLoad", "Mapping", "Mover", "Worker"]
