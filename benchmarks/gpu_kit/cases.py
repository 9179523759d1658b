"""What is proven, in order. A case is one process with a limit of its own; a step is the cases of one idea."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

STEPS = ("check", "parts", "outputs", "failures", "ttft", "latency")
MLA_ON_A_CPU = "vLLM caches no prefixes of MLA models on a CPU without AMX"


@dataclass(frozen=True)
class Case:
    """One case: what runs (`module` of this package, its `measure`), how long at most, and with which options.

    `needs` are cases that must have been right. `reference` is the case whose answers it is compared with.
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
    return [
        Case("check/machine", "probes", 60, {"probe": "machine"}, needs=()),
        Case("check/libraries", "probes", 120, {"probe": "libraries"}, needs=()),
        Case("check/import", "probes", 180, {"probe": "imports"}, needs=("check/machine", "check/libraries")),
        Case("check/alone", "outputs", 240, {"how": "fp32", "waves": 1}),
    ]


HOWS = ("fp32", "graphs")
"""fp32 is exact up to the last bits; `graphs` is how a card serves: bf16, full graphs, batch-invariant."""
SHAPES = ("llama", "moe", "mla", "fp8")


def _outputs() -> list[Case]:
    cases: list[Case] = []
    for how in HOWS:
        alone = f"outputs/{how}-alone"
        cases.append(Case(alone, "outputs", 240, {"how": how}))
        for kind, more in (
            ("eager", {}),
            ("lazy", {"lazy": True}),
            ("disk", {"disk": True}),
            # Without it equal answers would prove nothing.
            ("damaged", {"fault": "damage"}),
        ):
            options = {"how": how, "kvbm": True, **more}
            cases.append(
                Case(f"outputs/{how}-{kind}", "outputs", 240, options, needs=(alone,), reference=alone)
            )
    for shape in SHAPES:
        alone = f"outputs/{shape}-alone"
        base = {"how": "graphs", "shape": shape}
        only = MLA_ON_A_CPU if shape == "mla" else ""
        cases.append(Case(alone, "outputs", 300, base, card_only=only))
        for kind, more in (("eager", {}), ("damaged", {"fault": "damage"})):
            options = {**base, "kvbm": True, **more}
            name = f"outputs/{shape}-{kind}"
            cases.append(Case(name, "outputs", 300, options, (alone,), alone, only))
    return cases


def _failures() -> list[Case]:
    cases: list[Case] = []
    for how in HOWS:
        alone = f"outputs/{how}-alone"
        for every in (1, 2):
            options = {"how": how, "kvbm": True, "fault": "fail", "every": every}
            name = f"failures/{how}-every-{every}"
            cases.append(Case(name, "outputs", 240, options, needs=(alone,), reference=alone))
        options = {"how": how, "kvbm": True, "fault": "fail", "every": 3, "policy": "fail"}
        cases.append(
            Case(f"failures/{how}-policy-fail", "outputs", 240, options, needs=(alone,), reference=alone)
        )
    return cases


def _first_tokens() -> list[Case]:
    return [
        Case(f"ttft/{tokens // 1024}k-{name}", "first_tokens", 420, {"tokens": tokens, "scenario": name})
        for tokens in (8192, 32768)
        for name in ("plain", "kvbm-host", "native-host", "kvbm-disk", "native-fs")
    ]


LOCKED_GB = 34.36
"""32 GiB."""


def _latency() -> list[Case]:
    return [
        Case("latency/alone", "latency", 300, {}),
        Case("latency/stores", "latency", 300, {"kvbm": True, "host_gb": 8}, reference="latency/alone"),
        Case(
            "latency/lazy",
            "latency",
            300,
            {"kvbm": True, "host_gb": 8, "lazy": True},
            reference="latency/alone",
        ),
        Case(
            "latency/locking", "latency", 300, {"kvbm": True, "host_gb": LOCKED_GB}, reference="latency/alone"
        ),
    ]


def all_cases() -> list[Case]:
    """Every case, in the order in which they run."""
    parts = Case("parts/without-an-engine", "probes", 500, {"probe": "parts"}, needs=())
    return [*_check(), parts, *_outputs(), *_failures(), *_first_tokens(), *_latency()]
