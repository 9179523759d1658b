"""TensorRT-LLM's connector between a double of the engine and a real manager process: outputs are those of an engine
that never evicts, and every byte in a rank's cache is checked before each forward pass."""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from kvbm.block import Tier
from kvbm.step_plan import StepReport
from kvbm.transfer import CpuCopier
from kvbm.worker.jobs import ReportJob
from rigs.checkout import ROOT
from rigs.manager_probe import free_port, scrape, wait_for
from rigs.trtllm.engine import Request, reference
from rigs.trtllm.house import DEADLINE_S, House, answered, make_prompts, push_out, settle, side_of
from rigs.trtllm.model import BLOCK_TOKENS
from rigs.trtllm.package import OLDEST


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    house = House(tmp_path, monkeypatch)
    yield house
    house.close()


def test_evicted_prompts_come_back_from_host_memory(house: House) -> None:
    engine = house.engine()
    asked = [Request(number, prompt, 6) for number, prompt in enumerate(make_prompts(4) * 3)]
    assert engine.serve(*asked) == reference(engine.spec, asked)
    assert engine.loaded_tokens >= 8 * 5 * BLOCK_TOKENS, "what was evicted was loaded"
    assert not engine.saving


def test_wrong_bytes_would_be_found(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of all tests here: a copier that loads other blocks."""
    engine = house.engine()
    (prompt,) = make_prompts(1)
    engine.serve(Request(1, prompt, 4))
    push_out(engine)
    load = CpuCopier.begin_load

    def begin_load(self: Any, pairs: Any, after: Any = None, layer: str | None = None) -> Any:
        slots = [slot for _, slot in pairs]
        turned = [*slots[1:], slots[0]]
        return load(self, [(pair[0], slot) for pair, slot in zip(pairs, turned, strict=True)], after, layer)

    monkeypatch.setattr(CpuCopier, "begin_load", begin_load)
    with pytest.raises(AssertionError, match="wrong KV"):
        engine.serve(Request(2, prompt, 4))


@pytest.mark.parametrize("version", [OLDEST, "1.3.0rc29"])
def test_conversations_load_what_was_generated_too(house: House, version: str) -> None:
    engine = house.engine(version=version)
    engine.pause = lambda: answered(engine)
    (prompt,) = make_prompts(1, blocks=3)
    first = Request(1, prompt, 12)  # its last step completes no block: that one would not be kept
    (answer,) = engine.serve(first)
    push_out(engine)
    second = Request(2, [*prompt, *answer, 5, 6], 4)
    assert engine.serve(second) == reference(engine.spec, [second])
    complete = (len(prompt) + len(answer) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert complete > len(prompt)
    assert second.promised == complete


def test_chunked_prefill(house: House) -> None:
    engine = house.engine(chunk=5, batch=3, device_blocks=30)
    asked = [Request(number, prompt, 5) for number, prompt in enumerate(make_prompts(5, blocks=7) * 3)]
    assert engine.serve(*asked) == reference(engine.spec, asked)
    assert engine.loaded_tokens > 0


@pytest.mark.parametrize("layout_groups", [0, 1])
def test_aborts_preemption_and_resets(house: House, layout_groups: int) -> None:
    engine = house.engine(layout_groups=layout_groups, device_blocks=24)
    chance = random.Random(7)
    known = make_prompts(5)
    asked: list[Request] = []
    for number in range(40):
        request = Request(
            number, [*chance.choice(known)[: chance.randrange(6, 26)], number], chance.randrange(1, 9)
        )
        asked.append(request)
        engine.submit(request)
        for _ in range(chance.randrange(6)):
            engine.iterate()
        if engine.running and chance.random() < 0.6:
            victim = chance.choice(engine.running)
            action = chance.choice(["abort", "preempt", "reset"])
            getattr(engine, action)(victim)
            if action == "abort":
                asked.remove(victim)
    engine.serve()
    assert [request.output for request in asked] == reference(engine.spec, asked)
    assert engine.loaded_tokens > 0
    settle(engine)
    assert not engine.saving
    leader = side_of(engine).leader
    assert not leader.requests
    assert len(leader.stores) == len(leader.lookups) == 0


@pytest.mark.parametrize("action", ["preempt", "reset", "match"])
def test_a_request_that_comes_again_in_the_next_step_is_stored_after_its_forward_pass(
    house: House, action: str
) -> None:
    """Its first life ended just before that step, whose plan releases the stores of that life alone."""
    engine = house.engine(device_blocks=24)
    known = make_prompts(1)[0]
    first = Request(1, known[: 12 if action == "match" else 11], 3)
    if action == "match":  # the engine had no room for it, and matches it anew
        first.tokens = list(first.prompt)
        engine.leader.get_num_new_matched_tokens(first, 0)
    engine.submit(first)
    engine.iterate()
    if action != "match":
        settle(engine)
        getattr(engine, action)(first)  # it has 12 tokens by now: the next step completes the third block
    engine.serve()
    settle(engine)
    push_out(engine)
    again = Request(2, first.tokens[:14], 2)
    assert engine.serve(again) == reference(engine.spec, [again])
    assert again.promised == 3 * BLOCK_TOKENS


def test_a_reset_request_loads_nothing_while_its_first_load_is_not_reported(house: House) -> None:
    """The report of the first load would end the lease of the second, before it is copied."""
    engine = house.engine()
    (prompt,) = make_prompts(1)
    engine.serve(Request(1, prompt, 2))
    push_out(engine)
    leader, held = side_of(engine).leader, list[Any]()
    take = leader.rank_reports.add

    def add(report: Any) -> Any:
        if report.loaded:
            held.append(report)
        return take(msgspec.structs.replace(report, loaded={}))

    leader.rank_reports.add = add
    second = Request(2, prompt, 4)
    engine.submit(second)
    engine.iterate()
    assert second.promised == 6 * BLOCK_TOKENS
    (first_load,) = leader.lookups._by_number
    engine.reset(second)
    engine.blocks.forget()
    engine.serve()
    assert second.promised == 0
    assert list(leader.lookups._by_number) == [first_load], "its lease is kept until it is known to be copied"

    def reported() -> bool:
        with engine.leader._lock:
            side_of(engine).settle()
        return bool(held)

    wait_for(reported, DEADLINE_S, "no report came")
    leader.rank_reports.add = take
    with engine.leader._lock:
        leader.updated(take(held[0]), ["2"], set())
    assert not leader.lookups._by_number


def test_tenants_never_meet(house: House) -> None:
    engine = house.engine()
    (prompt,) = make_prompts(1)
    engine.serve(Request(1, prompt, 2, cache_salt="a"))
    push_out(engine)
    others = [Request(2, prompt, 2, cache_salt="b"), Request(3, prompt, 2)]
    engine.serve(*others)
    assert [request.promised for request in others] == [0, 0]
    push_out(engine, seed=98)
    again = Request(4, prompt, 2, cache_salt="a")
    engine.serve(again)
    assert again.promised > 0


def adapter(house: House, name: str, weights: bytes) -> str:
    folder = house.directory / name
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.bin").write_bytes(weights)
    return str(folder)


def test_adapters_are_named_by_their_content(house: House) -> None:
    """Their paths come with the allocation, so the first request of an adapter asks for nothing."""
    engine = house.engine()
    (prompt,) = make_prompts(1)
    one, other = adapter(house, "one", b"1"), adapter(house, "other", b"2")
    plain = Request(1, prompt, 2)
    engine.serve(plain)
    push_out(engine)
    first = Request(2, prompt, 8, lora_task_id=1, py_lora_path=one)
    assert engine.serve(first) == reference(engine.spec, [first])
    assert first.promised == 0
    wait_for(lambda: side_of(engine)._adapters.extras(one) is not None, DEADLINE_S, "no digest")
    second = Request(3, prompt, 8, lora_task_id=1, py_lora_path=one)
    engine.serve(second)
    push_out(engine, seed=98)
    third = Request(4, prompt, 8, lora_task_id=1, py_lora_path=one)
    assert engine.serve(third) == reference(engine.spec, [third])
    assert third.promised > 0
    engine.serve(Request(5, prompt, 2, lora_task_id=2, py_lora_path=other))
    wait_for(lambda: side_of(engine)._adapters.extras(other) is not None, DEADLINE_S, "no digest")
    stranger = Request(6, prompt, 8, lora_task_id=2, py_lora_path=other)
    engine.serve(stranger)
    assert stranger.promised == 0, "another adapter's blocks are not its own"


@pytest.mark.parametrize("latent", [False, True])
def test_two_ranks_in_processes(house: House, latent: bool) -> None:
    engine = house.engine(ranks=2, latent=latent)
    asked = [Request(number, prompt, 4) for number, prompt in enumerate(make_prompts(4) * 2)]
    assert engine.serve(*asked) == reference(engine.spec, asked)
    assert engine.loaded_tokens > 0
    settle(engine)
    assert side_of(engine).leader.block_bytes == (4096 if latent else 2 * 4096), (
        "what all ranks hold is kept once"
    )
    (other,) = engine.others
    other.ask("stores_here")
    assert other.answer() == (not latent), "and copied once"


def test_nothing_is_committed_before_all_ranks_have_reported(house: House) -> None:
    engine = house.engine(ranks=2)
    (prompt,) = make_prompts(1)
    side = side_of(engine)
    held: list[Any] = []
    take = side.leader.rank_reports.add

    def add(report: Any) -> Any:
        if report.rank == 1:
            held.append(report)
            return None
        return take(report)

    side.leader.rank_reports.add = add
    engine.serve(Request(1, prompt, 2))

    def both_came() -> bool:
        with engine.leader._lock:
            side.settle()
        return bool(held) and len(side.leader.rank_reports._stores) > 0

    wait_for(both_came, DEADLINE_S, "no report came")
    assert len(side.leader.stores) > 0, "the other rank's is still out"
    side.leader.rank_reports.add = take
    with engine.leader._lock:
        for report in held:
            told = take(report)
            if told is not None:
                side.leader.stores.reported(told)
    assert len(side.leader.stores) == 0


def test_priorities_retain_what_is_worth_more(house: House) -> None:
    port = free_port()
    house.set(METRICS="true", METRICS_PORT=str(port))
    engine = house.engine()
    (prompt,) = make_prompts(1)
    engine.serve(Request(1, prompt, 2, priorities=[90, 90, 35, 35, 35, 35, 35]))
    name = 'kvbm_hints_total{part="retain",outcome="accepted",reason="none"}'
    wait_for(lambda: scrape(port).get(name) == 1, DEADLINE_S, "the priorities were not heard")
    assert scrape(port)['kvbm_retained_blocks{tier="host"}'] == 2


def test_priorities_end_what_is_stored_for_good(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY", "40")
    engine = house.engine()
    (prompt,) = make_prompts(1)
    engine.serve(Request(1, prompt, 2, priorities=[50, 40, 30, 90, 90, 90, 90]))
    push_out(engine)
    again = Request(2, prompt, 2)
    engine.serve(again)
    assert again.promised == 2 * BLOCK_TOKENS


def test_partial_reuse_never_gives_a_wrong_answer(house: House, caplog: pytest.LogCaptureFixture) -> None:
    engine = house.engine(partial_reuse=True)
    assert [r.message for r in caplog.records if "enable_partial_reuse" in r.message], "one line at the start"
    known = make_prompts(3)
    asked = []
    for number in range(18):
        prompt = known[number % 3]
        asked.append(Request(number, [*prompt[: 6 + number], number, number], 3))
    assert engine.serve(*asked) == reference(engine.spec, asked)
    assert any(request.on_device % BLOCK_TOKENS for request in asked), "a match ended inside a block"
    assert all(not request.promised for request in asked if request.on_device % BLOCK_TOKENS)


def test_media_are_part_of_the_keys_or_not_kept(house: House, caplog: pytest.LogCaptureFixture) -> None:
    engine = house.engine()
    prompt = [*range(6), 999, 999, 999, *range(20)]

    def request(number: int, content: int | None, **more: Any) -> Request:
        if content is not None:
            more |= {
                "multimodal_positions": [6],
                "multimodal_lengths": [3],
                "multimodal_hashes": [[content] * 8],
            }
        return Request(number, prompt, 2, **more)

    first, unnamed = request(1, 5), request(2, None, py_multimodal_data={"image": 1})
    assert engine.serve(first, unnamed) == reference(engine.spec, [first, unnamed])
    push_out(engine)
    same, other = request(3, 5), request(4, 6)
    assert engine.serve(same, other) == reference(engine.spec, [same, other])
    assert same.promised == len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
    assert other.promised == BLOCK_TOKENS, "up to where the image begins"
    again = request(5, None, py_multimodal_data={"image": 1})
    engine.serve(again)
    assert again.promised == 0
    lines = [r.message for r in caplog.records if "are not kept" in r.message]
    assert lines == ["blocks of 1 request are not kept: multimodal input without positions and hashes"]
    assert sum(side_of(engine).unkept.by_reason.values()) == 2


def test_a_restart_finds_its_blocks_on_disk(house: House) -> None:
    """The first time they are brought up, the next time they are loaded."""
    house.set(
        DISK_CACHE_OVERRIDE_NUM_BLOCKS="256",
        DISK_CACHE_DIR=str(house.directory),
        DISK_ADMISSION="all",
    )
    (prompt,) = make_prompts(1)
    engine = house.engine()
    engine.serve(Request(1, prompt, 2))
    settle(engine)
    engine.close()
    engine = house.engine()
    side = side_of(engine)
    first = Request(1, prompt, 2)
    engine.serve(first)
    # All of it where the disk was as quick as the answer, which waits for no read.
    assert first.promised in (0, 6 * BLOCK_TOKENS)

    def brought_up() -> bool:
        with engine.leader._lock:
            side.settle()
        return len(side.leader.lookups._rising) == 0

    wait_for(brought_up, DEADLINE_S, "nothing came up")
    push_out(engine)
    second = Request(2, prompt, 2)
    assert engine.serve(second) == reference(engine.spec, [second])
    assert second.promised == 6 * BLOCK_TOKENS
    settle(engine)
    assert side.leader.lookups.loaded_blocks[Tier.HOST] >= 6


@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="a source distribution has no docs")
def test_the_guides_configuration_names_the_connector(house: House) -> None:
    """As far as this machine allows: the engine itself would import these names."""
    guide = (ROOT / "docs" / "guides" / "trtllm.md").read_text()
    (text,) = re.findall(r"<<EOF\n(.*?)^EOF$", guide, flags=re.DOTALL | re.MULTILINE)
    config = yaml.safe_load(text)
    assert config["kv_cache_config"]["enable_partial_reuse"] is False
    named = config["kv_connector_config"]
    engine = house.engine()
    module = importlib.import_module(named["connector_module"])
    assert type(engine.leader) is getattr(module, named["connector_scheduler_class"])
    assert type(engine.first.connector) is getattr(module, named["connector_worker_class"])


def test_metrics_name_the_engine(house: House) -> None:
    port = free_port()
    house.set(METRICS="true", METRICS_PORT=str(port))
    engine = house.engine()
    asked = [Request(number, prompt, 2) for number, prompt in enumerate(make_prompts(4) * 2)]
    engine.serve(*asked)
    settle(engine)
    series = [name for name in scrape(port) if 'engine="trtllm/' in name]
    assert series


def test_the_last_blocks_are_committed_while_the_engine_does_nothing(house: House) -> None:
    engine = house.engine()
    mover = engine.first.connector._side.worker._mover
    send = mover.reporting.send
    mover.reporting.send = lambda channel: None  # no report is out before the engine does nothing
    engine.serve(Request(1, make_prompts(1)[0], 2))
    stores = side_of(engine).leader.stores
    assert len(stores) > 0
    mover.reporting.send = send
    mover.put(ReportJob(StepReport()))  # wakes it
    wait_for(lambda: len(stores) == 0, DEADLINE_S, "nobody takes the ranks' reports in")


def test_the_mirror_knows_what_was_kept(house: House) -> None:
    engine = house.engine()
    leader = side_of(engine).leader
    mirror = leader._questions._mirror
    assert mirror is not None
    (prompt,) = make_prompts(1)
    engine.serve(Request(1, prompt, 2))

    def kept() -> bool:
        leader.receive()
        return mirror.complete and bool(mirror._host)

    wait_for(kept, DEADLINE_S, "the manager does not say what it holds")
    push_out(engine)
    again = Request(2, prompt, 2)
    engine.serve(again)
    assert again.promised > 0
