"""Prefill and decode apart: the answers are those of one engine that computes all, whatever dies in between.

The engines have one thread each, so that both round alike.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.conftest import ProcessOf
from engine.handover import (
    NIXL,
    RECOMPUTE,
    abandon,
    alone,
    answered,
    both,
    decode,
    forget,
    needs_nixl,
    prefill,
)
from engine.launcher import Launcher
from engine.model_runners import chosen
from engine.patience import wait_for_every_hit, wait_for_every_store
from engine.workload import BLOCK_TOKENS
from rigs.manager_probe import SharedManager, free_port, private_managers, scrape, wait_for

pytestmark = [needs_nixl, pytest.mark.timeout(300)]

PROMPTS, PROMPT_TOKENS = 4, 100
LOADED = "kvbm_onboard_blocks_h2d"
_sockets = itertools.count()


def prompts(seed: int, count: int = PROMPTS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 400) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


class Form(NamedTuple):
    """How a pair is joined: with a private manager behind the prefill engine, or one that both share."""

    connector: str
    shared: bool


class Pair:
    """A prefill engine with a cache, and a decode engine, which has the same one where it is shared. `launchers` gives
    each engine's process, a new one where it was killed."""

    def __init__(
        self, launchers: Callable[[str], Launcher], form: Form, manager: SharedManager | None
    ) -> None:
        self._launchers, self._form = launchers, form
        self.manager = manager
        self.start_prefiller()
        self.start_decoder()

    def start_prefiller(self) -> None:
        self._first = self._launchers("engine")
        self.prefiller = self._first.start(self._environment(), both(self._form.connector))

    def start_decoder(self) -> None:
        transfer = both(self._form.connector) if self._form.shared else NIXL | RECOMPUTE
        self.decoder = self._launchers("second").start(self._environment(), transfer)

    def stop(self) -> None:
        for process in (self.prefiller, self.decoder):
            if process.alive:
                process.stop()

    def _environment(self) -> dict[str, str]:
        return {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            **(
                {"DYN_KVBM_MANAGER": self.manager.socket_path}
                if self.manager is not None
                else {"DYN_KVBM_CPU_CACHE_GB": "0.05"}
            ),
        }

    def loaded(self) -> float:
        """Blocks that the manager gave back."""
        port = self.manager.metrics_port if self.manager is not None else self._first.metrics_port
        return scrape(port)[LOADED]

    def kill_manager(self) -> None:
        """As a crash does."""
        if self.manager is not None:
            self.manager.kill()
            return
        (number,) = private_managers(self._first.runtime_dir)
        os.kill(number, signal.SIGKILL)
        wait_for(lambda: number not in private_managers(self._first.runtime_dir), 10.0, "it lives on")


FORMS = (
    Form("PdConnector", shared=False),
    Form("MultiConnector", shared=True),
)


@pytest.fixture(params=FORMS, ids=lambda form: form.connector)
def pair(
    request: pytest.FixtureRequest, process_of: ProcessOf, model: Path, runtime_dir: Path, tmp_path: Path
) -> Iterator[Pair]:
    form: Form = request.param

    def launchers(name: str) -> Launcher:
        return Launcher(process_of(f"{name}-{chosen()}", chosen()), model, runtime_dir)

    with ExitStack() as ends:
        manager = None
        if form.shared:
            socket = str(runtime_dir / f"shared-{next(_sockets)}.sock")
            manager = SharedManager(tmp_path, socket, "--host-memory", "50MB")
            ends.callback(manager.close)
        pair = Pair(launchers, form, manager)
        ends.callback(pair.stop)
        yield pair


def test_answers_are_those_of_one_engine_and_the_second_round_is_loaded(pair: Pair) -> None:
    pair.prefiller.call(wait_for_every_store, timeout_s=20.0)
    pair.prefiller.call(wait_for_every_hit, timeout_s=20.0)
    asked = prompts(1)
    reference = [alone(pair.decoder, tokens) for tokens in asked]
    assert len({tuple(answer) for answer in reference}) == PROMPTS
    assert [answered(pair.prefiller, pair.decoder, tokens) for tokens in asked] == reference
    forget(pair.prefiller)
    forget(pair.decoder)
    before = pair.loaded()
    assert [answered(pair.prefiller, pair.decoder, tokens) for tokens in asked] == reference
    assert pair.loaded() - before >= PROMPTS * (PROMPT_TOKENS // BLOCK_TOKENS)


@pytest.mark.parametrize("pair", FORMS[1:], indirect=True, ids=["MultiConnector"])
def test_the_next_turn_finds_what_the_decode_engine_computed(pair: Pair) -> None:
    tokens, more = prompts(2, 2)
    count = 3 * BLOCK_TOKENS
    longer = tokens + decode(pair.decoder, tokens, prefill(pair.prefiller, tokens), count) + more[:40]
    forget(pair.prefiller)
    forget(pair.decoder)
    before = pair.loaded()
    where = prefill(pair.prefiller, longer)
    # The last token's KV was never computed.
    assert pair.loaded() - before == (PROMPT_TOKENS + count - 1) // BLOCK_TOKENS
    assert decode(pair.decoder, longer, where) == alone(pair.decoder, longer)


def test_a_request_that_ends_between_the_two_harms_nobody(pair: Pair) -> None:
    left, *asked = prompts(3)
    prefill(pair.prefiller, left)
    texts = [answered(pair.prefiller, pair.decoder, tokens) for tokens in asked]
    assert texts == [alone(pair.decoder, tokens) for tokens in asked]


def test_a_request_that_is_aborted_while_its_kv_is_under_way_harms_nobody(pair: Pair) -> None:
    left, *asked = prompts(9)
    abandon(pair.decoder, left, prefill(pair.prefiller, left))
    texts = [answered(pair.prefiller, pair.decoder, tokens) for tokens in (*asked, left)]
    assert texts == [alone(pair.decoder, tokens) for tokens in (*asked, left)]
    forget(pair.prefiller)
    forget(pair.decoder)  # nothing stays in use


def test_a_killed_manager_costs_hits_alone(pair: Pair) -> None:
    asked = prompts(4)
    reference = [alone(pair.decoder, tokens) for tokens in asked]
    assert [answered(pair.prefiller, pair.decoder, tokens) for tokens in asked] == reference
    pair.kill_manager()
    forget(pair.prefiller)
    forget(pair.decoder)
    assert [answered(pair.prefiller, pair.decoder, tokens) for tokens in asked] == reference


def test_kv_whose_place_cannot_be_reached_is_computed(pair: Pair) -> None:
    """NIXL fails: nobody listens where the prefill engine is said to be."""
    for number, tokens in enumerate(prompts(5, 2)):
        where = prefill(pair.prefiller, tokens)
        where |= {"remote_port": free_port(), "remote_engine_id": f"nobody-{number}"}
        assert decode(pair.decoder, tokens, where) == alone(pair.decoder, tokens)


def test_kv_of_an_engine_that_was_killed_is_computed(pair: Pair) -> None:
    """The prefill engine is killed when one answer's KV was fetched and others' was not; a new one takes its place."""
    asked = prompts(6)
    assert answered(pair.prefiller, pair.decoder, asked[0]) == alone(pair.decoder, asked[0])
    places = [prefill(pair.prefiller, tokens) for tokens in asked[1:]]
    pair.prefiller.kill()
    for tokens, where in zip(asked[1:], places, strict=True):
        assert decode(pair.decoder, tokens, where) == alone(pair.decoder, tokens)
    pair.start_prefiller()
    assert answered(pair.prefiller, pair.decoder, asked[0]) == alone(pair.decoder, asked[0])


def test_a_decode_engine_that_is_killed_is_replaced(pair: Pair) -> None:
    asked = prompts(7)
    prefill(pair.prefiller, asked[0])
    pair.decoder.kill()
    pair.start_decoder()
    answers = [answered(pair.prefiller, pair.decoder, tokens) for tokens in asked]
    assert answers == [alone(pair.decoder, tokens) for tokens in asked]
