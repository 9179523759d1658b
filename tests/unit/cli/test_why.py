"""`kvbm why`, run as a user runs it, at a manager with real sessions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from kvbm.cli.why import _advice, _ago
from kvbm.hashing import join_keys
from kvbm.protocol import Lookup, LookupReply, Release
from rigs.manager import KEYS, ManagerBench, store


def run(manager: ManagerBench, *words: str, named: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvbm.cli.main", "why", *words]
    if named:
        command += ["--manager", manager.path]
    environment = {**os.environ, "DYN_KVBM_RUNTIME_DIR": manager.settings.runtime_dir}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as child:
        try:
            manager.until(lambda: child.poll() is not None, "the command never ended")
            out, err = child.communicate()
        finally:
            child.kill()
    return subprocess.CompletedProcess(command, child.returncode, out, err)


@pytest.fixture
def asked(manager: ManagerBench) -> ManagerBench:
    """A manager that evicted three blocks of a chain, and was asked for it 41 s later."""
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    store(leader, worker, 2, KEYS[100:115])
    manager.clock.advance(41.0)
    ids = ("cmpl-aa-0-01234567", "cmpl-ab-0-01234567")
    for number, (request, keys) in enumerate(zip(ids, (KEYS[:6], KEYS[100:115]), strict=True), 10):
        leader.send(Lookup(lookup=number, keys=join_keys(keys), request=request))
        found = leader.expect(LookupReply)
        leader.send(Release(lookup=number, loaded=len(found.slots)))
    manager.clock.advance(3.0)
    return manager


def test_it_says_how_far_the_prefix_matched_and_why_no_further(asked: ManagerBench) -> None:
    done = run(asked, "cmpl-aa-0")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"cmpl-aa-0-01234567 \(unit/model, namespace [0-9a-f]{12}, 3\.0 s ago\)", lines[0])
    policy = asked.settings.eviction
    assert lines[1:] == [
        "6 blocks of 4 tokens: device 0, host 1, disk 0; 1 loaded",
        f"block 2 (tokens 5-8): evicted from host 44 s ago by {policy}",
        "3 blocks computed, in no tier: evicted (it was here, and the policy evicted it)",
        "2 blocks computed, in no tier: never_seen (no block like it was ever stored)",
        "to change that: a larger host tier (DYN_KVBM_CPU_CACHE_GB), or a disk tier (DYN_KVBM_DISK_CACHE_GB)",
    ]


def test_a_request_without_a_miss(asked: ManagerBench) -> None:
    assert run(asked, "cmpl-ab").stdout.splitlines()[1:] == [
        "15 blocks of 4 tokens: device 0, host 15, disk 0; 15 loaded",
        "nothing was missing",
    ]


def test_without_an_id_it_finds_the_manager_and_shows_the_latest_and_the_reasons(asked: ManagerBench) -> None:
    done = run(asked, named=False)
    assert done.returncode == 0
    text = done.stdout
    assert "21 blocks asked for" in text
    assert re.search(r"^ *3 +evicted +it was here", text, re.MULTILINE)
    assert re.search(r"^ *2 +never_seen ", text, re.MULTILINE)
    assert re.search(r"cmpl-aa-0-01234567 +3\.0 s +6 +0 +1 +0 +1 +5 +evicted", text)
    assert text.index("cmpl-ab-0") < text.index("cmpl-aa-0"), "the newest first"
    assert re.search(r"cmpl-ab-0-01234567 .* 0 +hit", text)


def test_json(asked: ManagerBench) -> None:
    (found,) = json.loads(run(asked, "cmpl-aa-0", "--json").stdout)["requests"]
    assert found["reason"] == "evicted"
    assert found["left"]["host"]["seconds_ago"] == 44.0
    assert found["missing"] == {"evicted": 3, "never_seen": 2}
    document = json.loads(run(asked, "--json", "--limit", "1").stdout)
    assert [each["request"] for each in document["requests"]] == ["cmpl-ab-0-01234567"]
    assert document["reasons"] == {"evicted": 3, "never_seen": 2}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cmpl-a",), "the id of one request, not of 2: cmpl-ab-0-01234567, cmpl-aa-0-01234567"),
        (("chat-9",), "since the manager started 44 s ago"),
    ],
)
def test_an_id_that_names_no_request_or_several(asked: ManagerBench, words: tuple[str], said: str) -> None:
    done = run(asked, *words)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert said in line


def test_a_restarted_manager_has_forgotten_and_says_so(
    asked: ManagerBench, make_manager: Callable[..., ManagerBench]
) -> None:
    asked.close()
    again = make_manager()
    done = run(again, "cmpl-aa-0")
    assert done.returncode == 2
    assert "since the manager started 0.0 s ago" in done.stderr
    assert run(again).stdout.splitlines() == [
        "in the last 0.0 s: 0 blocks asked for",
        "no request was looked up yet",
    ]


def test_without_a_manager_it_is_one_line(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("none")
    environment = {**os.environ, "DYN_KVBM_RUNTIME_DIR": str(directory)}
    command = [sys.executable, "-m", "kvbm.cli.main", "why"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60.0, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("tiers", "reason", "advised"),
    [
        (["host"], "no_room", "a larger host tier (DYN_KVBM_CPU_CACHE_GB)"),
        (["disk"], "no_room", "a larger staging area (DYN_KVBM_DISK_STAGING_GB), or a host tier ("),
        (["disk"], "evicted", "a host tier (DYN_KVBM_CPU_CACHE_GB), or a larger disk tier ("),
        (["host"], "evicted", "a larger host tier (DYN_KVBM_CPU_CACHE_GB), or a disk tier ("),
    ],
)
def test_advice_names_a_tier_that_is_not_there_as_a_new_one(
    tiers: list[str], reason: str, advised: str
) -> None:
    (said,) = _advice({"tiers": tiers, "missing": {reason: 3}, "unloaded": {}})
    assert said.startswith(advised)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s ago"),
        (9.94, "9.9 s ago"),
        (119.0, "119 s ago"),
        (600.0, "10 min ago"),
        (7300.0, "2 h ago"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert _ago(seconds) == text


def test_an_id_that_looks_like_markup_is_shown_as_it_is(asked: ManagerBench) -> None:
    leader = asked.leader("odd")
    leader.send(Lookup(lookup=1, keys=join_keys(KEYS[:1]), request="[/x][bold red]id"))
    done = run(asked, named=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "[/x][bold red]id" in done.stdout
