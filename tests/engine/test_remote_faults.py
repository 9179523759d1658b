"""A store on bad days below a real engine: the texts are those of an engine without a cache, and no request hangs.

And what must never be found in a store: blocks of another tenant, of other weights, or of other rotary factors.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import reach
from engine.launcher import Launcher, differences
from engine.longrope import ORIGINAL_POSITIONS, make_longrope_model
from engine.shared_store import BLOCK_TOKENS, FOUND, LOADED, bucket, found, prompts, share, texts
from engine.tier_settings import TINY_HOST_BLOCKS, remote
from engine.workload import Request, again, random_tokens, workload
from rigs.bad_proxy import BadProxy, Fault
from rigs.blob_services import moto
from rigs.manager_probe import wait_for

FAULTS = {
    "stalled": Fault("stall"),
    "500": Fault("status", status=500),
    "flipped bits": Fault("flip"),
    "cut short": Fault("short"),
    "refused": Fault("refuse"),
}
ASKED_EACH = 6
NOTHING = {"requests": 0, "lookups": 0, "stores": 0}
SPARES = 240
SPARES_AT_ONCE = 40
CORRUPT = 'kvbm_failures_total{tier="remote",kind="corrupt"}'


def spares() -> list[Request]:
    """Prompts with one complete block, each of which says once whether the store is asked again."""
    source = random.Random(99)
    length = BLOCK_TOKENS + 5
    return [Request(f"spare-{i}", random_tokens(source, length), 1) for i in range(SPARES)]


def part(answers: Mapping[str, list[int]], asked: list[Request]) -> dict[str, list[int]]:
    return {request.name: answers[request.name] for request in asked}


def test_texts_are_the_same_whatever_the_store_does(
    launcher: Launcher, second_launcher: Launcher, tmp_path: Path
) -> None:
    pytest.importorskip("obstore")
    first, last, left = prompts(500), prompts(599), iter(spares())
    asked = {name: prompts(501 + i, ASKED_EACH) for i, name in enumerate(FAULTS)}
    with moto(tmp_path) as service, BadProxy(int(service.endpoint.rpartition(":")[2]), seed=1) as proxy:
        store = bucket(service)
        launcher.start(remote(store))
        _share_spares(launcher)
        computed: dict[str, list[int]] = {}
        for each in (first, *asked.values(), last):
            computed |= share(launcher, each)
        bad = {
            **store,
            "DYN_KVBM_OBJECT_ENDPOINT": f"http://127.0.0.1:{proxy.port}",
            "DYN_KVBM_REMOTE_DEADLINE_MS": "500",
        }
        engine = second_launcher.start(remote(bad))
        # What is noted it learns oldest first, and the rest newest first: then it knows all that is in between.
        for each in (first, last):
            assert found(second_launcher, each) == part(computed, each)
        for name, fault in FAULTS.items():
            proxy.set(fault)
            # `EngineProcess.run` fails where a request hangs.
            assert texts(engine, asked[name]) == part(computed, asked[name]), name
            assert fault.kind == "refuse" or proxy.befell[fault.kind], name
            proxy.heal()
            _wait_until_used(second_launcher, left)
        assert second_launcher.metrics()[CORRUPT] > 0
        assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
        second_launcher.assert_nothing_held()
        second_launcher.stop()


def _share_spares(launcher: Launcher) -> None:
    """A few at a time: what a slow store cannot take at once is not written at all."""
    asked = spares()
    for begin in range(0, SPARES, SPARES_AT_ONCE):
        share(launcher, asked[begin : begin + SPARES_AT_ONCE], blocks=1)


def _wait_until_used(launcher: Launcher, left: Iterator[Request]) -> None:
    """Until blocks come from the store again, by themselves."""
    before = launcher.metrics()[LOADED]

    def used() -> bool:
        launcher.process.run([next(left)])
        return launcher.metrics()[LOADED] > before

    wait_for(used, 30.0, "the store is well, and not used")


def test_a_host_memory_that_is_far_too_small(
    launcher: Launcher, reference: dict[str, list[int]], tmp_path: Path
) -> None:
    """It holds half of a long request: blocks go to the store and come from it all the time."""
    (tmp_path / "shared").mkdir()
    store = {"DYN_KVBM_REMOTE": f"file://{tmp_path}/shared", "DYN_KVBM_REMOTE_LINGER_SECS": "0"}
    engine = launcher.start({**remote(store, TINY_HOST_BLOCKS), "DYN_KVBM_REMOTE_LINGER_SECS": "0"})
    for turn in ("", "+1"):
        assert differences(reference, engine.run(again(workload(), turn)), turn) == []
    metrics = launcher.metrics()
    assert metrics["kvbm_offload_blocks_d2o"] > 20
    assert metrics[LOADED] > 20
    assert metrics[CORRUPT] == 0
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()


def test_a_restart_hits_and_other_weights_or_another_salt_do_not(
    launcher: Launcher, model: Path, tmp_path: Path
) -> None:
    """All engines have the model at one path, and no node has anything but the store."""
    served, asked, salted = tmp_path / "model", prompts(600), prompts(600, salt="somebody else")
    shutil.copytree(model, served)
    (tmp_path / "shared").mkdir()
    settings = remote({"DYN_KVBM_REMOTE": f"file://{tmp_path}/shared"})
    launcher.start(settings, model=str(served))
    computed = share(launcher, asked)
    launcher.stop()

    original = (served / "model.safetensors").read_bytes()
    weights = load_file(str(served / "model.safetensors"))
    weights["model.layers.0.mlp.down_proj.weight"] += 0.5 * torch.sign(
        weights["model.layers.0.mlp.down_proj.weight"]
    )
    save_file(weights, str(served / "model.safetensors"), metadata={"format": "pt"})
    launcher.start(settings, model=str(served))
    other = share(launcher, asked)  # and so this node has looked at the store
    assert other != computed
    assert launcher.metrics()[FOUND] == 0
    launcher.stop()

    (served / "model.safetensors").write_bytes(original)
    engine = launcher.start(settings, model=str(served))
    assert found(launcher, asked) == computed
    loaded = launcher.metrics()[LOADED]
    assert loaded > 0
    renamed = [dataclasses.replace(request, name=request.name + "-salted") for request in salted]
    assert list(texts(engine, renamed).values()) == list(computed.values())
    assert launcher.metrics()[LOADED] == loaded
    assert len(list((tmp_path / "shared").glob("*/packs"))) == 2
    launcher.assert_nothing_held()


def test_other_rotary_factors_are_never_found(launcher: Launcher, tmp_path: Path) -> None:
    """LongRoPE: `max_model_len` alone says which factors an engine takes, at every position."""
    longrope = str(make_longrope_model(tmp_path / "longrope"))
    (tmp_path / "shared").mkdir()
    settings, asked = remote({"DYN_KVBM_REMOTE": f"file://{tmp_path}/shared"}), prompts(700)

    def start(length: int) -> None:
        launcher.start(settings, model=longrope, max_model_len=length)

    short, long = ORIGINAL_POSITIONS, ORIGINAL_POSITIONS + 256
    start(short)
    computed = share(launcher, asked)
    launcher.stop()
    start(long)
    assert share(launcher, asked) != computed
    assert launcher.metrics()[FOUND] == 0
    launcher.stop()
    start(short)
    assert found(launcher, asked) == computed
    assert len(list((tmp_path / "shared").glob("*/packs"))) == 2
