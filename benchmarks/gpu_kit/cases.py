"""The cases, in order. A case is one process with a limit of its own; a step is the cases of one question."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

STEPS = ("check", "copies", "locking", "engine", "comparison")
WAYS = ("batch", "rows", "kernel", "auto")
ONE_WAY = "a CPU has one way of copying: copies/…-auto"
MLA_ON_A_CPU = "vLLM caches no prefixes of MLA models on a CPU without AMX"
LOCKED_GB = 34.36
"""32 GiB."""


@dataclass(frozen=True)
class Case:
    """One case: what runs (`module` of this package, its `measure`), how long at most, and with which options.

    `needs` are cases that must have been right. `reference` is the case whose data it is compared with.
    `card_only` is the reason why a rehearsal leaves it out.
    """

    name: str
    module: str
    limit_s: float
    options: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ("check/import",)
    reference: str = ""
    card_only: str = ""

    @property
    def step(self) -> str:
        """The step that it belongs to."""
        return self.name.split("/")[0]


def _check() -> list[Case]:
    first = [
        Case(f"check/{probe}", "probes", 120, {"probe": probe}, needs=())
        for probe in ("machine", "tools", "libraries")
    ]
    return [
        *first,
        Case("check/import", "probes", 180, {"probe": "imports"}, tuple(case.name for case in first)),
    ]


def _copies() -> list[Case]:
    cases: list[Case] = []
    for what, needs in (("right", "check/machine"), ("times", "copies/right-{}")):
        for way in WAYS:
            only = "" if way == "auto" else ONE_WAY
            options, required = {"what": what, "way": way}, (needs.format(way),)
            cases.append(Case(f"copies/{what}-{way}", "copies", 120, options, required, card_only=only))
    return cases


def _locking() -> list[Case]:
    return [
        Case(f"locking/{what}", "locking", 120, {"what": what}, needs=("copies/right-auto",))
        for what in ("start", "captures")
    ]


def _engine() -> list[Case]:
    host: dict[str, Any] = {"kvbm": True}
    # Equal answers prove nothing unless damaged KV changes them.
    with_kvbm = {"host": host, "damaged": {**host, "fault": "damage"}}
    more = {"disk": {**host, "disk": True}, "failing-loads": {**host, "fault": "fail", "every": 2}}
    # fp32 is exact up to the last bits; `graphs` is how a card serves: bf16, full graphs, batch-invariant.
    engines: list[tuple[str, dict[str, Any], dict[str, dict[str, Any]], str]] = [
        ("fp32", {"how": "fp32"}, {**with_kvbm, **more}, ""),
        ("graphs", {"how": "graphs"}, {**with_kvbm, **more}, ""),
        ("llama", {"how": "graphs", "shape": "llama"}, with_kvbm, ""),
        ("fp8", {"how": "graphs", "shape": "fp8"}, with_kvbm, ""),
        ("mla", {"how": "graphs", "shape": "mla"}, with_kvbm, MLA_ON_A_CPU),
    ]
    cases: list[Case] = []
    for name, base, kinds, only in engines:
        alone = f"engine/{name}-alone"
        cases.append(Case(alone, "outputs", 300, base, card_only=only))
        for kind, options in kinds.items():
            case = f"engine/{name}-{kind}"
            cases.append(Case(case, "outputs", 300, {**base, **options}, (alone,), alone, only))
    return cases


def _comparison() -> list[Case]:
    cases = [
        Case(
            f"comparison/first-token-{tokens // 1024}k-{name}",
            "first_tokens",
            420,
            {"tokens": tokens, "scenario": name},
        )
        for tokens in (8192, 32768)
        for name in ("plain", "kvbm-host", "native-host", "kvbm-disk", "native-fs")
    ]
    alone = "comparison/gaps-alone"
    cases.append(Case(alone, "gaps", 300, {"beside": "vLLM alone"}))
    for name, beside, host_gb in (
        ("stores", "KVBM's stores", 8),
        ("locking", "32 GiB that are page-locked", LOCKED_GB),
    ):
        options = {"beside": beside, "kvbm": True, "host_gb": host_gb}
        cases.append(Case(f"comparison/gaps-{name}", "gaps", 300, options, (alone,), alone))
    return cases


def all_cases() -> list[Case]:
    """Every case, in the order in which they run."""
    return [*_check(), *_copies(), *_locking(), *_engine(), *_comparison()]
