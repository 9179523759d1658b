"""What each namespace holds and loses, under names of which there are few."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvbm.manager.namespace_labels import LABELS_MAX, NamespaceLabels
from kvbm.observe.exposition import render
from kvbm.observe.metric_table import OTHER_NAMESPACES
from rigs.manager import KEYS, NAMESPACE, OTHER, ManagerBench, store

MINE, THEIRS = (f"{each.model}/{each.fingerprint.hex()[:8]}" for each in (NAMESPACE, OTHER))


def test_names_are_bounded_and_stay() -> None:
    labels = NamespaceLabels()
    many = [
        msgspec.structs.replace(NAMESPACE, fields=(("number", str(number)),))
        for number in range(2 * LABELS_MAX)
    ]
    names = [labels.name(each) for each in many]
    assert len(set(names)) == LABELS_MAX + 1
    assert set(names[LABELS_MAX:]) == {OTHER_NAMESPACES}
    assert labels.name(many[0]) == names[0]
    long = msgspec.structs.replace(NAMESPACE, model="x" * 10_000)
    assert len(NamespaceLabels().name(long)) < 128


def test_each_namespace_has_its_own_numbers(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager(namespaces=2, host_blocks=16)
    mine, theirs = manager.engine("a"), manager.engine("b", namespace=OTHER)
    store(*mine, 1, KEYS[:3])
    store(*theirs, 1, KEYS[:8])
    store(*theirs, 2, KEYS[20:22])  # each has room for eight
    manager.tick()
    value = manager.metrics.value

    def numbers(name: str) -> tuple[float, float]:
        mine, theirs = (value(name, namespace=label, tier="host") for label in (MINE, THEIRS))
        return mine, theirs

    assert numbers("kvbm_namespace_blocks") == (3, 8)
    assert numbers("kvbm_namespace_evicted_blocks_total") == (0, 2)
    assert f'kvbm_namespace_blocks{{namespace="{MINE}",tier="host"}} 3' in render(manager.metrics)


def test_a_namespace_that_has_gone_holds_nothing(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager()
    store(*manager.engine(), 1, KEYS[:3])
    manager.tick()
    assert manager.metrics.value("kvbm_namespace_blocks", namespace=MINE, tier="host") == 3
    manager.server.spaces.drop(manager.space(), keep=False)
    assert manager.metrics.value("kvbm_namespace_blocks", namespace=MINE, tier="host") == 0
