"""Which CPUs and devices lie next to which memory, as the kernel describes it; -1 stands for no node."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")


def cpus_of_node(node: int) -> set[int]:
    """All CPUs of a NUMA node."""
    try:
        cpulist = (NODES / f"node{node}" / "cpulist").read_text()
    except OSError:
        return set()
    cpus: set[int] = set()
    for part in filter(None, cpulist.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def keep_thread_on(node: int) -> None:
    """Let the calling thread, which must be one of ours, run on those CPUs of a node that it may use, if there are any.

    The kernel places a page where the thread runs that touches it first.
    """
    cpus = cpus_of_node(node) & os.sched_getaffinity(0)
    if cpus:
        with contextlib.suppress(OSError):  # a mask that shrank meanwhile: it runs where the kernel lets it
            os.sched_setaffinity(0, cpus)


def cpus_near(cpus: set[int]) -> set[int]:
    """All CPUs of the NUMA nodes that `cpus` lie on."""
    near: set[int] = set()
    for path in NODES.glob("node[0-9]*"):
        node = cpus_of_node(int(path.name.removeprefix("node")))
        if node & cpus:
            near |= node
    return near


def node_of_pci_device(bus_id: str) -> int:
    """The NUMA node that a device such as `0000:3b:00.0` is attached to; -1 where the kernel names none."""
    try:
        return int((PCI_DEVICES / bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return -1
