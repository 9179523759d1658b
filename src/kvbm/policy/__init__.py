"""Pure decisions: eviction and admission. No I/O; the same objects run in the manager and in a simulator.

`make_policy` makes an eviction policy by name; `gittins`, which needs numpy, is imported there and not here.
"""

from kvbm.policy.admission.filter import AdmitAll, DiskFilter
from kvbm.policy.admission.ghost import GhostAdmission
from kvbm.policy.admission.write_budget import WriteBudget
from kvbm.policy.contract import AdmissionPolicy, EvictionPolicy
from kvbm.policy.lru import LeafFirstLru
from kvbm.policy.registry import (
    AdmissionFactory,
    PolicyFactory,
    admission_policies,
    eviction_policies,
    make_admission,
    make_policy,
)

__all__ = [
    "AdmissionFactory",
    "AdmissionPolicy",
    "AdmitAll",
    "DiskFilter",
    "EvictionPolicy",
    "GhostAdmission",
    "LeafFirstLru",
    "PolicyFactory",
    "WriteBudget",
    "admission_policies",
    "eviction_policies",
    "make_admission",
    "make_policy",
]
