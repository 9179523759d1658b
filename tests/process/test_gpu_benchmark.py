"""The GPU benchmark runs from end to end, here on a CPU, and needs nothing but torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rigs.checkout import ROOT

pytest.importorskip("torch", reason="the benchmark copies torch tensors; torch is not installed")

BARE = """
import sys

class OnlyTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("msgspec", "blake3", "xxhash", "prometheus_client", "rich", "safetensors", "typer"):
            raise ImportError(f"{name} is not on a bare machine")

sys.meta_path.insert(0, OnlyTorch())
sys.path[0:0] = [sys.argv[1] + "/src", sys.argv[1] + "/benchmarks"]
sys.argv[0:2] = ["gpu.py"]
import gpu
raise SystemExit(gpu.main())
"""


def test_it_rehearses_without_our_dependencies(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, "-c", BARE, str(ROOT), "--rehearse", "--output", str(output)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    written = json.loads(output.read_text())
    assert written["wrong"] == []
    told = {row["what"] for row in written["rows"]}
    assert {
        "both ways at once",
        "decode step",
        "4 KiB pieces, chosen (cpu), up",
        "one copy, down",
        "one copy from the arena",
    } <= told
    assert "prefill step, 48 tokens before it loaded layer by layer" in told
    # What needs more than torch is named, with the reason.
    assert set(written["left_out"]) == {
        "outputs with and without eviction",
        "first tokens with and without KVBM",
    }
    assert all("is not on a bare machine" in why for why in written["left_out"].values())
    # The table comes last, and says where it was made.
    assert "device CPU, rehearsal" in answer.stdout.splitlines()[-len(told) - 4]


def test_with_our_dependencies_it_runs_the_engine_too(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--rehearse", "--output", str(output)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    written = json.loads(output.read_text())
    assert written["wrong"] == []
    # NIXL is not installed everywhere.
    assert set(written["left_out"]) <= {"outputs with disk alone, directly"}
    values = {row["what"]: row["value"] for row in written["rows"]}
    for tier in ("host memory", "host memory and disk", "disk alone"):
        assert values[f"blocks that came back from {tier}"] > 0
    assert values["first token after 128 tokens, from host memory"] > 0


def test_without_a_card_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a card")
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2
    assert "no CUDA card is there" in answer.stderr.splitlines()[-1]
