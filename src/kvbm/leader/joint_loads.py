"""Requests that want what another request is loading wait for that load, and then find the blocks on the device.

A second load of the same bytes would come later than the first one ends, and take device blocks of its own. The wait is
bounded by the time that computing the blocks takes: a load that takes longer is not worth waiting for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WAIT_S_MAX = 10.0


@dataclass(slots=True)
class JointLoad:
    """A load that runs: requests that want its blocks wait for it, up to `until_s` at the latest."""

    hashes: list[bytes]
    until_s: float


class JointLoads:
    """The blocks of the loads that run, by the engine's hashes. Bounded by the number of device blocks."""

    def __init__(self, on: bool = True) -> None:
        """Off, nobody waits for another's load: the engine cannot."""
        self._on = on
        self._loads: dict[str, JointLoad] = {}
        # The request that loads each block.
        self._by_hash: dict[bytes, str] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def begun(self, request: str, hashes: Sequence[bytes], now_s: float, compute_s: float) -> None:
        """The request loads these blocks, which would take `compute_s` seconds to compute."""
        self.ended(request)
        if not self._on:
            return
        self._loads[request] = JointLoad(list(hashes), now_s + min(compute_s, WAIT_S_MAX))
        self._by_hash.update(dict.fromkeys(hashes, request))

    def ended(self, request: str) -> None:
        """The request's load has ended, well or not."""
        load = self._loads.pop(request, None)
        if load is None:
            return
        load.until_s = float("-inf")
        for each in load.hashes:
            if self._by_hash.get(each) == request:
                del self._by_hash[each]

    def awaited(self, request: str, hashes: Sequence[bytes], computed: int, now_s: float) -> JointLoad | None:
        """The load that the request should wait for: another one's, of the block after its first `computed`."""
        if not self._by_hash or computed >= len(hashes):
            return None
        loader = self._by_hash.get(hashes[computed])
        if loader is None or loader == request or now_s >= self._loads[loader].until_s:
            return None
        return self._loads[loader]
