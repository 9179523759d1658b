"""Several nodes at one store, on which anything may end at any time: servers, nodes, room, the clock's truth, and
blocks, by several collectors at once. What is found is right, and what is in use stays.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fault.remote_node import CHAIN_BLOCKS, LAYOUT, Engine, Node, chain, ended
from rigs.blob_services import ACCESS_KEY, REGION, SECRET_KEY, redis_server, seaweedfs
from rigs.manager_probe import free_port, wait_for
from rigs.system_packages import require

pytestmark = pytest.mark.slow

CHAINS = 8
LIVES = 2


def shared(directory: Path) -> str:
    """The URL of a new directory."""
    (directory / "shared").mkdir()
    return f"file://{directory}/shared"


def fill(node: Node, engine: Engine, chains: range) -> None:
    """Compute these chains, and wait until they are in the store."""
    before = int(node.metrics()["kvbm_offload_blocks_d2o"])
    for number in chains:
        assert engine.store(chain(number)) == CHAIN_BLOCKS
    node.wait_until_written(before + len(chains) * CHAIN_BLOCKS)


def comes(node: Node, engine: Engine, number: int) -> None:
    """Wait until a whole chain comes from the store."""
    wait_for(
        lambda: engine.look(chain(number)).ready == CHAIN_BLOCKS,
        30.0,
        lambda: f"chain {number} does not come: {node.describe()}\n{node.log()}",
    )


@pytest.mark.parametrize("loses", [False, True])
def test_a_store_that_is_killed_and_started_again(tmp_path: Path, loses: bool) -> None:
    """Where it lost all its blocks, they are computed and written once more."""
    pytest.importorskip("valkey")
    port = free_port()
    keeps = () if loses else ("--appendonly", "yes")
    url = f"redis://127.0.0.1:{port}/0"
    with ended([]) as nodes:
        with redis_server(tmp_path, *keeps, port=port):
            nodes += [Node(tmp_path, url), Node(tmp_path, url)]
            writes, reads = (node.engine() for node in nodes)
            fill(nodes[0], writes, range(CHAINS))
            nodes[1].wait_until_knows(CHAINS)
            comes(nodes[1], reads, 0)
        for turn in range(40):
            assert reads.look(chain(1 + turn % 2)).ready == 0
            if nodes[1].describe()["openings"]:
                break
        assert nodes[1].describe()["openings"]
        assert reads.look(chain(0)).ready == CHAIN_BLOCKS  # it is in host memory
        with redis_server(tmp_path, *keeps, port=port):
            nodes[1].wait_until(lambda tier: tier["reading"] == tier["writing"] == "closed", "it stays off")
            if loses:
                assert reads.look(chain(3)).ready == 0
                fill(nodes[1], reads, range(3, 4))
                nodes.append(Node(tmp_path, url))
                comes(nodes[2], nodes[2].engine(), 3)
            else:
                for number in range(CHAINS):
                    comes(nodes[1], reads, number)
            for node in nodes:
                node.assert_nothing_held()
        for node in nodes:
            node.kill()  # an orderly end would try to reach the store


@contextmanager
def small_disk(directory: Path, megabytes: int) -> Iterator[None]:
    """A file system of its own at that place; skips where it cannot be mounted."""
    words = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0700", "kvbm-test", str(directory)]
    if shutil.which("mount") is None or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here (root)")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def fill_up(path: Path) -> None:
    """Write until there is no room."""
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_disk_behind_the_store_that_is_full(tmp_path: Path) -> None:
    """What is there is read all the while; nothing is written until there is room again."""
    place = tmp_path / "mounted"
    place.mkdir()
    with small_disk(place, 4), ended([]) as nodes:
        url = shared(place)
        nodes += [Node(tmp_path, url), Node(tmp_path, url)]
        writes, reads = (node.engine() for node in nodes)
        fill(nodes[0], writes, range(CHAINS))
        nodes[1].wait_until_knows(CHAINS)
        nodes[1].wait_until(lambda tier: tier["written_bytes"] > 0, "the store is not measured")
        with pytest.raises(OSError, match="No space"):
            fill_up(place / "ballast")
        assert writes.store(chain(100)) == CHAIN_BLOCKS
        nodes[0].wait_until(lambda tier: tier["writing"] == "open", "it does not notice")
        assert "remote tier takes no stores (full)" in nodes[0].log()
        for number in range(CHAINS):
            assert reads.look(chain(number)).ready == CHAIN_BLOCKS
            assert writes.look(chain(number)).ready == CHAIN_BLOCKS
        assert nodes[0].describe()["reading"] == "closed"
        (place / "ballast").unlink()
        nodes[0].wait_until(lambda tier: tier["writing"] == "closed", "it does not notice that there is room")
        fill(nodes[0], writes, range(101, 103))
        comes(nodes[1], reads, 102)
        for node in nodes:
            node.assert_nothing_held()


def clock_off_by(seconds: int) -> dict[str, str]:
    """The environment of a process whose time of day is off; skips where that cannot be had."""
    words = [require("faketime"), "-f", f"{seconds:+d}s", "env"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    # faketime itself would stay above the program, and end before it.
    off = {word: line for word, _, line in (line.partition("=") for line in said.splitlines())}
    # What the store says of its files is not faked: it might be another machine.
    own = {"NO_FAKE_STAT": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKE_UTIME": "0"}
    environment = {"LD_PRELOAD": off["LD_PRELOAD"], "FAKETIME": off["FAKETIME"], **own}
    words = [sys.executable, "-c", "import time; print(time.time(), time.monotonic())"]
    told = subprocess.run(
        words, capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    wall_s, monotonic_s = map(float, told.stdout.split())
    assert abs(wall_s - time.time() - seconds) < 60 and abs(monotonic_s - time.monotonic()) < 60
    return environment


@pytest.mark.parametrize(
    ("kind", "hours"),
    [
        ("directory", 1),
        ("redis", -1),
        ("directory", -1),
        ("redis", 1),
    ],
)
def test_a_node_whose_clock_is_an_hour_off(tmp_path: Path, kind: str, hours: int) -> None:
    """It collects beside one whose clock is right, both with a time to live of ten minutes: nothing is lost."""
    off = clock_off_by(3600 * hours)
    options = {"ttl_s": 600.0, "collect_period_s": 0.05}
    with ExitStack() as stack:
        if kind == "redis":
            pytest.importorskip("valkey")
            url = f"redis://127.0.0.1:{stack.enter_context(redis_server(tmp_path)).port}/0"
        else:
            url = shared(tmp_path)
        nodes = stack.enter_context(ended([]))
        nodes.append(Node(tmp_path, url, options, environment=off, remote_collect=True))
        nodes.append(Node(tmp_path, url, options, remote_collect=True))
        engines = [node.engine() for node in nodes]
        fill(nodes[0], engines[0], range(CHAINS))
        fill(nodes[1], engines[1], range(CHAINS, 2 * CHAINS))
        for node in nodes:
            node.wait_until_knows(2 * CHAINS)
            node.wait_until(
                lambda tier: tier["collected"] and tier["collected"]["packs"], "it never collects"
            )
        for node in nodes:
            collected = node.describe()["collected"]
            assert collected["removed_packs"] == collected["removed_leftovers"] == 0
        comes(nodes[0], engines[0], CHAINS)
        comes(nodes[1], engines[1], 0)
        for node in nodes:
            node.assert_nothing_held()


@pytest.mark.parametrize("hours", [1, -1])
def test_s3_refuses_a_node_whose_clock_is_an_hour_off(tmp_path: Path, hours: int) -> None:
    """Requests are signed with the time. Its tier is off and says why; it computes, and others go on."""
    pytest.importorskip("obstore")
    off = clock_off_by(3600 * hours)
    with ExitStack() as stack:
        service = stack.enter_context(seaweedfs(tmp_path))
        service.make_bucket("kv-cache")
        url = f"s3://kv-cache/fleet?endpoint={service.endpoint}&region={REGION}"
        keys = {"object_access_key": ACCESS_KEY, "object_secret_key": SECRET_KEY, "remote_deadline_ms": 5000}
        nodes = stack.enter_context(ended([]))
        nodes.append(Node(tmp_path, url, environment=off, **keys))
        nodes.append(Node(tmp_path, url, host_blocks=CHAIN_BLOCKS + 2, **keys))
        wrong, right = [node.engine() for node in nodes]
        nodes[0].wait_until(lambda tier: "refused" in tier["fault"], "it does not notice")
        assert "RequestTimeTooSkewed" in nodes[0].describe()["fault"] + nodes[0].log()
        for number in range(2):  # its host memory holds one chain
            fill(nodes[1], right, range(number, number + 1))
        comes(nodes[1], right, 0)
        assert wrong.look(chain(0)).promised == 0
        assert wrong.store(chain(2)) == CHAIN_BLOCKS
        assert wrong.look(chain(2)).ready == CHAIN_BLOCKS, "host memory works"
        nodes[1].wait_until_knows(2)
        tier = nodes[0].describe()
        assert (tier["packs"], tier["written_bytes"], tier["read_bytes"]) == (0, 0, 0)
        for node in nodes:
            node.assert_nothing_held()


def test_two_collectors_at_once_leave_what_is_in_use(tmp_path: Path) -> None:
    """Chains that are read again and again stay; those that nobody asks for go."""
    ttl_s = 5.0
    options = {"ttl_s": ttl_s, "collect_period_s": 0.05}
    url = shared(tmp_path)
    with ended([]) as nodes:
        nodes += [Node(tmp_path, url, options, remote_collect=True) for _ in range(2)]
        # Its host memory holds one chain: each is read from the store again.
        nodes.append(Node(tmp_path, url, {"ttl_s": ttl_s}, host_blocks=CHAIN_BLOCKS + 2))
        writes, _, reads = [node.engine() for node in nodes]
        fill(nodes[0], writes, range(CHAINS))
        nodes[2].wait_until_knows(CHAINS)
        begun_s, used_s = time.monotonic(), {number: time.monotonic() for number in range(3)}
        late = False

        def used_for_long() -> bool:
            nonlocal late
            for number in used_s:
                found = reads.look(chain(number)).ready
                now_s = time.monotonic()
                # A machine that stands still for seconds cannot tell the store in time what it uses.
                late = late or now_s - used_s[number] > ttl_s / 5
                assert late or found == CHAIN_BLOCKS, (
                    f"chain {number} was in use, and is gone after {now_s - begun_s:.1f} s"
                )
                used_s[number] = now_s
            return time.monotonic() > begun_s + 2 * ttl_s

        wait_for(used_for_long, 60.0, "time stands still")
        assert nodes[2].describe()["touched"] > 0
        left = {path.name for path in (tmp_path / "shared").glob("*/packs/*/*")}
        assert len(left) < CHAINS, "nothing was collected"
        if not late:
            assert nodes[2].describe()["read_bytes"] > 10 * len(used_s) * CHAIN_BLOCKS * LAYOUT.block_bytes
        for number in range(3, CHAINS):
            assert reads.look(chain(number)).ready == 0
        nodes[2].assert_nothing_held()


@pytest.mark.parametrize("seed", range(1, 6))
def test_nodes_that_are_killed_while_they_write(tmp_path: Path, seed: int) -> None:
    """kill -9 at any moment; another node reads their packs meanwhile and afterwards. Each block is right, or missing,
    and what had been written is there."""
    chance, url, number = random.Random(seed), shared(tmp_path), 0
    with ended([Node(tmp_path, url, host_blocks=512)]) as nodes:
        reads = nodes[0].engine()
        for life in range(LIVES):
            victim = Node(tmp_path, url, host_blocks=512)
            engine, first = victim.engine(), number
            fill(victim, engine, range(number, number + 2))
            number += 2
            for _ in range(chance.randint(4, 30)):
                assert engine.store(chain(number)) == CHAIN_BLOCKS
                number += 1
                reads.look(chain(chance.randrange(number)))
            victim.kill()
            for each in range(number):
                reads.look(chain(each))
            fresh = Node(tmp_path, url)
            seen = fresh.engine()
            for each in (first, first + 1):
                comes(fresh, seen, each)
            whole = sum(seen.look(chain(each)).ready == CHAIN_BLOCKS for each in range(number))
            assert whole >= 2 * (life + 1), f"seed {seed}"
            fresh.close()
        nodes[0].assert_nothing_held()
        sizes = [path.stat().st_size for path in (tmp_path / "shared").glob("*/packs/*/[0-9a-f]*")]
        assert sizes and min(sizes) > CHAIN_BLOCKS * LAYOUT.block_bytes, "a pack is not whole"


def test_a_node_that_is_killed_before_it_told_of_its_pack(tmp_path: Path) -> None:
    """Nodes that are there already do not find the pack until one of them computes it once more; a new one does."""
    url = shared(tmp_path)
    with ended([]) as nodes:
        nodes.append(Node(tmp_path, url))
        control = nodes[0].engine()
        nodes[0].wait_until(lambda tier: tier["complete"], "it has not listed all packs")
        victim = Node(tmp_path, url, {"tells_nobody": True})
        try:
            assert victim.engine().store(chain(0)) == CHAIN_BLOCKS
            victim.wait_killed()
        finally:
            victim.kill()
        assert len(list((tmp_path / "shared").glob("*/packs/*/*"))) == 1
        assert not [path for path in (tmp_path / "shared").glob("*/log/*/*") if path.is_file()]
        nodes.append(Node(tmp_path, url))
        reads = nodes[1].engine()
        nodes[1].wait_until_knows(1)
        assert reads.look(chain(0)).ready == CHAIN_BLOCKS
        assert control.look(chain(0)).ready == 0
        # Whoever computes it once more finds it there, and tells of it.
        assert control.store(chain(0)) == CHAIN_BLOCKS
        nodes[0].wait_until_knows(1)
        wait_for(lambda: any((tmp_path / "shared").glob("*/log/*/*")), 30.0, nodes[0].log)
