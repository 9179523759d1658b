"""Pure decisions: eviction and admission. No I/O; the same objects run in the manager and in a simulator."""

from kvbm.policy.admission import AdmitAll, DiskFilter
from kvbm.policy.arc import Arc
from kvbm.policy.contract import AdmissionPolicy, EvictionPolicy
from kvbm.policy.gdsf import BlockCost, Gdsf
from kvbm.policy.gittins import Gittins
from kvbm.policy.lru import LeafFirstLru
from kvbm.policy.registry import PolicyFactory, eviction_policies, make_policy
from kvbm.policy.s3fifo import S3Fifo
from kvbm.policy.sieve import Sieve
from kvbm.policy.tinylfu import WTinyLfu

__all__ = [
    "AdmissionPolicy",
    "AdmitAll",
    "Arc",
    "BlockCost",
    "DiskFilter",
    "EvictionPolicy",
    "Gdsf",
    "Gittins",
    "LeafFirstLru",
    "PolicyFactory",
    "S3Fifo",
    "Sieve",
    "WTinyLfu",
    "eviction_policies",
    "make_policy",
]
