"""Policies by name: the built-in ones, and those that installed packages bring along.

A package brings one by an entry point: its name, and a callable that makes a policy. For eviction the group is
`kvbm.eviction_policies`, and the callable takes the tier's number of slots; for admission to disk it is
`kvbm.admission_policies`, and the callable takes the number of slots and the time in seconds::

    [project.entry-points."kvbm.eviction_policies"]
    mine = "my_package.policy:MyPolicy"

`kvbm.testing.policy_contract` and `kvbm.testing.admission_contract` check whether a policy keeps its contract.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

from kvbm.policy.admission.filter import AdmitAll, DiskFilter
from kvbm.policy.admission.ghost import GhostAdmission
from kvbm.policy.contract import AdmissionPolicy, EvictionPolicy
from kvbm.policy.lru import LeafFirstLru

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

P = ParamSpec("P")
PolicyT = TypeVar("PolicyT")

PolicyFactory = Callable[[int], EvictionPolicy]
"""Makes a policy for a tier of so many slots."""
AdmissionFactory = Callable[[int, float], AdmissionPolicy]
"""Makes a policy for a disk tier of so many slots, from this time (seconds) on."""


class PolicyRegistry(Generic[P, PolicyT]):
    """The policies of one kind, each made by the callable behind its name."""

    def __init__(self, kind: str, built_in: Mapping[str, Callable[P, PolicyT]]) -> None:
        """`kind` is the word in messages, and in the name of the entry points' group."""
        self.kind = kind
        self.entry_point_group = f"kvbm.{kind}_policies"
        self.built_in = built_in

    def factories(self) -> dict[str, Callable[P, PolicyT]]:
        """Every policy that can be made, by name: the built-in ones, then those of packages in order of name.

        A package cannot take a built-in name; of two with one name the one whose callable sorts first counts. No
        package is imported before its policy is made, so a broken one does no harm to others; making its policy
        raises ValueError.
        """
        from importlib.metadata import (
            entry_points,  # 20 ms that a manager with a built-in policy does not need
        )

        factories = dict(self.built_in)
        found = entry_points(group=self.entry_point_group)
        for entry in sorted(found, key=lambda entry: (entry.name, entry.value)):
            factories.setdefault(entry.name, partial(self._make_installed, entry))
        return factories

    def accepted(self, names: Iterable[str]) -> str:
        """The names that can be used, and where others would come from, for an error line."""
        return (
            f"{', '.join(names)}, or a policy of an installed package (entry point {self.entry_point_group})"
        )

    def make(self, name: str, *args: P.args, **kwargs: P.kwargs) -> PolicyT:
        """The policy of that name.

        Raises ValueError when there is none of that name, or the package that brings it cannot be imported.
        """
        # A built-in one without a search through everything that is installed.
        factories = self.built_in if name in self.built_in else self.factories()
        if name not in factories:
            raise ValueError(f"{self.kind} policy {name!r}: not known; accepted: {self.accepted(factories)}")
        return factories[name](*args, **kwargs)

    def _make_installed(self, entry: EntryPoint, *args: P.args, **kwargs: P.kwargs) -> PolicyT:
        try:
            factory: Callable[P, PolicyT] = entry.load()
        except Exception as error:
            raise ValueError(
                f"{self.kind} policy {entry.name!r}: {entry.value} cannot be imported: {error}"
            ) from error
        return factory(*args, **kwargs)


def _gittins(slot_count: int) -> EvictionPolicy:
    from kvbm.policy.gittins.policy import Gittins  # needs numpy, which the others do without

    return Gittins(slot_count)


EVICTION: PolicyRegistry[[int], EvictionPolicy] = PolicyRegistry(
    "eviction",
    {
        "gittins": _gittins,
        "lru": LeafFirstLru,
    },
)
ADMISSION: PolicyRegistry[[int, float], AdmissionPolicy] = PolicyRegistry(
    "admission",
    {
        "filter": lambda slot_count, now_s: DiskFilter(now_s),
        "all": lambda slot_count, now_s: AdmitAll(),
        "ghost": lambda slot_count, now_s: GhostAdmission(slot_count),
    },
)

eviction_policies, make_policy = EVICTION.factories, EVICTION.make
admission_policies, make_admission = ADMISSION.factories, ADMISSION.make
