"""`kvbm bench` names the benchmarks that the checkout has."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest

from kvbm.cli import bench
from rigs.checkout import ROOT


@pytest.mark.skipif(not bench.parts(ROOT), reason="a source distribution has no benchmarks")
def test_the_help_names_every_benchmark_there_is():
    table = runpy.run_path(str(ROOT / "benchmarks/__main__.py"))["PARTS"]
    assert list(bench.parts(ROOT)) == list(table)
    command = [sys.executable, "-m", "kvbm.cli.main", "bench", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name, line in bench.parts(ROOT).items():
        assert f"    {name:<10} {line}" in text
    assert f"{', '.join(table)}." in " ".join(text.split())


def test_another_checkout_has_other_benchmarks(tmp_path):
    assert bench.parts(tmp_path) == {}
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/__main__.py").write_text('PARTS = {"wire": "benchmarks.wire_speed"}\n')
    (tmp_path / "benchmarks/wire_speed.py").write_text('"""How fast the wire is.\n\nMore.\n"""\n')
    assert bench.parts(tmp_path) == {"wire": "How fast the wire is."}
