"""The store below a block manager that keeps its blocks in this process: opened as a manager opens it."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvbm.clock import Clock
from kvbm.layout import BlockLayout, Namespace
from kvbm.manager.remote_side import RemoteSide
from kvbm.manager.write_behind import RemoteRules
from kvbm.policy import AdmissionPolicy
from kvbm.settings import Settings
from kvbm.tiers.remote.contract import RemoteTier

LISTING_POLL_S = 0.001


def open_store(
    settings: Settings, layout: BlockLayout, namespace: Namespace, clock: Clock
) -> list[tuple[RemoteTier, RemoteRules, AdmissionPolicy]]:
    """The remote tier of these settings, whose fields are the caller's arguments; none for an ephemeral namespace.
    Raises SettingsError."""
    from kvbm.manager.remote_opening import RemoteOpening  # its packages are not everywhere, and take a while

    return RemoteOpening(settings, clock, named=lambda field: field).open(namespace, layout, share=1)


def await_listing(side: RemoteSide, turn: Callable[[], None], timeout_s: float) -> None:
    """Wait until what lies in the store is known, so that the first lookup finds it; no longer than `timeout_s`, and
    not for a store that is away. What comes later is found later."""
    end_s = time.monotonic() + timeout_s
    turn()
    while not side.fault and not side.tier.describe().get("complete") and time.monotonic() < end_s:
        time.sleep(LISTING_POLL_S)
        turn()


def write_out(side: RemoteSide) -> None:
    """What waits for the next blocks of its chain is written now."""
    if side.writer is not None:
        side.writer.flush()
