"""Copy threads beside an engine's: they keep out of its OpenMP team and off its core, and change neither."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kvbm.transfer import CpuCopier, DeviceCache

ALONE = """
import os, threading, torch
from kvbm.transfer import CpuCopier, DeviceCache

def counts():
    seen = [torch.get_num_threads()]
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    return seen, os.sched_getaffinity(0)

torch.set_num_threads(3)
before = counts()
cache = DeviceCache.from_tensors({"a": torch.zeros(9, 8)}, 9)
copier = CpuCopier(cache, torch.zeros(2, 64, dtype=torch.uint8))
copier.store([(0, 0)])
assert copier._pool.submit(torch.get_num_threads).result() == 1
assert before[0] == [3, 3], before
assert counts() == before, (counts(), before)
copier.close()
"""


def test_the_engines_thread_settings_stay_as_they_were() -> None:
    """A copier's threads run alone, and neither the caller nor threads made later notice."""
    # A process of its own: what another test did to torch's defaults would hide a change of them.
    ended = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core leaves nothing to bind to")
def test_copy_threads_leave_the_core_that_the_engine_is_bound_to() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        cache = DeviceCache.from_tensors({"a": torch.zeros(9, 8)}, 9)
        copier = CpuCopier(cache, torch.zeros(2, 64, dtype=torch.uint8))
        assert len(copier._pool.submit(os.sched_getaffinity, 0).result()) > 1
        assert os.sched_getaffinity(0) == {min(before)}
        copier.close()
    finally:
        os.sched_setaffinity(0, before)
