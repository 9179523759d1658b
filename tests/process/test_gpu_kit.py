"""The kit for a CUDA card: parts of made-up wheels, resuming, limits, verdicts, and copies rehearsed on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu_kit import cases, outputs, packing, table
from benchmarks.gpu_kit.cases import Case
from benchmarks.gpu_kit.ledger import FAILED, LATE, LEFT_OUT, RIGHT, WRONG, Ledger, make_row
from benchmarks.gpu_kit.packing import Refused, Site
from benchmarks.gpu_kit.running import ROOT, Runner

KIT = [sys.executable, "-m", "benchmarks.gpu_kit"]


def make_wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def make_wheels(folder: Path, content: bytes = b"x = 1") -> tuple[Path, list[Path]]:
    """A made-up vLLM, too large for one part, and another wheel."""
    engine = {"vllm/__init__.py": content, "vllm/big.so": os.urandom(9000), "vllm/vllm-rs": b"no"}
    other = {"other.py": b"y", "other-1.data/purelib/below.py": b"z", "other-1.data/scripts/run": b"no"}
    return make_wheel(folder / "vllm-0.whl", engine), [make_wheel(folder / "other-1.whl", other)]


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(packing, "PYTHON", sys.version_info[:2])
    monkeypatch.setattr(packing, "PART_BYTES", 6000)
    found = packing.build(*make_wheels(tmp_path), tmp_path / "parts", "cuda")
    assert len(found) == 2
    assert max(part.stat().st_size for part in found) == 6000
    return found


def test_parts_are_kept_while_the_wheels_are_the_same(parts: list[Path], tmp_path: Path) -> None:
    before = [path.stat().st_mtime_ns for path in parts]
    engine, others = tmp_path / "vllm-0.whl", [tmp_path / "other-1.whl"]
    assert packing.build(engine, others, tmp_path / "parts", "cuda") == parts
    assert [path.stat().st_mtime_ns for path in parts] == before
    later = packing.build(*make_wheels(tmp_path, b"x = 2"), tmp_path / "parts", "cuda")
    assert sorted((tmp_path / "parts").iterdir()) == later != parts


def test_parts_come_together_in_any_order(parts: list[Path], tmp_path: Path) -> None:
    site = Site(tmp_path / "kit")
    assert (site.missing(), site.mode()) == (0, "")
    assert "1 missing" in site.take(parts[1])
    assert (site.missing(), site.mode()) == (1, "cuda")
    assert "all 2 parts are unpacked" in site.take(parts[0])
    assert site.missing() == 0
    found = {str(path.relative_to(site.modules)) for path in site.modules.rglob("*") if path.is_file()}
    assert found == {"vllm/__init__.py", "vllm/big.so", "other.py", "below.py"}


def test_damaged_parts_are_refused_and_carried_again(parts: list[Path], tmp_path: Path) -> None:
    site = Site(tmp_path / "kit")
    site.take(parts[0])
    whole = parts[1].read_bytes()
    parts[1].write_bytes(whole[:-40])
    with pytest.raises(Refused, match="damaged"):
        site.take(parts[1])
    parts[1].write_bytes(whole)
    for part in parts:
        site.take(part)
    assert (site.modules / "vllm/big.so").exists()


def test_what_is_no_part_of_this_kit_is_refused(parts: list[Path], tmp_path: Path) -> None:
    site = Site(tmp_path / "kit")
    with pytest.raises(Refused, match="no part of a kit"):
        site.take(tmp_path / "vllm-0.whl")
    site.take(parts[0])
    others = packing.build(*make_wheels(tmp_path, b"other"), tmp_path / "others", "cuda")
    with pytest.raises(Refused, match="another kit"):
        site.take(others[1])
    other_python = parts[0].with_name(parts[0].name.replace("-py3.", "-py2."))
    with pytest.raises(Refused, match=r"for Python 2\."):
        site.take(parts[0].rename(other_python))


def test_nothing_is_written_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PYTHON", sys.version_info[:2])
    engine = make_wheel(tmp_path / "vllm-0.whl", {"../../escaped.py": b"x"})
    parts = packing.build(engine, [], tmp_path / "parts", "cuda")
    with pytest.raises(Refused, match="no file inside"):
        Site(tmp_path / "deep" / "kit").take(parts[0])
    assert not list(tmp_path.rglob("escaped.py"))


# ---- running: cases of made-up modules


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A kit of one part, with which cases can run."""
    folder = tmp_path / "kit"
    (folder / "parts").mkdir(parents=True)
    (folder / "parts" / "gpu-kit-cpu-py3.12-0123456789ab-1-of-1.part").touch()
    return folder


def imports(name: str, limit_s: float = 60.0, needs: tuple[str, ...] = ()) -> Case:
    return Case(name, "probes", limit_s, {"probe": "imports"}, needs=needs)


def fake_module(kit: Path, name: str, text: str) -> None:
    (kit / "site" / name).mkdir(parents=True)
    (kit / "site" / name / "__init__.py").write_text(text)


def test_an_import_that_fails_is_the_verdict(kit: Path) -> None:
    """The rest is left out, and the verdict says what could not be imported and why."""
    fake_module(kit, "vllm", "raise ImportError('undefined symbol: torch_exception_get_what')")
    lines: list[str] = []
    ledger = Ledger(kit)
    all_cases = [imports("check/import"), Case("outputs/x", "outputs", 60)]
    assert Runner(kit, ledger, lines.append).run(all_cases) == []
    assert [row["state"] for row in ledger.rows.values()] == [WRONG, LEFT_OUT]
    outcome = table.judge(ledger.rows, all_cases)
    assert outcome.wrong
    assert outcome.verdict.startswith(
        "vLLM cannot run here: vllm cannot be imported: ImportError: undefined symbol"
    )
    assert "check/import is wrong" in ledger.rows["outputs/x"]["why"]


def test_a_case_that_hangs_ends_at_its_limit_and_is_not_run_again(kit: Path) -> None:
    fake_module(kit, "vllm", "import threading; threading.Event().wait()")
    ledger = Ledger(kit)
    case = imports("check/import", limit_s=1.5)
    Runner(kit, ledger, str).run([case])
    assert ledger.rows["check/import"]["state"] == LATE
    later = Ledger(kit)
    assert later.is_done("check/import")
    assert not later.is_done("check/import", again=True)


def test_a_case_that_ends_early_leaves_the_end_of_its_log(kit: Path) -> None:
    fake_module(kit, "vllm", "import os; print('last words', flush=True); os._exit(7)")
    ledger = Ledger(kit)
    Runner(kit, ledger, str).run([imports("check/import")])
    row = ledger.rows["check/import"]
    assert (row["state"], row["why"]) == (FAILED, "status 7")
    assert row["log"][-1] == "last words"


def test_what_has_no_time_left_waits_for_the_next_call(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ran = Clock(), []

    def one(self: Runner, case: Case, limit_s: float) -> dict[str, object]:
        ran.append((case.name, limit_s))
        clock.now_s += 100.0
        return {"case": case.name, "state": RIGHT, "seconds": 100.0}

    monkeypatch.setattr(Runner, "_one", one)
    three = [imports("a/1", 300.0), imports("a/2", 300.0), imports("a/3", 50.0)]
    assert Runner(kit, Ledger(kit), str, clock).run(three, 350.0) == ["a/2", "a/3"]
    # The next call finds what the first left, on disk.
    assert Runner(kit, Ledger(kit), str, clock).run(three, 350.0) == []
    assert Runner(kit, Ledger(kit), str, clock).run(three, 350.0) == []
    assert [name for name, _ in ran] == ["a/1", "a/2", "a/3"]


def test_a_budget_below_the_first_limit_shortens_it(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def one(self: Runner, case: Case, limit_s: float) -> dict[str, object]:
        limits.append(limit_s)
        return {"case": case.name, "state": RIGHT, "seconds": 1.0}

    monkeypatch.setattr(Runner, "_one", one)
    Runner(kit, Ledger(kit), str, Clock()).run([imports("a/1", 300.0)], 60.0)
    assert limits == [60.0]


def test_a_call_that_is_killed_leaves_no_process(kit: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    fake_module(
        kit, "vllm", f"open({str(pipe)!r}, 'w').write('x'); import threading; threading.Event().wait()"
    )
    command = [*KIT, "step", "check", "--folder", str(kit)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as call:
        assert pipe.read_text() == "x"  # the case is in it
        call.kill()
        call.communicate()
    cases_left = subprocess.run(["pgrep", "-f", f"child probes {kit}"], capture_output=True, text=True)
    assert cases_left.stdout == ""
    assert Ledger(kit).is_done("check/machine")


# ---- what the cases say


def test_cases_are_in_order_and_short_enough() -> None:
    everything = cases.all_cases()
    names = [case.name for case in everything]
    assert len(set(names)) == len(names)
    assert sorted(names, key=lambda name: cases.STEPS.index(name.split("/")[0])) == names
    for number, case in enumerate(everything):
        assert case.limit_s <= 500
        assert set(case.needs) | ({case.reference} - {""}) <= set(names[:number])


def answers(**changes: object) -> dict[str, Any]:
    data: dict[str, Any] = {
        "answers": {"talk 0, turn 1": [1, 2], "talk 0, turn 2": [3]},
        "tokens from host": 64,
        "tokens from disk": 0,
        "faults": 0,
        "ended": 0,
    }
    return {**data, **changes}


OTHER = {"talk 0, turn 1": [1, 9], "talk 0, turn 2": [3]}


@pytest.mark.parametrize(
    ("options", "changes", "why"),
    [
        ({"kvbm": True}, {}, ""),
        ({"kvbm": True}, {"answers": OTHER}, "1 of 2 answers differ, first talk 0, turn 1"),
        ({"kvbm": True}, {"tokens from host": 0}, "nothing was loaded"),
        ({"kvbm": True, "disk": True}, {}, "nothing was loaded from disk"),
        ({"kvbm": True, "fault": "damage"}, {"answers": OTHER, "faults": 3}, ""),
        ({"kvbm": True, "fault": "damage"}, {"faults": 3}, "damaged KV changed no answer"),
        ({"kvbm": True, "fault": "fail", "every": 2}, {}, "no fault was injected"),
        ({"kvbm": True, "fault": "fail", "every": 2}, {"faults": 5}, ""),
        ({"kvbm": True}, {"ended": 1}, "1 requests ended with an error"),
    ],
)
def test_what_makes_a_case_right(options: dict[str, Any], changes: dict[str, Any], why: str) -> None:
    row = outputs.judge("engine/x", options, answers(**changes), answers())
    assert row["state"] == (WRONG if why else RIGHT)
    assert row["why"].startswith(why)


def test_the_table_has_the_findings_of_all_cases_and_what_to_do(tmp_path: Path) -> None:
    everything = cases.all_cases()
    rows = {
        "check/machine": {"case": "check/machine", **make_row(["lacks a C compiler"], {"card": "X"})},
        "copies/times-auto": make_row([], title="Copies", rows=[{"way": "auto", "GB/s": 51.23}]),
        "copies/times-rows": make_row([], title="Copies", rows=[{"way": "rows", "expected": "≥ 0.9"}]),
    }
    outcome = table.judge(rows, everything)
    assert outcome.verdict.startswith("vLLM cannot run here: lacks a C compiler")
    assert outcome.advice[0].startswith("check/machine: lacks a C compiler (report it")
    table.write(outcome, rows, everything, tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert "card X" in text
    assert "| way | expected | GB/s |\n| --- | --- | --- |\n| rows | ≥ 0.9 |  |\n| auto |  | 51.2 |" in text
    assert all(f"| {case.name} |" in text for case in everything)


def test_the_commands_refuse_what_cannot_be(kit: Path, parts: list[Path]) -> None:
    site = Site(kit.with_name("half"))
    site.take(parts[0])
    command = [*KIT, "step", "check", "--folder", str(kit.with_name("half"))]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stderr) == (2, "1 parts are missing: unpack them first\n")
    answer = subprocess.run([*KIT, "step", "x"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stderr) == (
        2,
        "step 'x': accepted are check, copies, locking, engine, comparison\n",
    )


# ---- copies and page locks, on the CPU

ONLY_TORCH = """
import sys

class OnlyTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("msgspec", "blake3", "xxhash", "prometheus_client", "rich", "safetensors", "typer"):
            raise ImportError(f"{name} is not on a bare machine")

sys.meta_path.insert(0, OnlyTorch())
"""


@pytest.mark.slow
def test_copies_and_locks_are_rehearsed_without_our_dependencies(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="copies are of torch tensors; torch is not installed")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(ONLY_TORCH)
    command = [
        *KIT,
        "step",
        "copies",
        "locking",
        "check",
        "--only",
        "copies",
        "locking",
        "machine",
        "--rehearse",
    ]
    command += ["--folder", str(tmp_path), "--output", str(tmp_path / "found")]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    ran = {
        name: row["state"] for name, row in Ledger(tmp_path / "found").rows.items() if row["state"] == RIGHT
    }
    assert list(ran) == [
        "check/machine",
        "copies/right-auto",
        "copies/times-auto",
        "locking/start",
        "locking/captures",
    ]
    text = (tmp_path / "found" / "table.md").read_text()
    assert "| pieces | direction | way | GB/s | of one copy | expected |" in text
    assert "the engine's start waits" in text


def test_where_locks_are_refused_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="copies are of torch tensors; torch is not installed")
    from benchmarks.gpu_kit import locking
    from benchmarks.gpu_kit.device import Device

    from kvbm.transfer.cuda.copier import CudaCopier
    from rigs.cuda_model import Model

    @contextmanager
    def refuse_locks(self: Device, cache: Any, arena: Any, *_: object, **__: object) -> Iterator[CudaCopier]:
        model = Model()
        model.own(region.device for region in cache.regions)
        model.refuse_locks_from = 0
        copier = CudaCopier(cache, arena, "batch", model.driver, model.device)
        copier.locks.begin()
        yield copier
        copier.close()

    monkeypatch.setattr(Device, "copier", refuse_locks)
    row = locking.measure({"rehearse": True, "options": {"what": "start"}})
    assert row["state"] == LEFT_OUT
    assert row["why"].startswith("page locks are refused: ")
    assert row["table"]["rows"] == []
