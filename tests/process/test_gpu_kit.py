"""The kit for a CUDA machine without a network: parts from made-up wheels, unpacking, resuming, limits, verdicts."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from benchmarks.gpu_kit import building, cases, outputs, selection, table
from benchmarks.gpu_kit.building import Refused
from benchmarks.gpu_kit.cases import Case
from benchmarks.gpu_kit.ledger import FAILED, LATE, LEFT_OUT, RIGHT, WRONG, Ledger
from benchmarks.gpu_kit.running import ROOT, Runner
from benchmarks.gpu_kit.selection import CUDA_PARTS, Part, chosen, part_bytes_max
from benchmarks.gpu_kit.unpacking import Site

HERE = list(sys.version_info[:2])
PARTS = (Part("big", ("vllm/big.so",)), Part("python", ("",), wheels=True))


def wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(building, "PYTHON", tuple(HERE))
    engine = wheel(tmp_path / "vllm-0.whl", {"vllm/__init__.py": b"x = 1", "vllm/big.so": b"\0" * 9000})
    other = wheel(
        tmp_path / "other-1.whl",
        {"other.py": b"y", "other-1.data/purelib/below.py": b"z", "other-1.data/scripts/run": b"no"},
    )
    return building.build(engine, [other], tmp_path / "parts", "cuda", 0, PARTS)


def test_each_file_of_the_wheel_is_in_one_part_or_left_out() -> None:
    names = [
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        "vllm/vllm_flash_attn/flash_attn_interface.py",
        "vllm/_flashmla_C.abi3.so",
        "vllm/_moe_C_stable_libtorch.abi3.so",
        "vllm/third_party/deep_gemm/_C_extension.abi3.so",
        "vllm/third_party/pynvml.py",
        "vllm/vllm-rs",
        "vllm-0.32.0.dist-info/METADATA",
    ]
    assert chosen(names, CUDA_PARTS) == {
        "kernels": [names[0]],
        "attention": [names[1], names[4]],
        "experts": [names[5]],
        "python": [names[3], names[7], names[9]],
    }


def test_a_wheel_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'kernels'"):
        chosen(["vllm/__init__.py"], CUDA_PARTS)


def test_a_part_and_the_tree_travel_together() -> None:
    assert part_bytes_max(1 << 20) == selection.PART_BYTES_MAX
    assert part_bytes_max(10 << 20) == 54 << 20


def test_a_part_that_is_too_large_is_refused(tmp_path: Path) -> None:
    engine = wheel(tmp_path / "vllm-0.whl", {"vllm/__init__.py": b"x", "vllm/big.so": b"\0"})
    with pytest.raises(Refused, match=r"part-1-big\.tar\.xz: \d+ bytes, at most 10 "):
        building.build(engine, [], tmp_path / "parts", "cuda", (64 << 20) - 10, PARTS)


def test_parts_are_kept_while_the_wheels_are_the_same(parts: list[Path], tmp_path: Path) -> None:
    before = [path.stat().st_mtime_ns for path in parts]
    engine, other = tmp_path / "vllm-0.whl", tmp_path / "other-1.whl"
    assert building.build(engine, [other], tmp_path / "parts", "cuda", 0, PARTS) == parts
    assert [path.stat().st_mtime_ns for path in parts] == before
    wheel(engine, {"vllm/__init__.py": b"x = 2", "vllm/big.so": b"\1"})
    building.build(engine, [other], tmp_path / "parts", "cuda", 0, PARTS)
    assert [path.stat().st_mtime_ns for path in parts] != before


def test_parts_come_together_in_any_order(parts: list[Path], tmp_path: Path) -> None:
    site = Site(tmp_path / "kit")
    assert (site.missing(), site.mode()) == (["any"], "")
    site.unpack(parts[1])
    assert (site.missing(), site.mode()) == (["big"], "cuda")
    site.unpack(parts[0])
    assert site.missing() == []
    found = {str(path.relative_to(site.modules)) for path in site.modules.rglob("*") if path.is_file()}
    assert found == {"vllm/__init__.py", "vllm/big.so", "other.py", "below.py"}
    assert "was there" in site.unpack(parts[0])


def test_a_part_cut_short_does_not_count(parts: list[Path], tmp_path: Path) -> None:
    site = Site(tmp_path / "kit")
    short = tmp_path / "short.tar.xz"
    short.write_bytes(parts[1].read_bytes()[:-40])
    with pytest.raises(Refused, match=r"damaged|cut short"):
        site.unpack(short)
    assert site.missing() == ["any"]
    site.unpack(parts[1])
    assert site.missing() == ["big"]


def test_what_is_no_part_of_this_kit_is_refused(parts: list[Path], tmp_path: Path) -> None:
    site = Site(tmp_path / "kit")
    with pytest.raises(Refused, match="no part of a kit"):
        site.unpack(tmp_path / "vllm-0.whl")
    site.unpack(parts[0])
    engine = wheel(tmp_path / "vllm-0.whl", {"vllm/__init__.py": b"other", "vllm/big.so": b"\0"})
    others = building.build(engine, [], tmp_path / "others", "cuda", 0, PARTS)
    with pytest.raises(Refused, match="remove that folder"):
        site.unpack(others[1])


def test_a_part_for_another_python_is_refused(tmp_path: Path) -> None:
    engine = wheel(tmp_path / "vllm-0.whl", {"vllm/__init__.py": b"x", "vllm/big.so": b"\0"})
    manifest = {"kit": "k", "mode": "cuda", "python": [2, 7], "vllm": "0", "part": "big", "parts": ["big"]}
    target = tmp_path / "part.tar.xz"
    building._write(target, manifest, building._members(engine, ["vllm/big.so"], [], "cuda"))
    with pytest.raises(Refused, match=r"Python 2\.7"):
        Site(tmp_path / "kit").unpack(target)


def test_nothing_is_written_outside(tmp_path: Path) -> None:
    target = tmp_path / "part.tar.xz"
    manifest = {"kit": "k", "mode": "cuda", "python": HERE, "vllm": "0", "part": "big", "parts": ["big"]}
    building._write(target, manifest, iter([("../../escaped.py", b"x")]))
    with pytest.raises(Refused, match="OutsideDestination"):
        Site(tmp_path / "deep" / "kit").unpack(target)
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
    (folder / "parts" / "python.json").write_text(
        json.dumps({"mode": "cpu", "parts": ["python"], "part": "python"})
    )
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
    told = table.outcome(ledger.rows, all_cases)
    assert told.wrong
    assert told.verdict.startswith(
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
    assert later.done("check/import")
    assert not later.done("check/import", again=True)


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


def test_rows_come_with_the_results_and_back_to_a_fresh_machine(kit: Path, tmp_path: Path) -> None:
    ledger = Ledger(kit, tmp_path / "results")
    ledger.add({"case": "a/1", "state": RIGHT})
    carried = tmp_path / "results" / "results.jsonl"
    carried.write_text(carried.read_text() + '{"case": "a/2", "st')  # cut short
    fresh = Ledger(tmp_path / "fresh", None, carried)
    assert fresh.done("a/1")
    assert not fresh.done("a/2")
    assert json.loads((tmp_path / "fresh" / "results.jsonl").read_text())["case"] == "a/1"


# ---- what the cases say


def test_cases_are_in_order_and_short_enough() -> None:
    everything = cases.all_cases()
    names = [case.name for case in everything]
    assert len(set(names)) == len(names)
    assert sorted(names, key=lambda name: cases.STEPS.index(name.split("/")[0])) == names
    for number, case in enumerate(everything):
        assert case.limit_s <= 500
        assert set(case.needs) | ({case.reference} - {""}) <= set(names[:number])


def answers(**changes: object) -> dict[str, object]:
    data: dict[str, object] = {
        "answers": {"talk 0, turn 1": [1, 2], "talk 0, turn 2": [3]},
        "likelihoods": {"talk 0, turn 1": [-1.0, -2.0], "talk 0, turn 2": [-3.0]},
        "tokens from host": 64,
        "tokens from disk": 0,
        "faults": 0,
    }
    return {**data, **changes}


OTHER = {"talk 0, turn 1": [1, 9], "talk 0, turn 2": [3]}


@pytest.mark.parametrize(
    ("options", "changes", "ended", "why"),
    [
        ({"kvbm": True}, {}, (), ""),
        ({"kvbm": True}, {"answers": OTHER}, (), "1 of 2 answers differ, first talk 0, turn 1"),
        ({"kvbm": True}, {"tokens from host": 0}, (), "nothing was loaded"),
        ({"kvbm": True, "disk": True}, {}, (), "nothing was loaded from disk"),
        ({"kvbm": True, "fault": "damage"}, {"answers": OTHER, "faults": 3}, (), ""),
        ({"kvbm": True, "fault": "damage"}, {"faults": 3}, (), "damaged KV changed no answer"),
        ({"kvbm": True, "fault": "fail", "every": 2}, {}, (), "no fault was injected"),
        ({"kvbm": True, "fault": "fail", "every": 1}, {"tokens from host": 0, "faults": 5}, (), ""),
        ({"kvbm": True}, {}, ("talk 0, turn 2",), "1 requests ended with an error"),
        (
            {"kvbm": True, "fault": "fail", "every": 3, "policy": "fail"},
            {"answers": {"talk 0, turn 1": [1], "talk 0, turn 2": [8]}, "faults": 1},
            ("talk 0, turn 1",),
            "",
        ),
        (
            {"kvbm": True, "fault": "fail", "every": 3, "policy": "fail"},
            {"answers": {"talk 0, turn 1": [9], "talk 0, turn 2": [8]}, "faults": 1},
            ("talk 0, turn 1",),
            "1 of 2 answers differ",
        ),
    ],
)
def test_what_makes_a_case_right(
    options: dict[str, object], changes: dict[str, object], ended: tuple[str, ...], why: str
) -> None:
    row = outputs.judge(options, answers(**changes), set(ended), answers())
    assert row["state"] == (WRONG if why else RIGHT)
    assert row["why"].startswith(why)


def test_the_table_names_every_case_and_what_to_do() -> None:
    everything = cases.all_cases()
    rows = {
        "check/machine": {
            "case": "check/machine",
            "state": WRONG,
            "why": "lacks a C compiler",
            "seconds": 1.0,
        }
    }
    told = table.outcome(rows, everything)
    assert told.verdict.startswith("vLLM cannot run here: lacks a C compiler")
    assert told.advice == ["check/machine is wrong: lacks a C compiler"]
    text = table.text(rows, everything)
    assert all(f"| {case.name} |" in text for case in everything)


def test_the_commands_refuse_what_cannot_be(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_kit", "step", "check", "--folder", str(tmp_path / "kit")]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2
    assert "unpack first" in answer.stderr


def test_the_manifest_comes_first(parts: list[Path]) -> None:
    """So that it is read without reading the whole part."""
    with tarfile.open(parts[0]) as archive:
        assert archive.getnames()[0] == building.MANIFEST
