"""Host memory changes its size while a real engine serves: no request fails, and the answers stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import engine_process, reach
from engine.launcher import Launcher, differences
from engine.tier_settings import BLOCK_BYTES, HOST_BLOCKS, disk, host
from engine.workload import again, some, workload
from kvbm.admin_protocol import Resize, Resized
from kvbm.client.admin import Admin, choose_manager
from kvbm.settings import Settings

NOTHING = {"requests": 0, "lookups": 0, "stores": 0}
SIZES = (900, 60, 400, 120)


@pytest.mark.parametrize("tiers", ["host", "host and disk"])
def test_resized_while_serving(
    launcher: Launcher, reference: dict[str, list[int]], tmp_path: Path, tiers: str
) -> None:
    engine = launcher.start(host() if tiers == "host" else disk(tmp_path, HOST_BLOCKS))
    assert differences(reference, engine.run(workload())) == []
    settings = Settings(runtime_dir=launcher.runtime_dir)
    path = choose_manager(settings)
    with Admin(path, settings) as admin:
        for turn, blocks in enumerate(SIZES):
            suffix = f"+{turn}"
            # Half of them are asked while it answers, the other two between.
            if turn % 2 == 0:
                engine.send(engine_process.run, again(workload(), suffix), engine_process.RUN_TIMEOUT_S)
            reply = admin.ask(Resize(host_bytes=blocks * BLOCK_BYTES), Resized, 60.0)
            assert (reply.refusal, reply.slots) == ("", blocks)
            if turn % 2 == 0:
                answers = engine.receive(engine_process.RUN_TIMEOUT_S + 15.0)
            else:
                answers = engine.run(again(workload(), suffix))
            assert not answers.failed
            assert differences(reference, answers, suffix) == []
    metrics = launcher.metrics()
    assert metrics['kvbm_pool_capacity_blocks{tier="host"}'] == SIZES[-1]
    assert metrics["kvbm_onboard_blocks_h2d"] > some(20)
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()
