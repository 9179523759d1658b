"""Every table of a manager is within its bound, and together they account for the memory that a load takes."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm.admin_protocol import Describe, Description, TableReport
from kvbm.hashing import chain_keys, join_keys
from kvbm.manager import history
from kvbm.protocol import Commit, Finished, Release, Reserve
from rigs.manager import LAYOUT, Client, ManagerBench, connect_operator

OTHER_BYTES = 512 << 10
"""What a load takes beside tables: metrics, labels, models that are fitted."""


def ask(leader: Client, number: int, chance: random.Random) -> None:
    """A request of a named session that nobody has asked before, and its store."""
    tokens = [chance.randrange(1 << 20) for _ in range(8 * LAYOUT.block_tokens)]
    keys, tenant = chain_keys(bytes(32), tokens, LAYOUT.block_tokens), f"tenant-{number % 7}"
    hint = {"session": f"session-{number % 300}", "retain": [{"end": 32, "min_ttl": 60, "max_ttl": 600}]}
    leader.take()
    leader.lookup(number, keys, tenant=tenant, request=f"request-{number}", prompt=keys[0], hint=hint)
    leader.send(Release(lookup=number))
    leader.send(Reserve(store=number, parent=b"", keys=join_keys(keys), tenant=tenant))
    leader.send(Commit(store=number))
    leader.send(Finished(key=keys[-1], output_tokens=9))
    leader.bench.tick(0.5)


def tables(manager: ManagerBench) -> dict[str, TableReport]:
    """As an operator's command gets them."""
    admin = connect_operator(manager)
    admin.send(Describe())
    found = admin.expect(Description).tables
    admin.close()
    manager.step()
    return {each.name: each for each in found}


@pytest.mark.slow
@pytest.mark.parametrize("disk_blocks", [0, 256])
def test_the_tables_account_for_the_memory_of_a_load(
    make_manager: Callable[..., ManagerBench], tmp_path: Path, disk_blocks: int
) -> None:
    """A table that grows and is not listed is found by what it takes."""
    manager = make_manager(host_blocks=128, disk_blocks=disk_blocks, disk_dir=str(tmp_path / "disk"))
    leader, _ = manager.engine()
    chance = random.Random(1)
    for number in range(50):  # what is made once
        ask(leader, number, chance)
    before = tables(manager)
    gc.collect()
    tracemalloc.start(1)
    try:
        for number in range(50, 850):
            ask(leader, number, chance)
        gc.collect()
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    after = tables(manager)
    assert all(each.count <= each.most for each in after.values()), after
    listed_bytes = sum((each.count - before[name].count) * each.entry_bytes for name, each in after.items())
    assert grown_bytes <= listed_bytes + OTHER_BYTES, (grown_bytes, after)
    assert listed_bytes <= 2 * grown_bytes, "and not for much more"


def test_full_tables_stay_as_large_as_they_are(
    make_manager: Callable[..., ManagerBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REQUESTS_MAX", "PROMPTS_MAX"):
        monkeypatch.setattr(history, name, 16)
    manager = make_manager(host_blocks=32)
    leader, _ = manager.engine()
    chance = random.Random(2)
    for number in range(40):
        ask(leader, number, chance)
    first = tables(manager)
    for number in range(40, 120):
        ask(leader, number, chance)
    last = tables(manager)
    for name in ("blocks in host", "latest requests"):
        assert last[name].count == first[name].count > 0
    assert all(each.count <= each.most for each in last.values())
