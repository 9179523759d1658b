"""What the parts hold: which files of vLLM's wheel, which other wheels, and how large a part may be."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

VLLM_VERSION = "0.32.0"
PYTHON = (3, 12)
PART_BYTES_MAX = 60_000_000
CALL_BYTES_MAX = 64 << 20
"""What one call carries: the tree and one part."""
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
GLIBC_MINORS = (35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS),
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
)
LEFT_OUT = (
    # Kernels that an H100 does not need for these models: FA3 takes FA2's place.
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/_deepselect_C.abi3.so",
    "vllm/_flashkda_C.abi3.so",
    # These two ask for symbols that torch 2.11 lacks; vLLM takes both for optional.
    "vllm/_qutlass_C.abi3.so",
    "vllm/third_party/deep_gemm/",
    # A front end in Rust, sources for compilers, pages for browsers.
    "vllm/vllm-rs",
    "vllm/third_party/fmha_sm100/",
    "vllm/entrypoints/serve/instrumentator/static/",
    "vllm/benchmarks/",
)


class Part(NamedTuple):
    """One part: its name, what of vLLM's wheel it takes, and whether the other wheels are in it.

    Each file of the wheel is in the first part that takes it; `prefixes` with an empty string takes all that is left.
    """

    name: str
    prefixes: tuple[str, ...]
    wheels: bool = False


CUDA_PARTS = (
    Part("kernels", ("vllm/_C_stable_libtorch.abi3.so",)),
    Part(
        "attention",
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm/_flashmla_C.abi3.so", "vllm/_flashmla_extension"),
    ),
    Part("experts", ("vllm/_moe_C_stable_libtorch.abi3.so",)),
    Part("python", ("",), wheels=True),
)
CPU_PARTS = (
    # One library for each instruction set, together as large as the kernels for a card.
    Part("kernels", ("vllm/_C.abi3.so",)),
    Part("kernels-avx512", ("vllm/_C_AVX512.abi3.so",)),
    Part("kernels-avx2", ("vllm/_C_AVX2.abi3.so",)),
    Part("python", ("",), wheels=True),
)
"""What stands in for the CUDA parts in a rehearsal."""


def chosen(names: Iterable[str], parts: tuple[Part, ...]) -> dict[str, list[str]]:
    """The wheel's files by part. Raises ValueError where a part would get nothing: the wheel is another one."""
    taken: dict[str, list[str]] = {part.name: [] for part in parts}
    for name in names:
        if name.endswith("/") or name.startswith(LEFT_OUT):
            continue
        part = next((part for part in parts if name.startswith(part.prefixes)), None)
        if part is not None:
            taken[part.name].append(name)
    for name, files in taken.items():
        if not files:
            raise ValueError(f"part {name!r}: this wheel of vLLM has no file for it")
    return taken


def part_bytes_max(tree_bytes: int) -> int:
    """How large a part may be beside a tree of that size."""
    return min(PART_BYTES_MAX, CALL_BYTES_MAX - tree_bytes)
