"""Copy threads beside an engine's: they keep out of its OpenMP team and off its core, and change neither."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kvbm.transfer import CpuCopier, DeviceCache, make_copier

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


@pytest.mark.parametrize("inference", [False, True])
def test_the_engines_own_thread_copies_what_one_thread_is_enough_for(
    monkeypatch: pytest.MonkeyPatch, inference: bool
) -> None:
    views = {"a": torch.randint(0, 255, (64, 1 << 16), dtype=torch.uint8)}
    before = views["a"].clone()
    arena = torch.zeros(64, 1 << 16, dtype=torch.uint8)
    copier = make_copier(DeviceCache.from_tensors(views, 64), arena, by_engine=True)
    assert isinstance(copier, CpuCopier)
    submitted = []
    submit = copier._pool.submit
    monkeypatch.setattr(copier._pool, "submit", lambda *task: submitted.append(task) or submit(*task))
    with torch.inference_mode(inference):
        for blocks, threads in ((1, 0), (3, 0), (64, 2)):
            copier.store([(block, 63 - block) for block in range(blocks)])
            assert torch.equal(arena.flip(0)[:blocks], before[:blocks])
            views["a"].zero_()
            copier.load([(block, 63 - block) for block in range(blocks)])
            assert torch.equal(views["a"][:blocks], before[:blocks])
            views["a"].copy_(before)
            assert len(submitted) == 2 * threads
    copier.close()
