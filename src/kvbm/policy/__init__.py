"""Pure decisions: eviction and admission. No I/O; the same objects run in the manager and in a simulator."""

from kvbm.policy.admission import AdmitAll, DiskFilter
from kvbm.policy.contract import AdmissionPolicy, EvictionPolicy
from kvbm.policy.lru import LeafFirstLru

__all__ = ["AdmissionPolicy", "AdmitAll", "DiskFilter", "EvictionPolicy", "LeafFirstLru"]
