"""Disk as the only tier, staged in device memory: what comes back is what left, and what cannot be is said."""

from __future__ import annotations

import importlib.util
import logging
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

import kvbm
from kvbm.block import Outcome
from kvbm.clock import monotonic
from kvbm.layout import PAGE_BYTES
from kvbm.library import staging
from kvbm.library.staging import StagingOptions, open_staging
from kvbm.testing.stored_runs import make_key
from kvbm.tiers.contract import BlockHead
from kvbm.tiers.disk.block_io import DirectRefused
from kvbm.tiers.disk.page_sums import host_page_sums
from kvbm.tiers.nixl import block_io
from kvbm.tiers.nixl.block_io import NixlBlockIo, TransferMemory
from kvbm.tiers.nixl.package import PACKAGES
from rigs.nixl_model import ModelAgent

torch = pytest.importorskip("torch", reason="slots of a device are torch tensors; torch is not installed")

from kvbm.transfer import (  # noqa: E402
    DeviceCache,
    DeviceCopier,
    device_arena,
)
from kvbm.transfer.device_arena import DeviceArena, DeviceMemory, cuda_device  # noqa: E402
from rigs.library import (  # noqa: E402
    BLOCK_TOKENS,
    DEVICE_BLOCKS,
    NAMESPACE,
    computed,
    content,
    layout,
    new_cache,
    prompt,
)

PLACES = [
    torch.device("cpu"),
    pytest.param(
        torch.device("cuda", 0),
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available"),
    ),
]


@pytest.fixture(params=["model", "nixl"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModelAgent:
    """The ways to move the bytes: a model of NIXL, and NIXL itself with its POSIX plugin where it is installed."""
    agent = ModelAgent()
    if request.param == "model":
        use(agent, monkeypatch)
    elif not any(map(importlib.util.find_spec, PACKAGES)):
        pytest.skip("NIXL is not installed (the extra `nixl`)")
    return agent


def use(agent: ModelAgent, monkeypatch: pytest.MonkeyPatch, refusing: tuple[str, ...] = ()) -> None:
    """Backends are this model, but for those that refuse."""

    def opened(backend: str, memory: TransferMemory, threads: int) -> NixlBlockIo:
        if backend in refusing:
            raise DirectRefused(f"NIXL cannot start its backend {backend} (NIXL_ERR_NOT_FOUND)")
        return NixlBlockIo(backend, agent, memory, 0.2)

    monkeypatch.setattr(block_io, "open_nixl", opened)


def new_manager(root: Path, **options: object) -> kvbm.BlockManager:
    settings: dict[str, object] = {
        "host": None,
        "staging": 14 * 4096,
        "disk": "4MB",
        "disk_dir": str(root),
        "namespace": NAMESPACE,
        "disk_direct": "POSIX",
    }
    return kvbm.BlockManager(layout(), **{**settings, **options})  # type: ignore[arg-type]


def wanted(root: Path, direct: str) -> StagingOptions:
    return StagingOptions(slot_count=4, disk_dir=str(root), disk_bytes=1_000_000, direct=direct, device="")


def test_random_prompts_come_back_from_disk_or_not_at_all(tmp_path: Path, driver: ModelAgent) -> None:
    serve_random_prompts(new_manager(tmp_path), new_cache(1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available")
@pytest.mark.parametrize("backend", staging.GPU_BACKENDS)
def test_random_prompts_on_a_gpu(tmp_path: Path, backend: str) -> None:
    try:
        manager = new_manager(tmp_path, disk_direct=backend)
    except kvbm.SettingsError as error:
        pytest.skip(f"no direct path between this GPU and {tmp_path}: {error}")
    serve_random_prompts(manager, {name: layer.cuda() for name, layer in new_cache(1).items()})


def serve_random_prompts(manager: kvbm.BlockManager, cache: dict[str, torch.Tensor]) -> None:
    """The calls of an engine with too small a cache, compared with the KV that it would have computed."""
    rng = random.Random(7)
    prompts = [prompt(rng, rng.randint(1, 6)) for _ in range(24)]
    hits = 0
    with manager:
        for _ in range(120):
            tokens = rng.choice(prompts)
            blocks = len(tokens) // BLOCK_TOKENS
            with manager.match(tokens) as hit:
                target = rng.sample(range(DEVICE_BLOCKS), blocks)
                arrived = hit.onboard(cache, target)
                hits += arrived
                for i in range(arrived):
                    assert torch.equal(content(cache, [target[i]]).cpu(), computed(tokens, i))
            for i in range(arrived, blocks):
                for name, layer in zip(cache, computed(tokens, i), strict=True):
                    cache[name][target[i]] = layer[0]
            manager.offload(tokens, cache, target)
            manager.backend.space.check()
        assert manager.flush()
        assert manager.metrics.value("kvbm_transfer_bytes_total", source="disk", target="host") > 0
        assert manager.backend.space.disk is not None and manager.backend.space.disk.medium.fault == ""
    assert hits > 100


def test_a_later_manager_finds_the_blocks_and_never_a_flipped_one(tmp_path: Path, driver: ModelAgent) -> None:
    cache, tokens, blocks = new_cache(2), list(range(5 * BLOCK_TOKENS)), [4, 9, 0, 31, 7]
    before = content(cache, blocks)
    with new_manager(tmp_path) as manager:
        assert manager.offload(tokens, cache, blocks) == 5
    for layer in cache.values():
        layer.zero_()
    with new_manager(tmp_path) as manager, manager.match(tokens) as hit:
        assert (hit.blocks, hit.disk) == (5, 5)
        assert hit.onboard(cache, blocks) == 5
    assert torch.equal(content(cache, blocks), before)
    (slab,) = tmp_path.glob("*/slab-000")
    raw = bytearray(slab.read_bytes())
    third = before[:, 2].contiguous().numpy().tobytes()
    raw[raw.index(third) + 100] ^= 1
    slab.write_bytes(raw)
    with new_manager(tmp_path) as manager:
        with manager.match(tokens) as hit:
            assert hit.blocks == 5
            assert hit.onboard(cache, blocks) == 2
        assert manager.metrics.value("kvbm_failures_total", tier="disk", kind="corrupt") == 1
        with manager.match(tokens) as hit:
            assert hit.blocks == 2


def test_a_transfer_that_never_ends_costs_the_hit_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = ModelAgent()
    use(agent, monkeypatch)
    cache, tokens = new_cache(3), list(range(3 * BLOCK_TOKENS))
    with new_manager(tmp_path) as manager:
        manager.offload(tokens, cache, [0, 1, 2])
    manager = new_manager(tmp_path)
    agent.fate = "endless"
    with manager.match(tokens) as hit:
        assert hit.blocks == 3
        assert hit.onboard(cache, [3, 4, 5]) == 0
    with manager.match(tokens) as hit:
        assert hit.blocks == 0, "the tier is off"
    manager.close()
    assert agent.leaked, "what the device may still write to is freed by nobody"


def test_disk_alone_works_through_host_memory_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache, tokens = new_cache(4), list(range(2 * BLOCK_TOKENS))
    with caplog.at_level(logging.INFO, "kvbm"), new_manager(tmp_path, disk_direct="off") as manager:
        assert manager.offload(tokens, cache, [0, 1]) == 2
        assert manager.flush()
        with manager.match(tokens) as hit:
            assert hit.onboard(cache, [2, 3]) == 2
    assert torch.equal(content(cache, [0, 1]), content(cache, [2, 3]))
    assert "directly" not in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")
def test_without_a_gpu_one_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvbm"), new_manager(tmp_path, disk_direct="auto"):
        pass
    said = [record.getMessage() for record in caplog.records if "directly" in record.getMessage()]
    assert said == ["disk tier: blocks go through host memory, not directly: torch sees no CUDA device"]
    with pytest.raises(kvbm.SettingsError, match="disk_direct='GDS' cannot be used: torch sees no CUDA"):
        new_manager(tmp_path, disk_direct="GDS")


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_cuda_device", lambda name: (torch.device("cpu"), []))


@pytest.mark.usefixtures("pretended_gpu")
def test_the_second_backend_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(ModelAgent(), monkeypatch, refusing=("GDS_MT",))
    with caplog.at_level(logging.INFO, "kvbm"):
        opened = open_staging(wanted(tmp_path, "auto"), layout(), NAMESPACE, monotonic)
    assert opened.tensor is not None
    assert "(NIXL GDS), staged in" in caplog.text
    opened.tier.close(keep=False)


@pytest.mark.usefixtures("pretended_gpu")
def test_where_none_works_one_line_names_every_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent = ModelAgent(refused=("FILE",))
    use(agent, monkeypatch, refusing=("GDS_MT",))
    opened = open_staging(wanted(tmp_path, "auto"), layout(), NAMESPACE, monotonic)
    assert opened.tensor is None
    (line,) = [record for record in caplog.records if "directly" in record.getMessage()]
    assert line.levelno == logging.WARNING
    assert line.getMessage() == (
        "disk tier: blocks go through host memory, not directly: NIXL cannot start its backend GDS_MT "
        "(NIXL_ERR_NOT_FOUND); GDS refused the registration of files (register FILE: refused)"
    )
    opened.tier.close(keep=False)
    opened.arena.close()
    assert agent.registered == []


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("direct", ["GDS", "GDS_MT"])
def test_a_backend_that_was_named_is_an_error_when_it_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: str
) -> None:
    use(ModelAgent(fate="lies"), monkeypatch)
    with pytest.raises(kvbm.SettingsError, match=f"disk_direct='{direct}' cannot be used: .* other bytes"):
        open_staging(wanted(tmp_path, direct), layout(), NAMESPACE, monotonic)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"disk_direct": "gpu"}, "disk_direct='gpu' cannot be used: one of: auto, off"),
        ({"host": "1MB", "disk_direct": "GDS"}, "disk_direct='GDS' cannot be used: with host=None"),
        ({"disk": None}, "host=None cannot be used: a size"),
        ({"staging": 4000}, "staging=4000 cannot be used: at least one block"),
        ({"device": "cuda:1"}, "disk_direct='POSIX' cannot be used: POSIX moves plain memory"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    tmp_path: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(kvbm.SettingsError) as error:
        new_manager(tmp_path, **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_cache_on_another_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(ModelAgent(), monkeypatch)
    with new_manager(tmp_path) as manager:
        elsewhere = {"layer": torch.empty(4, 2 * 3, BLOCK_TOKENS, 16, device="meta")}
        with pytest.raises(kvbm.KvbmError, match=r"kv_cache='meta' cannot be used: a device that is cpu"):
            manager.offload(list(range(BLOCK_TOKENS)), elsewhere, [0])


@pytest.mark.parametrize("device", PLACES)
def test_the_device_sums_up_as_the_host_does(device: torch.device) -> None:
    """More than one chunk of pages, and every word's sign."""
    big = kvbm.BlockLayout(block_tokens=8, shard_bytes=1025 * PAGE_BYTES + 5)
    arena = DeviceArena(big, 2, device)
    memory = DeviceMemory(arena)
    assert not arena.tensor.any()
    arena.tensor.random_(0, 256)
    for slot in range(2):
        (span,) = arena.slot_views(slot)
        assert span.address % PAGE_BYTES == 0
        assert memory.place(span) == (arena.tensor[slot].data_ptr(), big.slot_bytes)
        expected = host_page_sums(memoryview(arena.tensor[slot].cpu().numpy()))
        assert memory.page_sums(span) == expected


@pytest.mark.parametrize("device", PLACES)
def test_the_probe_has_a_page_of_its_own(device: torch.device) -> None:
    arena = DeviceArena(layout(), 2, device)
    memory = DeviceMemory(arena)
    page = random.Random(1).randbytes(PAGE_BYTES)
    memory.put(memory.probe, page)
    assert memory.get(memory.probe) == page
    assert not arena.tensor.any()
    ((start, size),) = memory.regions()
    place, length = memory.place(memory.probe)
    assert start <= place and place + length <= start + size


@pytest.mark.parametrize("device", PLACES)
def test_copies_between_a_cache_and_slots_beside_it(device: torch.device) -> None:
    cache = {name: layer.to(device) for name, layer in new_cache(6).items()}
    arena = DeviceArena(layout(), 5, device)
    copier = DeviceCopier(DeviceCache.from_tensors(cache, DEVICE_BLOCKS), arena.tensor)
    before = content(cache, [7, 3, 20])
    copier.store([(7, 1), (3, 4), (20, 0)])
    assert not arena.tensor[2:4].any()
    others = content(cache, [1, 2])
    copier.load([(9, 1), (8, 4), (30, 0)])
    assert torch.equal(content(cache, [9, 8, 30]), before)
    assert torch.equal(content(cache, [1, 2]), others)
    copier.begin_load([(5, 4)], layer="layer.1").wait()
    assert torch.equal(cache["layer.1"][5], cache["layer.1"][3])
    assert not torch.equal(cache["layer.0"][5], cache["layer.0"][3])
    with pytest.raises(kvbm.KvbmError, match="block 0 and slot 5"):
        copier.store([(0, 5)])
    copier.close()


@pytest.mark.swallows("^TypeError: a bytes-like object is required, not 'DeviceSpan'$")
def test_a_tier_for_host_memory_takes_no_device_memory(tmp_path: Path) -> None:
    opened = open_staging(wanted(tmp_path, "off"), layout(), NAMESPACE, monotonic)
    arena = DeviceArena(layout(), 1, torch.device("cpu"))
    outcome = opened.tier.submit_store(1, [BlockHead(make_key(1), None)], 0, arena.slot_views(0))  # type: ignore[arg-type]
    assert outcome is Outcome.PENDING
    assert opened.tier.drain(5.0)
    assert [completion.outcome for completion in opened.tier.poll()] == [Outcome.RETRY]
    opened.tier.close(keep=False)
    opened.arena.close()


def test_device_memory_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(kvbm.SettingsError, match=r"staging='0.00 GB' .* cpu has \(CUDA out of memory\.\)"):
        DeviceArena(layout(), 1, torch.device("cpu"))


def test_work_on_a_gpu_goes_on_a_stream_of_each_threads_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the thread is prepared for an engine that captures a CUDA graph meanwhile."""
    arena = DeviceArena(layout(), 2, torch.device("cpu"))
    memory = DeviceMemory(arena)
    cuda, driver = mock.MagicMock(index=3), mock.MagicMock()
    cuda.new_stream.side_effect = lambda priority: mock.MagicMock(run=lambda begin: begin())
    monkeypatch.setattr(memory, "_cuda", cuda)
    monkeypatch.setattr(device_arena, "CudaDriver", lambda: driver)
    (span,) = arena.slot_views(1)
    expected = host_page_sums(memoryview(arena.tensor[1].numpy()))
    for thread_count in (1, 2):
        with ThreadPoolExecutor(1) as thread:
            for _ in range(2):
                assert thread.submit(memory.page_sums, span).result() == expected
        assert cuda.new_stream.call_count == thread_count
        assert driver.adopt_thread.call_args_list == [mock.call(3)] * thread_count


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: lost\nmore"), kvbm.KvbmError("no driver")])
def test_a_device_that_fails_is_a_medium_that_fails(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    arena = DeviceArena(layout(), 1, torch.device("cpu"))
    memory = DeviceMemory(arena)
    monkeypatch.setattr(memory, "_sums", mock.Mock(side_effect=error))
    with pytest.raises(OSError, match=r"cpu: (CUDA error: lost|no driver)$"):
        memory.page_sums(arena.slot_views(0)[0])


def test_which_device_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert cuda_device("") == cuda_device("cuda") == torch.device("cuda", 2)
    assert cuda_device("cuda:1") == torch.device("cuda", 1)
    assert cuda_device("cpu") == "cpu is no CUDA device"
    assert "gpu9" in str(cuda_device("gpu9"))


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("host", ["1MB", None], ids=["host memory", "staging"])
def test_huge_pages_are_asked_for_or_refused(
    host: str | None, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[bool] = set()
    monkeypatch.setattr("kvbm.tiers.host.advise_huge_pages", lambda region, wanted: asked.add(wanted))
    kvbm.BlockManager(
        layout(),
        host=host,
        disk="4MB",
        disk_dir=str(tmp_path),
        namespace=NAMESPACE,
        staging="1MB",
        disk_direct="off",
        huge_pages=wanted,
    ).close()
    assert asked == {wanted}
