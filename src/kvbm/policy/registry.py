"""The eviction policies by name: the built-in ones, and those that installed packages bring along.

A package brings one by an entry point in the group `kvbm.eviction_policies`: its name, and a callable that makes a
policy for a number of slots::

    [project.entry-points."kvbm.eviction_policies"]
    mine = "my_package.policy:MyPolicy"

`kvbm.testing.policy_contract` checks whether it keeps the contract.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from kvbm.policy.contract import EvictionPolicy

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "kvbm.eviction_policies"

PolicyFactory = Callable[[int], EvictionPolicy]
"""Makes a policy for a tier of so many slots."""

BUILT_IN = {
    "gittins": "kvbm.policy.gittins.policy:Gittins",
    "lru": "kvbm.policy.lru:LeafFirstLru",
    "s3fifo": "kvbm.policy.s3fifo:S3Fifo",
    "sieve": "kvbm.policy.sieve:Sieve",
    "arc": "kvbm.policy.arc:Arc",
    "tinylfu": "kvbm.policy.tinylfu:WTinyLfu",
    "gdsf": "kvbm.policy.gdsf:Gdsf",
}
"""Name to where the policy is; imported when the first of its kind is made."""


def eviction_policies() -> dict[str, PolicyFactory]:
    """Every policy that can be made, by name: the built-in ones, then those of installed packages in order of name.

    A package cannot take a built-in name; of two with one name the one whose callable sorts first counts. Nothing is
    imported before a policy is made, so a broken package does no harm to others; making its policy raises ValueError.
    """
    from importlib.metadata import entry_points  # 20 ms that a manager with a built-in policy does not need

    policies: dict[str, PolicyFactory] = {name: partial(_make_built_in, name) for name in BUILT_IN}
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: (entry.name, entry.value)):
        policies.setdefault(entry.name, partial(_make_installed, entry))
    return policies


def make_policy(name: str, slot_count: int) -> EvictionPolicy:
    """The policy of that name for a tier of so many slots.

    Raises ValueError when there is none of that name, or the package that brings it cannot be imported.
    """
    if name in BUILT_IN:  # without a search through everything that is installed
        return _make_built_in(name, slot_count)
    policies = eviction_policies()
    if name not in policies:
        raise ValueError(f"eviction policy {name!r}: not known; accepted: {', '.join(policies)}")
    return policies[name](slot_count)


def _make_built_in(name: str, slot_count: int) -> EvictionPolicy:
    module, _, class_name = BUILT_IN[name].partition(":")
    factory: PolicyFactory = getattr(import_module(module), class_name)
    return factory(slot_count)


def _make_installed(entry: EntryPoint, slot_count: int) -> EvictionPolicy:
    try:
        factory: PolicyFactory = entry.load()
    except Exception as error:
        raise ValueError(
            f"eviction policy {entry.name!r}: {entry.value} cannot be imported: {error}"
        ) from error
    return factory(slot_count)
