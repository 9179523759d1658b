"""`kvbm top`: once for a script, and live: what stands on the screen, at two sizes, also when the manager ends."""

from __future__ import annotations

import asyncio
import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvbm.client.snapshots import SnapshotSource
from kvbm.protocol import Release
from kvbm.settings import Settings
from rigs.manager import KEYS, ManagerBench, store
from rigs.served import ServedManager

MINUTE_S = 3600.0
"""So long between two looks that a test makes them all itself."""


def command(*words: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvbm.cli.main", "top", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )


def answered(manager: ManagerBench, *words: str) -> str:
    """What the command prints of a manager, which the test steps meanwhile."""
    with command("--manager", manager.path, *words) as child:
        manager.until(lambda: child.poll() is not None, "the command never ended")
        out, said = child.communicate()
    assert (child.returncode, said) == (0, "")
    return out


def refused(*words: str, **variables: str) -> str:
    """The one line of a command that cannot be served."""
    with command(*words, **variables) as child:
        out, said = child.communicate(timeout=60.0)
    assert (child.returncode, out, said.count("\n")) == (2, "", 1)
    return said


def busy(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    for number in range(2):
        leader.lookup(number, KEYS[:8])
        leader.send(Release(lookup=number, loaded=4, seconds=0.5, prefill_s=20.5))
    manager.tick()


def test_once_shows_the_verdict_and_every_part(manager: ManagerBench) -> None:
    busy(manager)
    page = answered(manager, "--once")
    assert "hit rate 50% of the 64 tokens asked in the last 1 s: saved 41 s of prefill" in page
    assert re.search(r"host +█+░+ +25% +65\.5 kB, 16 blocks +0% +50% of asked", page)
    assert "device→host" in page and "GB/s" in page and "0 blocks up, 0 down" in page
    assert re.search(rf"{KEYS[0].hex()[:12]} +32 +2 +50% +0 +50%", page)
    assert re.search(r"e +unit/model +1/1", page)


def test_json_has_the_same_for_a_script(manager: ManagerBench) -> None:
    busy(manager)
    document = json.loads(answered(manager, "--once", "--json"))
    assert document["socket"] == manager.path
    assert (document["hit_rate"], document["saved_s"], document["asked"]) == (0.5, 41.0, 64.0)
    assert [tier["name"] for tier in document["tiers"]] == ["host"]
    assert document["findings"][0]["text"].startswith("hit rate 50%")


def test_since_start_counts_all(manager: ManagerBench) -> None:
    busy(manager)
    for _ in range(4):
        manager.tick(30.0)
    assert json.loads(answered(manager, "--once", "--json"))["asked"] == 0.0
    assert json.loads(answered(manager, "--once", "--json", "--since-start"))["asked"] == 64.0


def test_one_line_says_what_is_wrong(tmp_path: Path) -> None:
    nowhere = {"DYN_KVBM_RUNTIME_DIR": str(tmp_path / "none")}
    assert "no manager runs in" in refused("--once", **nowhere)
    assert "--json" in refused("--json", **nowhere)
    assert "--once" in refused(**nowhere)  # there is no terminal
    assert "no manager at" in refused("--once", "--manager", str(tmp_path / "m.sock"))


# ---- live


def screen_text(app: Any) -> str:
    """What stands on the screen."""
    svg = app.export_screenshot()
    rows: dict[str, str] = {}
    for line, words in re.findall(r'<text [^>]*y="([^"]+)"[^>]*>(.*?)</text>', svg):
        rows[line] = rows.get(line, "") + html.unescape(words).replace("\xa0", " ")
    return "\n".join(rows.values())


def live(
    directory: Path, size: tuple[int, int], script: Callable[[Any, Any, ServedManager], Awaitable[None]]
) -> None:
    """Run the live screen of a manager of its own."""
    top_app = pytest.importorskip("kvbm.cli.top_app", reason="needs textual")
    served = ServedManager(directory, {"host_blocks": 16})
    source = SnapshotSource(Settings(manager=served.path), 20.0)

    async def run() -> None:
        app = top_app.TopApp(source, MINUTE_S)
        async with app.run_test(size=size) as pilot:
            await app.look()
            await pilot.pause()
            await script(app, pilot, served)

    try:
        asyncio.run(run())
    finally:
        source.close()
        served.stop()


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
def test_the_screen_shows_the_manager_at_any_size(tmp_path: Path, size: tuple[int, int]) -> None:
    async def script(app: Any, pilot: Any, served: ServedManager) -> None:
        text = screen_text(app)
        assert "no engine is connected" in text and f"manager {os.getpid()}" in text
        assert "Quit" in text
        assert all(len(line) <= size[0] for line in text.splitlines())

    live(tmp_path, size, script)


def test_keys_choose_the_window_and_pause(tmp_path: Path) -> None:
    async def script(app: Any, pilot: Any, served: ServedManager) -> None:
        await pilot.press("space")
        await pilot.pause()
        assert "paused" in screen_text(app)
        await pilot.press("space")
        await pilot.press("s")
        await pilot.pause()
        assert "paused" not in screen_text(app)
        await pilot.press("q")

    live(tmp_path, (100, 30), script)


def test_a_manager_that_ends_is_told_and_looked_for(tmp_path: Path) -> None:
    async def script(app: Any, pilot: Any, served: ServedManager) -> None:
        served.stop()
        await app.look()
        await pilot.pause()
        text = screen_text(app)
        assert "looking for one again" in text and "when it was last seen" in text
        assert f"manager {os.getpid()}" in text
        again = ServedManager(tmp_path, {"host_blocks": 16})
        try:
            await app.look()
            await pilot.pause()
            assert "looking for one" not in screen_text(app)
        finally:
            again.stop()

    live(tmp_path, (80, 24), script)
