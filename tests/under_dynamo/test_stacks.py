"""NVIDIA's Dynamo with KVBM in place of theirs, as the scripts of `deploy/launch` start it.

Every engine has one thread, so that all round alike; the texts of one worker without KVBM are the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvbm.events import consolidator
from rigs.dynamo import BLOCKS, Choice, Stack, Start, ask, counted, prompts
from rigs.manager_probe import wait_for
from rigs.services import etcd_and_nats

pytestmark = pytest.mark.timeout(600)

OTHERS = 16
"""Prompts between two of the same: two of them take a whole device, and there are two workers."""
ONE_SHORT = BLOCKS - 1
"""A router looks for one block less than there are, at the most."""


def loaded(stack: Stack, managers: int) -> int:
    """Blocks that came back from below the device, of all managers."""
    return counted(stack, "kvbm_onboard_blocks_h2d", managers)


def asked_again(stack: Stack, seed: int) -> tuple[set[str], Choice]:
    """A prompt, until the router knows where it is; so many others that no device holds it any more; and once more.
    Its texts, and what the router believed of it at last."""
    tokens, *others = prompts(seed, OTHERS + 1)
    texts = set[str]()

    def known() -> bool:
        texts.add(ask(stack, tokens))
        return stack.choices()[-1].overlap >= ONE_SHORT

    wait_for(known, 30.0, "the router does not hear of a prompt on the device")
    for other in others:
        ask(stack, other)
    texts.add(ask(stack, tokens))
    return texts, stack.choices()[-1]


@pytest.fixture(params=["dedup", "passthrough", "off"])
def events(request: pytest.FixtureRequest, start: Start) -> Iterator[tuple[str, Stack]]:
    """Two workers behind a router, with the consolidator in each of its modes and without it."""
    mode: dict[str, str] = {"DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE": request.param}
    if request.param == "off":
        mode = {"DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR": "false"}
    with start("agg_kvbm_router.sh", {"backend": 2}, **mode) as stack:
        yield request.param, stack


def test_a_router_follows_blocks_below_the_device(
    events: tuple[str, Stack], reference: dict[int, str]
) -> None:
    mode, stack = events
    texts, believed = asked_again(stack, seed=0)
    assert texts == {reference[0]}
    if mode == "dedup":
        assert believed.overlap >= ONE_SHORT, "one account: where the block lies makes no difference"
    else:
        assert believed.host >= ONE_SHORT
    assert loaded(stack, 2) >= ONE_SHORT
    if mode == "off":
        return
    children = consolidators()
    assert len(children) == 2
    for child in children:
        child.kill()
    killed = {child.pid for child in children}
    wait_for(
        lambda: len({each.pid for each in consolidators()} - killed) == 2,
        20.0,
        "the consolidators did not come back",
    )
    texts, believed = asked_again(stack, seed=1)
    assert texts == {reference[1]}
    assert max(believed.overlap, believed.host) >= ONE_SHORT


def consolidators() -> list[psutil.Process]:
    """Those that run below this process."""
    found = list[psutil.Process]()
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and consolidator.__name__ in process.cmdline():
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.parametrize(
    ("script", "workers", "managers"),
    [("disagg_kvbm.sh", 1, 1), ("disagg_kvbm_2p2d.sh", 2, 1)],
    ids=["1P1D", "2P2D"],
)
def test_prefill_and_decode_apart(
    start: Start, reference: dict[int, str], script: str, workers: int, managers: int
) -> None:
    """Decode workers keep what they computed, too: the next turn is found up to its last whole block."""
    count = {"backend": workers, "prefill": workers}
    with start(script, count, KVBM_ON_DECODE="1") as stack:
        tokens, *others = prompts(2, OTHERS + 1)
        texts = [ask(stack, tokens)]
        for other in others:
            ask(stack, other)
        before = loaded(stack, managers)
        texts.append(ask(stack, tokens))
        assert loaded(stack, managers) - before >= ONE_SHORT
    assert set(texts) == {reference[2]}


def test_with_etcd_and_nats(start: Start, reference: dict[int, str], tmp_path: Path) -> None:
    """Dynamo's own discovery, for those who have it; nothing of ours asks for it."""
    with (
        etcd_and_nats(tmp_path) as services,
        start("agg_kvbm_router.sh", {"backend": 2}, services) as stack,
    ):
        texts, believed = asked_again(stack, seed=3)
        assert texts == {reference[3]}
        assert max(believed.overlap, believed.host) >= ONE_SHORT
