"""`kvbm simulate` as a user meets it: its table, its files, its errors of one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbm.cli import main as entry


@pytest.fixture
def simulate(capfd):
    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            entry.main(("simulate", *words))
        out, err = capfd.readouterr()
        return caught.value.code or 0, out, err

    return call


SHORT = ("synthetic", "--limit", "300")


def test_help(simulate) -> None:
    code, out, _ = simulate("--help")
    assert code == 0
    for words in ("--policy NAMES", "--host SIZES", "--seed N", "kvbm simulate synthetic"):
        assert words in out


def test_a_table_of_policies_and_sizes(simulate, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    code, out, err = simulate(*SHORT, "--policy", "lru,belady", "--host", "2%,20%", "--json", str(file))
    assert (code, err) == (0, "")
    for words in ("2%", "20%", "belady", "hit rate", "of LRU → optimum", "no cache can hit more than"):
        assert words in out
    assert "± seeds" not in out
    document = json.loads(file.read_text())
    assert [(row["policy"], row["size"]) for row in document["hit_rates"]] == [
        ("lru", "2%"), ("belady", "2%"), ("lru", "20%"), ("belady", "20%"),
    ]  # fmt: skip
    assert document["traces"][0]["requests"] == 300
    assert document["settings"]["reading"]["limit"] == 300


def test_hit_rates_are_the_same_every_time(simulate, tmp_path: Path) -> None:
    rates = []
    for name in "ab":
        file = tmp_path / name
        assert simulate(*SHORT, "--policy", "all", "--host", "5%", "--json", str(file))[0] == 0
        rates.append([row["hit_rate"] for row in json.loads(file.read_text())["hit_rates"]])
    assert rates[0] == rates[1]


def test_several_seeds_show_their_spread(simulate) -> None:
    code, out, _ = simulate(*SHORT, "--policy", "lru", "--host", "5%", "--seed", "0,1")
    assert code == 0
    assert "± seeds" in out
    assert "means over seeds 0, 1" in out


def test_traces_of_one_name_are_told_apart(simulate, tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n'
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "t.jsonl").write_text(line * 3)
    words = [str(tmp_path / folder / "t.jsonl") for folder in ("a", "b", "a")]
    code, out, _ = simulate(*words, "--policy", "lru", "--host", "1blocks")
    assert code == 0
    assert out.count("66.67%") == 4
    assert f"t ({words[1]})" in out.replace("\n", "")


def test_curves_samples_and_bytes(simulate) -> None:
    code, out, _ = simulate(
        *SHORT,
        "--policy",
        "lru",
        "--host",
        "1GB",
        "--curve",
        "--sample",
        "0.5",
        "--bytes-per-token",
        "128KiB",
    )
    assert code == 0
    for words in ("LRU at all sizes, exactly", "LRU is off by", "bytes"):
        assert words in out


def test_times(simulate) -> None:
    words = (*SHORT, "--host", "5%", "--disk", "50%", "--bytes-per-token", "128KiB", "--policy", "lru")
    code, out, _ = simulate(*words)
    assert code == 0
    for words in ("no cache", "TTFT, s", "per byte", "served"):
        assert words in out
    assert "load above 1" not in out
    code, out, _ = simulate(
        *SHORT, "--times", "--host", "5%", "--bytes-per-token", "1KiB", "--time-scale", "0.001"
    )
    assert "load above 1: the engine cannot keep up" in out


def test_what_clients_say_stands_in_rows_of_its_own(simulate, tmp_path: Path) -> None:
    """Policies that do not listen have one row; the picture takes all of them."""
    files = ("--json", str(tmp_path / "h.json"), "--plot", str(tmp_path / "h.png"))
    words = (
        "synthetic",
        "--policy",
        "lru,gittins,belady",
        "--host",
        "5%",
        "--hints",
        "none, true,late,random",
    )
    code, out, err = simulate(*words, *files)
    assert (code, err) == (0, "")
    assert "gittins, true hints" in out
    document = json.loads((tmp_path / "h.json").read_text())
    rows = [(row["policy"], row["hints"]) for row in document["hit_rates"]]
    told = [("gittins", kind) for kind in ("", "true", "late", "random")]
    assert rows == [("lru", ""), *told, ("belady", "")]
    assert document["settings"]["hints"] == ["none", "true", "late", "random"]
    _, none, true, late, random, _ = [row["gap_closed"] for row in document["hit_rates"]]
    assert true > none + 0.2
    assert late > none + 0.2
    assert random < true
    assert (tmp_path / "h.png").stat().st_size > 0


def test_times_with_what_clients_say(simulate, tmp_path: Path) -> None:
    file = tmp_path / "h.json"
    words = ("synthetic", "--times", "--host", "2%", "--bytes-per-token", "128KiB", "--policy", "gittins")
    assert simulate(*words, "--hints", "none,true,late", "--json", str(file))[0] == 0
    nothing, alone, true, late = json.loads(file.read_text())["times"]
    assert [row["hints"] for row in (nothing, alone, true, late)] == ["", "", "true", "late"]
    for told in (true, late):
        assert told["host_hit_rate"] > alone["host_hit_rate"] + 0.02
        assert told["ttft_mean_s"] < alone["ttft_mean_s"]


def test_a_budget_for_writes(simulate, tmp_path: Path) -> None:
    words = (*SHORT, "--host", "5%", "--disk", "50%", "--bytes-per-token", "128KiB", "--policy", "lru")
    file = tmp_path / "w.json"
    assert simulate(*words, "--admission", "ghost", "--write-budget", "20GB", "--json", str(file))[0] == 0
    document = json.loads(file.read_text())
    within = 20e9 / 24 + 20e9 * (document["traces"][0]["seconds"] + 60) / 86_400
    assert 0 < document["times"][-1]["disk_written_bytes"] <= within


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere",), "TRACE='nowhere' cannot be used: an existing file or directory, or synthetic"),
        (("synthetic", "--host", "5x"), "--host='5x' cannot be used: a share"),
        (("synthetic", "--host", "1GB"), "--host='1GB' cannot be used: sizes in bytes need"),
        (("synthetic", "--hints", "false"), "--hints='false' cannot be used: one of none, true, late, random"),
        (("synthetic", "--model", "gemma-3-27b", "--hints", "true"), "--hints='given' cannot be used: nothing with"),
        (("synthetic", "--policy", "x"), "--policy='x' cannot be used: one of"),
        (("synthetic", "--times"), "--times and --disk need the KV of a token"),
        (("synthetic", "--times", "--sample", "0.5", "--bytes-per-token", "1KiB"), "--sample=0.5 cannot be used"),
        (("synthetic", "--sample", "2"), "--sample=2.0 cannot be used: a share above 0"),
        (("synthetic", "--time-scale", "0"), "--time-scale=0.0 cannot be used: a number above 0"),
        (("synthetic", "--seed", "a"), "--seed='a' cannot be used: a whole number"),
        (("synthetic", "--admission", "x"), "--admission='x' cannot be used: one of filter, all"),
        (("synthetic", "--write-budget", "x"), "--write-budget='x' cannot be used: a size"),
        (("synthetic", "--json", "/"), "--json='/' cannot be used: a file in an existing folder"),
        (("synthetic", "--bytes-per-token", "0"), "--bytes-per-token='0' cannot be used: at least one byte"),
        (("synthetic", "--bytes-per-token", "1", "--model", "m"), "--model='m' cannot be used: either this or"),
        (("synthetic", "--json", "no/where.json"), "--json='no/where.json' cannot be used: a file in an existing"),
        (("synthetic", "--plot", "no/where.png"), "--plot='no/where.png' cannot be used: a file in an existing"),
        (("synthetic", "--times", "--disk-read", "0", "--bytes-per-token", "1"), "--disk-read='0' cannot be used"),
        (("synthetic", "--times", "--prefill-tokens-per-s", "0"), "--prefill-tokens-per-s=0.0 cannot be used"),
        ((__file__,), f"{__file__}:1: not JSON"),
    ],
)  # fmt: skip
def test_an_error_is_one_line(simulate, words: tuple[str, ...], message: str) -> None:
    code, out, err = simulate(*words)
    assert (code, out) == (2, "")
    assert err.startswith(f"kvbm: {message}")
    assert err.count("\n") == 1


def test_a_model_with_several_groups(simulate, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    asked = (*SHORT, "--model", "gemma-3-27b", "--host", "2%,20GB", "--json", str(file))
    code, out, err = simulate(*asked, "--plot", str(tmp_path / "hits.png"))
    assert (code, err) == (0, "")
    for words in ("slots", "gemma-3-27b: a slot is a block of one of its groups", "gittins"):
        assert words in " ".join(out.split())
    document = json.loads(file.read_text())
    trace = document["traces"][0]
    assert trace["block_bytes"] == 10 * 8192 * trace["block_tokens"]
    assert trace["everything_bytes"] == trace["unique_blocks"] * 62 * 8192 * trace["block_tokens"]
    sizes = {row["size"]: row["blocks"] for row in document["hit_rates"]}
    assert sizes == {
        "2%": int(0.02 * (trace["unique_blocks"] * 62 // 10)),
        "20GB": 20 * 10**9 // trace["block_bytes"],
    }
    assert 0.0 < max(row["hit_rate"] for row in document["hit_rates"]) < trace["repeated_rate"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--disk", "1TB"), "--model"),
        (("--times",), "--model"),
        (("--sample", "0.5"), "--sample"),
        (("--curve",), "--curve"),
        (("--policy", "belady"), "--policy"),
        (("--policy", "libcachesim:lru"), "--policy"),
    ],
)
def test_what_is_not_known_of_several_groups(simulate, options: tuple[str, ...], named: str) -> None:
    code, _, err = simulate(*SHORT, "--model", "gemma-3-27b", *options)
    assert code == 2
    assert err.startswith(f"kvbm: {named}=")
    assert "gemma-3-27b" in err
    assert err.count("\n") == 1
