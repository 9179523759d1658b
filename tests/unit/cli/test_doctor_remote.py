"""`kvbm doctor` and the remote store: what is tried, what each kind of trouble is called, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvbm.cli.doctor_check import Check
from kvbm.cli.doctor_remote import PREFIX, REQUEST_S, TRIAL_S, check_remote
from kvbm.clock import ManualClock
from kvbm.settings import Settings
from kvbm.tiers.remote.blobs import BlobInfo, Buffer, Put, StoreError, StoreTrouble
from kvbm.tiers.remote.collector import is_leftover
from rigs.faulty_blobs import MemoryBlobs

ON = Settings(remote="file:///somewhere")


class OddBlobs(MemoryBlobs):
    """A store of which some operations fail, and take a while."""

    def __init__(
        self, clock: ManualClock, troubles: dict[str, StoreTrouble] | None = None, takes_s: float = 0.0
    ):
        super().__init__(clock)
        self.manual, self.troubles, self.takes_s, self.calls = clock, troubles or {}, takes_s, 0
        self.notes: tuple[str, ...] = ("ignores ranges",)
        self.forgets = False

    def fail(self, what: str) -> None:
        self.calls += 1
        self.manual.advance(self.takes_s)
        if trouble := self.troubles.get(what):
            raise StoreError(trouble, f"memory://: {what}: the store says {trouble}")

    def put(self, name: str, parts: Sequence[Buffer]) -> Put:
        self.fail("put")
        return super().put(name, [b"other bytes"] if self.forgets else parts)

    def read(self, name: str, start: int, end: int) -> Buffer | None:
        self.fail("read")
        return super().read(name, start, end)

    def listing(self, prefix: str) -> Iterator[BlobInfo]:
        self.fail("list")
        return super().listing(prefix)

    def touch(self, name: str) -> None:
        self.fail("touch")
        super().touch(name)

    def delete(self, names: Sequence[str]) -> None:
        self.fail("delete")
        super().delete(names)


def checks(store: OddBlobs, settings: Settings = ON, wall_s: float = 0.0) -> dict[str, list[Check]]:
    """By name; the store's clock and the time of day differ by `wall_s`."""
    found: dict[str, list[Check]] = {}
    for check in check_remote(settings, lambda: store.manual() + wall_s, store.manual, store):
        found.setdefault(check.name, []).append(check)
    assert store.closed
    return found


def states(found: dict[str, list[Check]]) -> dict[str, list[str]]:
    return {name: [check.state for check in each] for name, each in found.items()}


def test_a_store_that_works_has_a_line_for_each_thing_and_is_left_as_it_was() -> None:
    store = OddBlobs(ManualClock(100.0), takes_s=0.01)
    store.blobs["theirs"] = b"x"
    found = checks(store)
    assert states(found) == {
        "remote store": ["ok"], "remote speed": ["ok"], "remote rights": ["ok"],
        "remote peculiarity": ["ok"], "remote clock": ["ok"],
    }  # fmt: skip
    assert found["remote peculiarity"][0].found == "the store ignores ranges"
    assert found["remote speed"][0].measured["latency_seconds"] == pytest.approx(0.01)
    assert store.blobs == {"theirs": b"x"}


def test_off_costs_nothing() -> None:
    (check,) = check_remote(Settings(), lambda: 0.0)
    assert (check.state, "DYN_KVBM_REMOTE turns it on" in check.found) == ("ok", True)


@pytest.mark.parametrize("trouble", ["unreachable", "slow"])
def test_a_store_that_is_away_is_one_fault(trouble: StoreTrouble) -> None:
    store = OddBlobs(ManualClock(100.0), dict.fromkeys(("put", "read", "list", "touch", "delete"), trouble))
    found = checks(store)
    assert states(found)["remote store"] == ["fault"]
    assert trouble in found["remote store"][0].found
    assert "remote speed" not in found


@pytest.mark.parametrize(
    ("refused", "settings", "states_of_rights"),
    [
        ("put", ON, ["fault"]),
        ("put", Settings(remote="file:///x", remote_write=False), ["ok"]),
        ("list", ON, ["fault"]),
        ("touch", ON, ["advice"]),
        ("delete", ON, ["advice"]),
        ("delete", Settings(remote="file:///x", remote_collect=False), ["ok"]),
    ],
)
def test_a_right_that_is_missing_is_named_and_weighed(
    refused: str, settings: Settings, states_of_rights: list[str]
) -> None:
    found = checks(OddBlobs(ManualClock(100.0), {refused: "refused"}), settings)
    assert states(found)["remote rights"] == states_of_rights
    word = {"put": "write"}.get(refused, refused)
    assert f"may not {word}" in found["remote rights"][0].found
    assert states(found)["remote store"] == ["ok"]


def test_a_store_that_gives_other_bytes_cannot_be_used() -> None:
    store = OddBlobs(ManualClock(100.0))
    store.forgets = True
    (check,) = checks(store)["remote store"]
    assert (check.state, "does not give back what was written" in check.found) == ("fault", True)


def test_it_takes_a_bounded_time() -> None:
    store = OddBlobs(ManualClock(100.0), takes_s=REQUEST_S)
    (check,) = checks(store)["remote store"]
    assert check.state == "advice"
    assert store.manual() - 100.0 <= TRIAL_S + 3 * REQUEST_S
    assert store.blobs == {}, "it is cleaned up all the same"


@pytest.mark.parametrize(("wall_s", "state"), [(0.0, "ok"), (-100.0, "advice"), (100.0, "advice")])
def test_clocks_that_differ(wall_s: float, state: str) -> None:
    (check,) = checks(OddBlobs(ManualClock(100.0)), wall_s=wall_s)["remote clock"]
    assert (check.state, check.measured["skew_seconds"]) == (state, pytest.approx(-wall_s))


def test_a_url_that_cannot_be_used_is_a_fault_without_its_password(tmp_path: Path) -> None:
    settings = Settings(remote="redis://user:very-secret@/x")
    (check,) = check_remote(settings, lambda: 0.0)
    assert check.state == "fault"
    assert "very-secret" not in check.found + check.remedy
    assert "DYN_KVBM_REMOTE" in check.remedy


def test_what_a_killed_trial_leaves_is_collected() -> None:
    assert is_leftover(f"{PREFIX}0123")
