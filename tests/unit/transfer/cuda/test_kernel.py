"""The copy kernel without a GPU: run by Triton's interpreter for every layout, and compiled for three cards.

The interpreter is chosen by an environment variable that every kernel of the process obeys, an engine's too. So
kernels are interpreted in a process of their own, once for the module; tests look up what it found.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvbm.errors import KvbmError
from kvbm.testing.kv_views import PAIRS
from kvbm.transfer import DeviceCache
from kvbm.transfer.cuda.pieces import Pieces, SlotRows, batch_of, pieces_of
from rigs.checkout import ROOT
from rigs.cuda_bench import BLOCKS, LAYOUTS
from rigs.cuda_model import Model
from rigs.kernel_checks import CHECKS

if TYPE_CHECKING:
    from kvbm.transfer.cuda.kernel import KernelCopy
    from rigs.cuda_streams import ModelStream

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "rigs.kernel_checks"],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    answer: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_the_interpreted_kernel(found: dict[str, str], check: str) -> None:
    assert found[check] == "", found[check]


SLOTS = SlotRows(1 << 40, 4096)


def made(model: Model, layouts: Sequence[Pieces], slots: SlotRows = SLOTS) -> tuple[KernelCopy, ModelStream]:
    """The kernel on a model of a device, and a stream of its."""
    from kvbm.transfer.cuda.kernel import KernelCopy

    model.use()
    stream = model.new_stream()
    return KernelCopy(model.driver, model.device, layouts, slots, stream), stream


class Launches:
    """Stands for the kernel, and keeps what it was started with."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, torch.Tensor, torch.Tensor, dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(pairs: torch.Tensor, table: torch.Tensor, *counts: int, **constants: Any) -> None:
            pair_count, piece_count = counts
            assert piece_count == len(table)
            self.seen.append((grid[0], pairs[:pair_count].clone(), table, constants))

        return launch


class SeenTables:
    """Stands for the kernel, and reads the tables in the stream's turn."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda pairs, table, *counts, **constants: self.seen.append(table.tolist())


@pytest.mark.parametrize(
    "slots", [SlotRows(1 << 40, 4096), SlotRows((1 << 40) + 8, 4096), SlotRows(1 << 40, 4099)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernel_is_told_what_is_true_of_every_address(
    layout: str, slots: SlotRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter moves words from anywhere; a device does not."""
    from kvbm.transfer.cuda import kernel as cuda_kernel

    monkeypatch.setattr(cuda_kernel, "copy_pieces", launches := Launches())
    views = LAYOUTS[layout]()
    pieces = pieces_of(DeviceCache.from_tensors(views, BLOCKS).regions)
    batch = batch_of(pieces, PAIRS, slots)
    model = Model()
    method, stream = made(model, [pieces], slots)
    method.begin(pieces, PAIRS, slots, to_device=True, stream=stream)
    model.drain()
    covered = []
    for programs, pairs, table, constants in launches.seen:
        assert 1 <= programs <= cuda_kernel.PROGRAMS
        size, word = constants["PIECE_BYTES"], constants["WORD_BYTES"]
        assert word == min(8, constants["ALIGNMENT"])
        assert constants["WORD"] is cuda_kernel._WORDS[word]
        assert constants["CHUNK"] * word <= cuda_kernel.CHUNK_BYTES
        for block, slot in pairs.tolist():
            covered += [
                (first + block * step, slot + offset, size) for first, step, offset, _ in table.tolist()
            ]
    assert sorted(covered) == sorted(zip(*(column.tolist() for column in batch), strict=True))
    (alignment,) = {constants["ALIGNMENT"] for *_, constants in launches.seen}
    assert all(value % alignment == 0 for copy in covered for value in copy)
    largest = math.gcd(16, *(value for copy in covered for value in copy))
    assert alignment in (largest, math.gcd(largest, slots.row_bytes)), "no narrower than it must be"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FileNotFoundError("cc\nnot found"), "compiling the copy kernel: cc"),
        (ValueError(), "compiling the copy kernel: ValueError"),
        (
            RuntimeError("JIT compilation during inference"),
            "compiling the copy kernel: JIT compilation during",
        ),
    ],
)
def test_a_kernel_that_cannot_be_compiled_is_an_error_of_copies(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbm.transfer.cuda import kernel as cuda_kernel

    def launch(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cuda_kernel, "copy_pieces", {(1,): launch})
    pieces = pieces_of(DeviceCache.from_tensors({"a": torch.zeros(BLOCKS, 8)}, BLOCKS).regions)
    model = Model()
    method, stream = made(model, [pieces])
    monkeypatch.setattr(stream, "run", lambda begin: begin())  # a launch that fails does so at once
    with pytest.raises(KvbmError) as caught:
        method.compile(to_device=True, stream=stream)
    assert str(caught.value).startswith(text)


def test_more_pairs_than_a_place_holds_are_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbm.transfer.cuda import kernel as cuda_kernel

    monkeypatch.setattr(cuda_kernel, "copy_pieces", launches := Launches())
    pieces = pieces_of(DeviceCache.from_tensors({"a": torch.zeros(BLOCKS, 8)}, BLOCKS).regions)
    model = Model(seed=3)
    method, stream = made(model, [pieces])
    count = 2 * cuda_kernel.PLACE_PAIRS + 7
    pairs = [(number % BLOCKS, number) for number in range(count)]
    method.begin(pieces, pairs, SLOTS, to_device=True, stream=stream)
    model.drain()
    sent = [found.tolist() for _, found, *_ in launches.seen]
    assert [len(some) for some in sent] == [cuda_kernel.PLACE_PAIRS] * 2 + [7]
    assert [*itertools.chain(*sent)] == [[block, (1 << 40) + slot * 4096] for block, slot in pairs]


def test_beginning_allocates_nothing_and_waits_for_nothing_while_there_is_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer's tables are there from the start, as aligned as the others: Triton compiles no second kernel."""
    from kvbm.transfer.cuda import kernel as cuda_kernel

    monkeypatch.setattr(cuda_kernel, "copy_pieces", launches := Launches())
    cache = DeviceCache.from_tensors(LAYOUTS["two-sizes"](), BLOCKS)
    layouts = [pieces_of(cache.regions), *(pieces_of([region]) for region in cache.layers.values())]
    model = Model(seed=3)
    method, stream = made(model, layouts)
    model.unsafe_calls.clear()
    for number in range(cuda_kernel.PLACES):
        pieces = layouts[number % len(layouts)]
        method.begin(pieces, [(0, number)], SLOTS, to_device=True, stream=stream)
    assert (model.unsafe_calls, launches.seen) == ({}, []), "the stream has not even begun"
    method.begin(layouts[0], [(0, 0)], SLOTS, to_device=True, stream=stream)
    assert model.unsafe_calls == {"cudaEventSynchronize": 1}, "now the first place is used again"
    model.drain()
    assert len({constants["ALIGNMENT"] for *_, constants in launches.seen}) == 1
    assert {table.data_ptr() % 16 for _, _, table, _ in launches.seen} == {0}


def test_tables_are_on_the_device_before_a_kernel_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sent on one stream, and not written into memory that the engine's stream still uses."""
    from kvbm.transfer.cuda import kernel as cuda_kernel

    pieces = pieces_of(DeviceCache.from_tensors({"a": torch.zeros(BLOCKS, 8)}, BLOCKS).regions)
    for seed in range(12):
        monkeypatch.setattr(cuda_kernel, "copy_pieces", launches := SeenTables())
        model = Model(seed)
        copied_before: list[int] = []
        model.engine.work(lambda model=model, seen=copied_before: seen.append(model.pieces_copied))
        method, _ = made(model, [pieces])
        method.begin(pieces, [(0, 0)], SLOTS, to_device=True, stream=model.new_stream())
        model.drain()
        assert launches.seen == [[[int(pieces.device[0]), int(pieces.block_stride[0]), 0, 0]]]
        assert copied_before == [0]


def test_tables_that_have_no_room_are_an_error_of_copies() -> None:
    pieces = pieces_of(DeviceCache.from_tensors({"a": torch.zeros(BLOCKS, 8)}, BLOCKS).regions)
    model = Model()
    model.refuse_pinned = True
    with pytest.raises(KvbmError) as caught:
        made(model, [pieces])
    assert str(caught.value) == "memory for the copy kernel's tables: CUDA error: out of memory"


def compiled(
    capability: int, *, piece_bytes: int, alignment: int, to_device: bool = True
) -> tuple[list[str], list[str]]:
    """(loads, stores) of global memory in the PTX of the kernel, as the launcher would ask for it."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvbm.transfer.cuda.kernel import _ROW_WORDS, _WORDS, CHUNK_BYTES, WARPS, copy_pieces

    word_bytes = min(alignment, 8)
    assert tl.int64 is _WORDS[8]
    source = ASTSource(
        copy_pieces,
        {"pairs": "*i64", "table": "*i64", "pair_count": "i32", "piece_count": "i32"},
        {
            "TO_DEVICE": to_device,
            "PIECE_BYTES": piece_bytes,
            "CHUNK": min(CHUNK_BYTES // word_bytes, triton.next_power_of_2(piece_bytes // word_bytes)),
            "WORD": _WORDS[word_bytes],
            "WORD_BYTES": word_bytes,
            "ALIGNMENT": alignment,
            "ROW_WORDS": _ROW_WORDS,
        },
    )
    options = {"num_warps": WARPS}
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    return re.findall(r"ld\.global\S*", ptx), re.findall(r"st\.global\S*", ptx)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that finds nothing in a cache; skipped where Triton came without its tools."""
    knobs = pytest.importorskip("triton.knobs", reason="this Triton has no knobs to set")
    if knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("to_device", [True, False])
def test_aligned_pieces_are_moved_16_bytes_at_a_time(capability: int, to_device: bool) -> None:
    for piece_bytes in (4096, 65536, 4096 + 512):
        loads, stores = compiled(capability, piece_bytes=piece_bytes, alignment=16, to_device=to_device)
        # The five single words are the table's.
        assert loads.count("ld.global.b64") == 5
        assert set(loads) == {"ld.global.b64", "ld.global.v2.b64"}
        assert set(stores) == {"st.global.v2.b64"}


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("alignment", "width"), [(8, 64), (4, 32), (2, 16), (1, 8)])
def test_no_access_is_wider_than_its_alignment(alignment: int, width: int) -> None:
    loads, stores = compiled(90, piece_bytes=3000 * alignment, alignment=alignment)
    assert set(stores) == {f"st.global.b{width}"}
    assert set(loads) <= {"ld.global.b64", f"ld.global.b{width}"}
