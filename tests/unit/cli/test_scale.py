"""`kvbm scale` as a user meets it: its table, its files, its errors of one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbm.cli import main as entry
from kvbm.settings import Settings


@pytest.fixture
def scale(capfd):
    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            entry.main(("scale", *words))
        out, err = capfd.readouterr()
        return caught.value.code or 0, out, err

    return call


SLOW = ("--prefill-tokens-per-s", "3000", "--host", "1GB", "--remote-size", "4GB")
SHORT = ("synthetic", "--warm-up", "5", "--minutes", "3", *SLOW)


def test_a_table_a_file_and_a_picture(scale, tmp_path: Path) -> None:
    files = {"--json": tmp_path / "s.json", "--plot": tmp_path / "s.png"}
    words = (
        *SHORT,
        "--nodes",
        "1,3",
        "--router",
        "random, kv",
        "--remote",
        "none, shared",
        "--policy",
        "lru",
    )
    code, out, err = scale(*words, *(str(word) for pair in files.items() for word in pair))
    assert (code, err) == (0, "")
    for found in ("busiest", "policy lru", "3 minutes after 5 of warm-up", "; seed 0"):
        assert found in out
    document = json.loads(files["--json"].read_text())
    assert [(row["nodes"], row["remote"], row["router"]) for row in document["rows"]] == [
        (nodes, remote, router)
        for nodes in (1, 3)
        for remote in ("none", "shared")
        for router in ("random", "kv")
    ]
    assert all(
        row["requests"] and (row["warm_up_s"], row["measured_s"]) == (300.0, 180.0)
        for row in document["rows"]
    )
    assert document["settings"]["policy"] == "lru"
    pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib; it is not installed")
    assert files["--plot"].read_bytes().startswith(b"\x89PNG")


def test_it_takes_the_policy_of_the_manager(scale) -> None:
    code, out, _ = scale(*SHORT, "--nodes", "1", "--router", "kv", "--remote", "none")
    assert code == 0
    assert f"policy {Settings().eviction};" in out


def test_it_says_what_was_not_measured(scale) -> None:
    one = ("--nodes", "1", "--router", "kv", "--remote", "none", "--policy", "lru")
    code, out, _ = scale("synthetic", *one, "--warm-up", "0", "--minutes", "0.001")
    assert code == 0
    assert "-: no request came in the minutes that count" in out
    code, out, _ = scale("synthetic", *one, *SLOW, "--load", "0.1", "--warm-up", "10", "--minutes", "500")
    assert code == 0
    assert "the trace is shorter than the 510 minutes asked for" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere",), "TRACE='nowhere' cannot be used: an existing file or directory, or synthetic"),
        (("synthetic", "--nodes", "0"), "--nodes='0' cannot be used: a whole number from 1"),
        (("synthetic", "--nodes", "1,x"), "--nodes='x' cannot be used: a whole number from 1"),
        (("synthetic", "--router", "best"), "--router='best' cannot be used: one of random"),
        (("synthetic", "--remote", "far"), "--remote='far' cannot be used: one of none"),
        (("synthetic", "--policy", "belady"), "--policy='belady' cannot be used: one of"),
        (("synthetic", "--load", "0"), "--load='0' cannot be used: a number above 0"),
        (("synthetic", "--host", "5x"), "--host='5x' cannot be used: a share"),
        (("synthetic", "--host", "1GB,2GB"), "--host='1GB,2GB' cannot be used: one size"),
        (("synthetic", "--seed", "-1"), "--seed='-1' cannot be used: a whole number"),
        (("synthetic", "--plot", "no/where.png"), "--plot='no/where.png' cannot be used: a file in an existing"),
        ((__file__, "--nodes", "1"), f"{__file__}:1: not JSON"),
    ],
)  # fmt: skip
def test_an_error_is_one_line(scale, words: tuple[str, ...], message: str) -> None:
    code, out, err = scale(*words)
    assert (code, out) == (2, "")
    assert err.startswith(f"kvbm: {message}")
    assert err.count("\n") == 1
