"""`make demo` itself, in its short form: real servers over HTTP, three runs, the same text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(420)
def test_the_short_demo_serves_the_same_text_from_every_tier(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvbm.cli.main", "demo", "--short", "--output", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["first_difference"] is None
    assert results["summary"]["plain"]["hit_tokens"]["host"] == 0
    assert results["summary"]["host"]["hit_tokens"]["host"] > 0
    assert results["summary"]["disk"]["hit_tokens"]["disk"] > 0
