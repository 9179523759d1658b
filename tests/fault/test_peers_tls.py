"""Who reads from whom, with certificates: the fleet's own, expired, another authority's, another fleet's, none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.block import Outcome
from kvbm.fleet.directory import Peer
from kvbm.fleet.tls import lending_context, node_files, reading_context
from rigs.certificates import make_node
from rigs.peers import FLEET, LendingNode, Loads, content, keys_of, knows, open_tier, wait_until

KEYS = keys_of(6)
DAY_S = 86400.0


@pytest.fixture
def good(tmp_path: Path) -> Path:
    for node in ("lender", "reader"):
        make_node(tmp_path / "good", node, 30, FLEET)
    return tmp_path / "good"


@pytest.fixture
def lender(good: Path) -> Iterator[LendingNode]:
    node = LendingNode(tls=lending_context(node_files(good, "lender")))
    node.store(KEYS)
    yield node
    node.close()


def trouble(tier) -> str:
    (peer,) = tier.describe()["peers"]
    return peer["trouble"]


def never_in(lender: LendingNode, tier) -> str:
    """The line, when it has been refused."""
    wait_until(lambda: lender.server.counts["refused"] and "not connected" not in trouble(tier))
    assert not any(tier.held_elsewhere(KEYS))
    assert lender.server.counts["readers"] == 0
    return trouble(tier)


def test_both_ends_of_one_fleet(lender: LendingNode, good: Path) -> None:
    tier = open_tier([lender.peer], tls=reading_context(node_files(good, "reader")))
    try:
        wait_until(lambda: knows(tier, KEYS), trouble(tier))
        completion, targets = Loads(tier).load(KEYS)
        assert completion.outcome is Outcome.HIT
        assert targets.block(5) == content(KEYS[5])
    finally:
        tier.close()


def test_a_certificate_with_half_a_day_left(lender: LendingNode, good: Path) -> None:
    make_node(good, "late", 1, FLEET, now_s=time.time() - 0.5 * DAY_S)
    tier = open_tier([lender.peer], tls=reading_context(node_files(good, "late")), node="late")
    try:
        wait_until(lambda: knows(tier, KEYS), trouble(tier))
    finally:
        tier.close()


def test_an_expired_certificate(tmp_path: Path) -> None:
    past_s = time.time() - 5 * DAY_S
    for node in ("lender", "reader"):
        make_node(tmp_path, node, 1, FLEET, now_s=past_s)
    make_node(tmp_path, "lender", 30, FLEET)
    lender = LendingNode(tls=lending_context(node_files(tmp_path, "lender")))
    tier = open_tier([lender.peer], tls=reading_context(node_files(tmp_path, "reader")))
    try:
        assert "expired" in never_in(lender, tier).lower()
    finally:
        tier.close()
        lender.close()


def test_a_reader_of_another_authority(lender: LendingNode, good: Path, tmp_path: Path) -> None:
    make_node(tmp_path / "bad", "reader", 30, FLEET)
    foreign = node_files(tmp_path / "bad", "reader")._replace(authority=good / "ca.pem")
    tier = open_tier([lender.peer], tls=reading_context(foreign))
    try:
        assert "unknown" in never_in(lender, tier).lower()
    finally:
        tier.close()


def test_a_lender_of_another_authority(lender: LendingNode, tmp_path: Path) -> None:
    make_node(tmp_path / "bad", "reader", 30, FLEET)
    tier = open_tier([lender.peer], tls=reading_context(node_files(tmp_path / "bad", "reader")))
    try:
        assert "certificate verify failed" in never_in(lender, tier)
    finally:
        tier.close()


def test_a_certificate_that_names_another_fleet(lender: LendingNode, good: Path) -> None:
    """Of the right authority, as if one authority served two fleets."""
    tier = open_tier([lender.peer], tls=reading_context(node_files(good, "reader")), fleet="other")
    try:
        wait_until(lambda: "of the fleet 'test-fleet'; ours is 'other'" in trouble(tier))
        assert lender.server.counts["readers"] == 0
    finally:
        tier.close()


def test_a_reader_that_calls_itself_otherwise(lender: LendingNode, good: Path) -> None:
    tier = open_tier([lender.peer], tls=reading_context(node_files(good, "reader")), node="somebody-else")
    try:
        wait_until(lambda: "certificate is of node 'reader', not of 'somebody-else'" in trouble(tier))
    finally:
        tier.close()


def test_an_address_at_which_another_node_answers(lender: LendingNode, good: Path) -> None:
    tier = open_tier([Peer(lender.address, "expected")], tls=reading_context(node_files(good, "reader")))
    try:
        wait_until(lambda: "it is lender, and expected is expected" in trouble(tier))
    finally:
        tier.close()


def test_a_plain_reader_at_a_door_with_tls(lender: LendingNode) -> None:
    tier = open_tier([lender.peer])
    try:
        never_in(lender, tier)
    finally:
        tier.close()
