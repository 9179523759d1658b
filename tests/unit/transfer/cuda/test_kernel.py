"""The copy kernel without a GPU: run by Triton's interpreter for every layout, and compiled for three cards.

The interpreter is chosen by an environment variable that every kernel of the process obeys, an engine's too. So
kernels are interpreted in a process of their own, once for the module; tests look up what it found.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbm.errors import KvbmError
from kvbm.testing.kv_views import PAIRS
from kvbm.transfer import DeviceCache
from kvbm.transfer.cuda.pieces import SlotRows, batch_of, pieces_of
from rigs.checkout import ROOT
from rigs.cuda_bench import BLOCKS, LAYOUTS
from rigs.kernel_checks import (
    CHECKS,
)

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


@pytest.mark.parametrize("check", CHECKS)
def test_the_interpreted_kernel(found: dict[str, str], check: str) -> None:
    assert found[check] == "", found[check]


class Launches:
    """Stands for the kernel, and keeps what it was started with."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, torch.Tensor, torch.Tensor, dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(pairs: torch.Tensor, table: torch.Tensor, *counts: int, **constants: Any) -> None:
            assert counts == (len(pairs), len(table))
            self.seen.append((grid[0], pairs, table, constants))

        return launch


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
    method = cuda_kernel.KernelCopy(torch.device("cpu"))
    method.begin(pieces, PAIRS, slots, to_device=True, stream=0)
    covered = []
    for programs, pairs, table, constants in launches.seen:
        assert 1 <= programs <= cuda_kernel.PROGRAMS
        size, word = constants["PIECE_BYTES"], constants["WORD_BYTES"]
        assert word == min(8, constants["ALIGNMENT"])
        assert constants["WORD"] is cuda_kernel._WORDS[word]
        assert constants["CHUNK"] * word <= cuda_kernel.CHUNK_BYTES
        for block, slot in pairs.tolist():
            covered += [(first + block * step, slot + offset, size) for first, step, offset in table.tolist()]
    assert sorted(covered) == sorted(zip(*(column.tolist() for column in batch), strict=True))
    (alignment,) = {constants["ALIGNMENT"] for *_, constants in launches.seen}
    assert all(value % alignment == 0 for copy in covered for value in copy)
    largest = math.gcd(16, *(value for copy in covered for value in copy))
    assert alignment in (largest, math.gcd(largest, slots.row_bytes)), "no narrower than it must be"


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (FileNotFoundError("cc\nnot found"), KvbmError, "starting the copy kernel: cc"),
        (ValueError(), KvbmError, "starting the copy kernel: ValueError"),
        (RuntimeError("a device error"), RuntimeError, "a device error"),
    ],
)
def test_a_kernel_that_cannot_be_started_is_an_error_of_copies(
    error: Exception, expected: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbm.transfer.cuda import kernel as cuda_kernel

    def launch(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cuda_kernel, "copy_pieces", {(1,): launch})
    pieces = pieces_of(DeviceCache.from_tensors({"a": torch.zeros(BLOCKS, 8)}, BLOCKS).regions)
    method = cuda_kernel.KernelCopy(torch.device("cpu"))
    with pytest.raises(expected) as caught:
        method.begin(pieces, [(0, 0)], SlotRows(4096, 4096), to_device=False, stream=0)
    assert str(caught.value) == text


def compiled(
    capability: int, *, piece_bytes: int, alignment: int, to_device: bool = True
) -> tuple[list[str], list[str]]:
    """(loads, stores) of global memory in the PTX of the kernel, as the launcher would ask for it."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvbm.transfer.cuda.kernel import _WORDS, CHUNK_BYTES, WARPS, copy_pieces

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
