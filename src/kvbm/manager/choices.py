"""Policies by the names in settings. A name that cannot be used is refused in one line that names the setting."""

from __future__ import annotations

from kvbm.errors import SettingsError
from kvbm.policy import AdmissionPolicy
from kvbm.policy.admission.write_budget import BLOCKS_PER_DAY_MIN, WriteBudget
from kvbm.policy.registry import ADMISSION, EVICTION, P, PolicyRegistry, PolicyT


def refuse_eviction(field: str, name: str) -> None:
    """Raises SettingsError for an eviction policy that is not known or cannot be made.

    To be called before any tier is made: host memory is gigabytes, and an installed policy may not be importable.
    """
    if name not in EVICTION.built_in:
        _choose(EVICTION, field, name, 1)


def choose_admission(field: str, name: str, slot_count: int, now_s: float) -> AdmissionPolicy:
    """The admission policy of that name for a disk tier of so many slots.

    Raises SettingsError for one that is not known or cannot be made.
    """
    return _choose(ADMISSION, field, name, slot_count, now_s)


def _choose(
    registry: PolicyRegistry[P, PolicyT], field: str, name: str, *args: P.args, **kwargs: P.kwargs
) -> PolicyT:
    if name not in registry.built_in and name not in (factories := registry.factories()):
        raise SettingsError(field, name, f"one of: {registry.accepted(factories)}")
    try:
        return registry.make(name, *args, **kwargs)
    except Exception as error:  # code of an installed package
        raise SettingsError(field, name, f"a policy that can be made ({error})") from error


def bound_writes(
    field: str, bytes_per_day: int, admission: AdmissionPolicy, block_bytes: int, now_s: float, share: int = 1
) -> AdmissionPolicy:
    """`admission` within one of `share` equal parts of a write budget; 0 is none.

    Raises SettingsError when a part is too small to be used.
    """
    if not bytes_per_day:
        return admission
    smallest = BLOCKS_PER_DAY_MIN * block_bytes * share
    if bytes_per_day < smallest:
        blocks = f"{BLOCKS_PER_DAY_MIN} blocks of {block_bytes} bytes{for_each(share)}"
        raise SettingsError(field, bytes_per_day, f"0, or at least {smallest} bytes: {blocks}")
    return WriteBudget(admission, bytes_per_day // share, block_bytes, now_s)


def for_each(namespaces: int) -> str:
    """The last words of an error, where namespaces share a setting."""
    return f" for each of {namespaces} namespaces" if namespaces > 1 else ""
