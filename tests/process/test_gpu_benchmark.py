"""The GPU benchmark runs from end to end, here on a CPU, and needs nothing but torch. What fails costs its own part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rigs.checkout import ROOT

pytestmark = pytest.mark.slow

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
GPU = [sys.executable, str(ROOT / "benchmarks/gpu.py")]


def rehearse(output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*GPU, "--rehearse", "--output", str(output), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


def parts_of(output: Path) -> dict[str, Any]:
    parts: dict[str, Any] = json.loads(output.read_text())["parts"]
    return parts


def rows_of(parts: dict[str, Any]) -> dict[str, float]:
    return {row["what"]: row["value"] for part in parts.values() for row in part["rows"]}


def left_out_of(parts: dict[str, Any]) -> dict[str, str]:
    return {what: why for part in parts.values() for what, why in part["left_out"].items()}


def test_it_rehearses_without_our_dependencies(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, "-c", BARE, str(ROOT), "--rehearse", "--output", str(output)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert json.loads(output.read_text())["wrong"] == []
    parts = parts_of(output)
    assert {part["state"] for part in parts.values()} == {"finished"}
    # A process for each way of copying, and the bytes were looked at in each.
    assert parts["bytes:cpu"]["checks"] == parts["bytes:auto"]["checks"] == 13
    assert parts["descriptors:cpu"]["checks"] == 3
    told = rows_of(parts)
    assert {
        "both ways at once",
        "decode step",
        "4 KiB pieces, chosen (cpu), up",
        "4 KiB pieces, chosen, with the host's part, up",
        "one copy, down",
        "one copy from the arena",
        "two processes at one memory, both prepared after",
        "decode step beside page locks, 99th percentile",
        "block-outermost costs attention",
        "64 pieces of 16 KiB, cpu, up",
        "24 blocks loaded by a plain thread, the engine's thread bound to Python",
        "captured beside the preparation of untouched memory",
        "prefill step, 48 tokens before it loaded layer by layer",
    } <= set(told)
    # What needs more than torch is named, with the reason.
    assert set(left_out_of(parts)) == {
        "outputs with and without eviction",
        "first tokens with and without KVBM",
        "loads through the worker",
        "decode steps with stores through the worker",
    }
    assert all("is not on a bare machine" in why for why in left_out_of(parts).values())
    # The table comes last, says where it was made, and ends with what is to be done.
    table = answer.stdout.partition("device CPU, rehearsal")[2].splitlines()
    assert "wrong: nothing" in table
    missed = [row["what"] for part in parts.values() for row in part["rows"] if not row["met"]]
    to_do = table[table.index("what to do:" if missed else "what to do: nothing") + 1 : -1]
    assert [line.strip().split(":")[0] for line in to_do][: len(missed)] == missed


def test_with_our_dependencies_it_runs_the_worker_and_the_engine_too(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    answer = rehearse(output, "--only", "loads-busy", "decode-mover", "outputs", "hits")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert json.loads(output.read_text())["wrong"] == []
    parts = parts_of(output)
    # NIXL is not installed everywhere.
    assert set(left_out_of(parts)) <= {"outputs with disk alone, directly"}
    values = rows_of(parts)
    for tier in ("host memory", "host memory and disk", "disk alone"):
        assert values[f"blocks that came back from {tier}"] > 0
    assert values["first token after 128 tokens, from host memory"] > 0
    assert values["24 blocks loaded by the worker, the engine's thread bound to Python"] > 0
    assert "decode step, 8 blocks stored beside each by the worker, 4 KiB pieces (LHBNC)" in values
    assert parts["loads-busy"]["checks"] == 4
    assert values["24 blocks loaded by the worker, 4 KiB pieces (LHBNC), the engine's thread idle"] > 0
    # The verdict is on what a busy interpreter leaves, and on long loads alone.
    barred = [row["what"] for row in parts["loads-busy"]["rows"] if row["bar"] is not None]
    assert barred == [
        f"24 blocks loaded by the worker, the engine's thread {title}"
        for title in ("idle", "bound to Python")
    ]


def test_what_one_part_runs_into_costs_that_part(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    wanted = ("--only", "bytes:cpu", "captures", "both-ways", "copies", "two-processes")
    faults = ("bytes:cpu=crash", "captures=hang", "both-ways=raise")
    answer = rehearse(output, *wanted, *(f"--fault={fault}" for fault in faults))
    assert answer.returncode == 1
    assert json.loads(output.read_text())["wrong"] == [
        "part bytes:cpu ended early: killed by SIGSEGV, in: LBNHC",
        "part captures ended early: it took over 1 s",
        "part both-ways ended early: RuntimeError: a fault that was asked for",
    ]
    parts = parts_of(output)
    assert [row["what"] for row in parts["both-ways"]["rows"]] == ["both ways at once"]
    assert parts["copies"]["state"] == parts["two-processes"]["state"] == "finished"
    # A way of copying that ended a process is not tried by the parts that are about all of them.
    told = rows_of(parts)
    assert "64 KiB pieces, chosen (cpu), up" in told
    assert "64 KiB pieces, cpu, up" not in told
    assert "bytes:cpu is wrong: do not let that way copy" in answer.stdout
    # Where it hung, it says.
    assert "in live_within_a_capture" in answer.stderr

    # The next call makes up for them alone. What is finished is done again only where that is asked for.
    answer = rehearse(output, *wanted)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert begun(answer) == ["bytes:cpu", "captures", "both-ways"]
    assert {part["state"] for part in parts_of(output).values()} == {"finished"}
    assert begun(rehearse(output, "--only", "captures", "--again")) == ["captures"]


def begun(answer: subprocess.CompletedProcess[str]) -> list[str]:
    """The parts that a call began, in order."""
    lines = answer.stdout.partition("\n\n")[0].splitlines()
    return [line.split()[0] for line in lines if not line.startswith(" ")]


def test_a_call_that_is_cut_off_leaves_what_it_has_and_no_process(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [
        *GPU,
        "--rehearse",
        "--output",
        str(output),
        "--only",
        "arena",
        "layouts",
        "--fault=arena=hang",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as call:
        assert call.stdout is not None
        while "arena, pages touched" not in (line := call.stdout.readline()):
            assert line, "it ended before the part told anything"
        call.kill()
        # The part's process has the other end too: this returns when that has gone.
        call.communicate(timeout=60)
    answer = rehearse(output, "--only", "arena", "layouts")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert sorted(begun(answer)) == ["arena", "layouts"]
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]


def test_what_there_is_no_time_for_is_left_to_another_call(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    answer = rehearse(output, "--limit", "0", "--only", "arena", "bytes")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert parts_of(output) == {}
    assert "left for another call with the same --output: bytes:cpu, bytes:auto, arena" in answer.stdout


def test_a_file_of_another_machine_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    output.write_text(json.dumps({"machine": {"device": "another"}, "parts": {}}))
    answer = rehearse(output)
    assert answer.returncode == 2
    assert "is of another machine, {'device': 'another'}" in answer.stderr


def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gpu_report import Report

    output = tmp_path / "gpu.json"
    Report(output).read()
    for text in ("", "[]", '{"machine": {}}', '{"machine": {}, "parts": {"copies": {"rows": [{}]}}}'):
        output.write_text(text)
        with pytest.raises(ValueError, match=r"gpu\.json is not what an earlier call has left"):
            Report(output).read()


def test_without_a_card_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a card")
    answer = subprocess.run(GPU, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2
    assert "no CUDA card is there" in answer.stderr.splitlines()[-1]
