"""The kernel's description of NUMA nodes, with its gaps."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbm import numa


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes, and two devices: one at node 1, one that nobody has placed."""
    for node, cpus in enumerate(("0-3,8-11\n", "4-7,12\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus)
    for bus_id, text in (("0000:3b:00.0", "1\n"), ("0000:86:00.0", "-1\n"), ("0000:af:00.0", "?")):
        (tmp_path / bus_id).mkdir()
        (tmp_path / bus_id / "numa_node").write_text(text)
    monkeypatch.setattr(numa, "NODES", tmp_path)
    monkeypatch.setattr(numa, "PCI_DEVICES", tmp_path)
    return tmp_path


def test_the_cpus_of_a_node(machine: Path) -> None:
    assert numa.cpus_of_node(0) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert numa.cpus_of_node(1) == {4, 5, 6, 7, 12}
    assert numa.cpus_of_node(2) == numa.cpus_of_node(-1) == set()


def test_the_cpus_beside_some(machine: Path) -> None:
    assert numa.cpus_near({5}) == numa.cpus_of_node(1)
    assert numa.cpus_near({5, 8}) == numa.cpus_of_node(0) | numa.cpus_of_node(1)
    assert numa.cpus_near({99}) == set()


@pytest.mark.parametrize(
    ("bus_id", "node"), [("0000:3b:00.0", 1), ("0000:86:00.0", -1), ("0000:af:00.0", -1), ("absent", -1)]
)
def test_where_a_device_is_attached(machine: Path, bus_id: str, node: int) -> None:
    assert numa.node_of_pci_device(bus_id) == node
