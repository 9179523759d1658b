"""All sizes that a search may choose from."""

from __future__ import annotations

from kvbm.sim.plan.cheapest import Bounds, Point


def everywhere(hosts: list[int], disks: list[int], bounds: Bounds) -> list[Point]:
    """Every pair of sizes within bounds: no disk, or one larger than host memory."""
    points = [(0, 0), *((host, disk) for host in hosts for disk in [0, *disks] if not disk or disk > host)]
    return [point for point in points if bounds.allow(point)]
