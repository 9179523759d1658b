"""The admission policies of the disk tier by name: the built-in ones, and those that installed packages bring along.

A package brings one by an entry point in the group `kvbm.admission_policies`: its name, and a callable that makes a
policy from the tier's number of slots and the time, in seconds::

    [project.entry-points."kvbm.admission_policies"]
    mine = "my_package.policy:MyAdmission"

`kvbm.testing.admission_contract` checks whether it keeps the contract.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvbm.policy.admission.filter import AdmitAll, DiskFilter
from kvbm.policy.admission.ghost import GhostAdmission
from kvbm.policy.contract import AdmissionPolicy

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "kvbm.admission_policies"

AdmissionFactory = Callable[[int, float], AdmissionPolicy]
"""Makes a policy for a tier of so many slots, from this time (seconds) on."""

BUILT_IN: dict[str, AdmissionFactory] = {
    "filter": lambda slot_count, now_s: DiskFilter(now_s),
    "all": lambda slot_count, now_s: AdmitAll(),
    "ghost": lambda slot_count, now_s: GhostAdmission(slot_count),
}


def admission_policies() -> dict[str, AdmissionFactory]:
    """Every policy that can be made, by name: the built-in ones, then those of installed packages in order of name.

    A package cannot take a built-in name; of two with one name the one whose callable sorts first counts. Nothing is
    imported before a policy is made; making one of a package that cannot be imported raises ValueError.
    """
    from importlib.metadata import entry_points  # 20 ms that a manager with a built-in policy does not need

    policies = dict(BUILT_IN)
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: (entry.name, entry.value)):
        policies.setdefault(entry.name, partial(_make_installed, entry))
    return policies


def make_admission(name: str, slot_count: int, now_s: float) -> AdmissionPolicy:
    """The policy of that name for a disk tier of so many slots, from `now_s` on.

    Raises ValueError when there is none of that name, or the package that brings it cannot be imported.
    """
    policies = BUILT_IN if name in BUILT_IN else admission_policies()
    if name not in policies:
        raise ValueError(f"admission policy {name!r}: not known; accepted: {', '.join(policies)}")
    return policies[name](slot_count, now_s)


def _make_installed(entry: EntryPoint, slot_count: int, now_s: float) -> AdmissionPolicy:
    try:
        factory: AdmissionFactory = entry.load()
    except Exception as error:
        raise ValueError(
            f"admission policy {entry.name!r}: {entry.value} cannot be imported: {error}"
        ) from error
    return factory(slot_count, now_s)
