"""A copy that hangs does not keep its process alive: the manager gives its slots to others once that has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the copier copies torch tensors; torch is not installed")

from rigs.checkout import ROOT

DEADLINE_S = 60.0


def test_a_process_ends_while_a_copy_of_slots_that_are_not_locked_hangs(libcuda_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "process.hung_copy_child", str(libcuda_path)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (child.stdout, child.returncode) == ("a copy hangs\n", 0), child.stderr
