"""Scheduler side: decides which blocks to load and store. Copies nothing, and never makes the engine wait."""

from kvbm.leader.leader import Leader
from kvbm.leader.tracked import Answer

__all__ = ["Answer", "Leader"]
