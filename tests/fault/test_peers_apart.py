"""A lender in another network namespace, as on another machine: its link goes down and comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.block import Outcome
from kvbm.fleet.directory import Peer
from rigs.manager_probe import wait_for
from rigs.movers import needs_nixl, nixl_mover
from rigs.peers import Loads, content, keys_of, knows, open_tier, wait_until
from rigs.system_packages import require

KEYS = keys_of(8)
CHILD = Path(__file__).with_name("peer_child.py")


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)


class Apart:
    """A namespace, and a cable to it: 10.x.y.1 here, .2 there."""

    def __init__(self) -> None:
        number = os.getpid()
        self.name, self.ours, self.theirs = f"kvbm-{number}", f"kva{number}"[:15], f"kvb{number}"[:15]
        self.net = f"10.{200 + number % 50}.{number // 50 % 250}"

    def begin(self) -> None:
        ip("netns", "add", self.name)
        ip("link", "add", self.ours, "type", "veth", "peer", "name", self.theirs, "netns", self.name)
        ip("addr", "add", f"{self.net}.1/24", "dev", self.ours)
        ip("link", "set", self.ours, "up")
        ip("-n", self.name, "addr", "add", f"{self.net}.2/24", "dev", self.theirs)
        ip("-n", self.name, "link", "set", self.theirs, "up")
        ip("-n", self.name, "link", "set", "lo", "up")

    def cable(self, state: str) -> None:
        ip("link", "set", self.ours, state)

    def end(self) -> None:
        ip("link", "del", self.ours, check=False)
        ip("netns", "del", self.name, check=False)


@pytest.fixture
def apart() -> Iterator[Apart]:
    require("ip")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    both = Apart()
    try:
        both.begin()
    except subprocess.CalledProcessError as error:
        both.end()
        pytest.skip(f"no network namespace can be had: {error.stderr.strip()}")
    yield both
    both.end()


@pytest.mark.parametrize("transport", ["tcp", pytest.param("nixl", marks=[needs_nixl, pytest.mark.slow])])
def test_the_link_goes_down_in_mid_read(
    apart: Apart, tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbm.layout import BlockLayout

    by_nixl = transport == "nixl"
    monkeypatch.setenv(
        "UCX_TLS", "tcp"
    )  # else it goes through this machine's memory, and no cable can be cut
    mover = nixl_mover() if by_nixl else None
    big = BlockLayout(block_tokens=4, shard_bytes=4 << 20)
    told = tmp_path / "port"
    words = ["ip", "netns", "exec", apart.name, sys.executable, str(CHILD), f"{apart.net}.2", "0", str(told)]
    words += ["nixl"] if by_nixl else []
    child = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        wait_for(told.exists, 30.0, lambda: "the child does not start")
        tier = open_tier([Peer(f"{apart.net}.2:{told.read_text()}")], layout=big, deadline_s=3.0, mover=mover)
        loads = Loads(tier, big)
        try:
            wait_until(lambda: knows(tier, KEYS), "the other namespace's blocks")
            completion, targets = loads.load(KEYS)
            assert completion.outcome is Outcome.HIT
            assert targets.block(7) == content(KEYS[7], big)

            def comes_so() -> bool:
                tier.tick()
                loads.load(KEYS)
                return tier.describe()["links"] == {transport: 1}

            wait_until(comes_so)
            begun = [loads.begin(KEYS) for _ in range(12)]
            loads.wait_any()
            apart.cable("down")
            ended = [loads.wait(job) for job, _ in begun]
            assert all(each.outcome in (Outcome.HIT, Outcome.RETRY) for each in ended)
            assert any(each.outcome is Outcome.RETRY for each in ended), "the cable was cut in time"
            for (_, targets), completion in zip(begun, ended, strict=True):
                for index, end in enumerate(completion.blocks):
                    if end.outcome is Outcome.HIT:
                        assert targets.block(index) == content(KEYS[index], big)
            wait_until(lambda: not any(tier.held_elsewhere(KEYS)))
            apart.cable("up")
            wait_until(lambda: knows(tier, KEYS), "it comes back by itself")
            assert loads.load(KEYS)[0].outcome is Outcome.HIT
            wait_until(comes_so)
        finally:
            tier.close()
    finally:
        child.kill()
        child.wait()
        if mover is not None:
            mover.close()
