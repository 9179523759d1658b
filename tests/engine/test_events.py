"""What a router learns of an engine's host memory and disk, from vLLM's own event stream and from the manager's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import reach
from engine.engine_child import BLOCK_TOKENS
from engine.kv_subscriber import Subscriber
from engine.launcher import Launcher
from engine.tier_settings import disk, host
from engine.vllm_versions import VERSION
from engine.workload import Request, again, workload
from rigs.indexer import Indexer
from rigs.manager_probe import wait_for

pytestmark = pytest.mark.skipif(VERSION < (0, 29), reason="this vLLM's block hashes differ in every process")

SMALL_HOST_BLOCKS = 120
PROMPT = tuple(range(100, 100 + 5 * BLOCK_TOKENS + 3))


@pytest.fixture
def subscriber() -> Iterator[Subscriber]:
    with tempfile.TemporaryDirectory() as directory:  # the path of a socket must be short
        made = Subscriber(Path(directory))
        yield made
        made.close()


def resident(launcher: Launcher, tier: str) -> int:
    return int(launcher.metrics()[f'kvbm_pool_blocks{{tier="{tier}",state="resident"}}'])


def believed_as_it_is(launcher: Launcher, subscriber: Subscriber) -> bool:
    """Both tiers hold as many blocks as the router believes. Events leave with a step: a request without a block of
    its own makes some."""
    launcher.process.run([Request("nudge", (1, 2, 3), 2)])
    subscriber.hear()
    believed = {medium: len(names) for medium, names in subscriber.held.items()}
    return all(
        believed.get(medium, 0) == resident(launcher, tier)
        for medium, tier in (("CPU", "host"), ("STORAGE", "disk"))
    )


def test_a_router_believes_what_the_tiers_hold(
    launcher: Launcher, subscriber: Subscriber, tmp_path: Path
) -> None:
    """Host memory evicts, the device evicts far more; then the engine and its manager are restarted over the disk."""
    settings = disk(tmp_path, SMALL_HOST_BLOCKS)
    engine = launcher.start(settings, kv_events_config=subscriber.config)
    for turn in ("", "+"):
        engine.run(again(workload(), turn))
        subscriber.hear()
    wait_for(lambda: believed_as_it_is(launcher, subscriber), 20.0, lambda: f"{subscriber.held.keys()}")
    assert subscriber.twice == []
    assert len(subscriber.held["CPU"]) > 100
    assert len(subscriber.held["STORAGE"]) > 200
    on_device = subscriber.held.get("GPU", set())
    below = subscriber.held["CPU"] | subscriber.held["STORAGE"]
    assert len(below - on_device) > 100, "most were evicted from the device"
    for medium in (
        "CPU",
        "STORAGE",
    ):  # every chain that a router follows begins at a block without one before it
        for name in subscriber.held[medium]:
            before, tokens = subscriber.blocks[name]
            assert before is None or before in subscriber.blocks
            assert len(tokens) == BLOCK_TOKENS

    assert engine.call(reach.reset, connector=False, timeout_s=20.0)
    wait_for(lambda: believed_as_it_is(launcher, subscriber), 20.0, "not told again after the device's reset")
    assert not subscriber.held.get("GPU")

    on_disk = set(subscriber.held["STORAGE"])
    launcher.stop()
    subscriber.engine_gone()
    launcher.start(settings, kv_events_config=subscriber.config)
    wait_for(
        lambda: believed_as_it_is(launcher, subscriber) and subscriber.held.get("STORAGE", set()) >= on_disk,
        20.0,
        "not told again after the restart",
    )
    assert subscriber.twice == []


def test_a_manager_publishes_for_engines_that_do_not(launcher: Launcher) -> None:
    """The engine has no events of its own; the manager's say which blocks of its prompt are held."""
    with tempfile.TemporaryDirectory() as directory:  # the path of a socket must be short
        indexer = Indexer(f"ipc://{directory}/e")
        settings = {**host(), "DYN_KVBM_EVENTS_ENDPOINT": f"ipc://{directory}/e"}
        launcher.start(settings).run([Request("one", PROMPT, 2)])
        chain: list[tuple[int, ...]] = []
        while len(chain) < 5:
            assert indexer.hear() is not None, chain
            following = {before: (name, tokens) for name, (before, tokens) in indexer.blocks.items()}
            chain, before = [], None
            while before in following:
                before, tokens = following[before]
                chain.append(tokens)
        assert chain == [
            PROMPT[start : start + BLOCK_TOKENS] for start in range(0, len(PROMPT) - 3, BLOCK_TOKENS)
        ]
        (held,) = indexer.held.values()
        assert held == {("CPU", name) for name in indexer.blocks}
        indexer.close()
