"""The controller's verbs: the requests of the original's client, answered from a manager's description."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvbm.admin_protocol import Description, SpaceReport, TierReport
from kvbm.dynamo_runtime.verbs import answer
from kvbm.errors import ManagerUnavailable
from kvbm.protocol import ResetReply


def tier(name: str, **counts: int) -> TierReport:
    return TierReport(
        tier=name, **{"blocks": 10, "free": 4, "filling": 1, "resident": 5, "leased": 2} | counts
    )


def description(*tiers: TierReport) -> Description:
    """A manager with one namespace that has these tiers."""
    space = SpaceReport(
        namespace="n", fingerprint="f", model="m", fields=(), ephemeral=False, staging=False, block_tokens=16,
        block_bytes=1, tiers=tiers, fault="", onboard_blocks=0, offload_blocks=0, leases=0, reservations=0,
    )  # fmt: skip
    return Description(
        version="1", pid=1, epoch=1, uptime_s=0, spaces=(space, space), engines=(), asked_blocks=0, hit_blocks={},
        sessions=0, fences=0, refused=0,
    )  # fmt: skip


class Manager:
    """Has host memory and disk; `in_use` blocks stay at a reset."""

    def __init__(self, in_use: int = 0) -> None:
        self.reset_tiers = list[str]()
        self._in_use = in_use

    def ask(self, request: object) -> dict[str, Any]:
        told = answer(request, lambda: description(tier("host"), tier("disk", leased=0, free=9)), self._reset)
        msgspec.json.encode(told)
        return told

    def _reset(self, name: str) -> ResetReply:
        self.reset_tiers.append(name)
        return ResetReply(dropped=3, in_use=self._in_use)


def test_status_counts_a_tier_of_all_namespaces() -> None:
    assert Manager().ask({"Status": "G2"}) == {"active_blocks": 6, "inactive_blocks": 6, "empty_blocks": 8}
    assert Manager().ask({"Status": "G3"}) == {"active_blocks": 2, "inactive_blocks": 10, "empty_blocks": 18}


@pytest.mark.parametrize(
    ("request_", "name", "verb"),
    [
        ({"ResetPool": "G2"}, "host", "ResetPool"),
        ({"ResetPool": "G3"}, "disk", "ResetPool"),
        ("ResetAll", "", "ResetAll"),
    ],
)
def test_resets(request_: object, name: str, verb: str) -> None:
    manager = Manager()
    assert manager.ask(request_) == {verb: None}
    assert manager.reset_tiers == [name]
    assert Manager(in_use=12).ask(request_) == {verb: "12 blocks stay because they are in use"}


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"Status": "G1"}, "the engine's"),
        ({"Status": "G4"}, "'G4' is no tier; accepted are G2"),
        ({"Status": ["G2"]}, "is no tier"),
        ({"ResetBlocks": {"cache_level": "G2", "sequence_hashes": [1]}}, "ResetPool drops all"),
        ({}, "is no request; accepted are"),
        (None, "is no request; accepted are"),
        ({"Drop": "G2"}, "is no request; accepted are"),
        ([1], "is no request; accepted are"),
    ],
)
def test_what_has_no_meaning_gets_a_line(request_: object, said: str) -> None:
    manager = Manager()
    told = manager.ask(request_)
    assert list(told) == ["Error"] and said in told["Error"] and "\n" not in told["Error"]
    assert not manager.reset_tiers


def test_a_tier_that_is_not_there_is_named() -> None:
    told = answer(
        {"ResetPool": "G3"}, lambda: description(tier("host")), lambda _: pytest.fail("nothing to reset")
    )
    assert told == {"ResetPool": "this manager has no G3"}


def test_a_manager_that_has_gone_is_an_answer() -> None:
    def gone(*_: object) -> Any:
        raise ManagerUnavailable("nobody listens")

    assert answer("ResetAll", gone, gone) == {"ResetAll": "nobody listens"}
    assert answer({"Status": "G2"}, gone, gone) == {"Error": "nobody listens"}
