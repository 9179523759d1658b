"""Readers of every format, our own recording written and read again, and what is said of files that cannot be read."""

from __future__ import annotations

import gzip
import io
import json
import logging
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.errors import SettingsError
from kvbm.hashing import chain_keys
from kvbm.sim.traces.formats import ReadOptions, RecordingWriter, TraceError, read_trace, recording
from kvbm.sim.traces.trace import OUTPUT_SECONDS_PER_TOKEN

FINGERPRINT = bytes(range(32))


def write_lines(path: Path, *records: Any, packed: bool = False) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    return path


def mooncake(at_ms: float, *names: int, output: int = 10) -> dict[str, Any]:
    return {
        "timestamp": at_ms,
        "input_length": 512 * len(names),
        "output_length": output,
        "hash_ids": list(names),
    }


def qwen(at_s: float, *names: int) -> dict[str, Any]:
    head = {"chat_id": 1, "parent_chat_id": -1, "timestamp": at_s, "type": "text", "turn": 1}
    return {**head, "input_length": 16 * len(names), "output_length": 4, "hash_ids": list(names)}


def request(at_s: float, *names: int, **more: Any) -> dict[str, Any]:
    return {"t": at_s, "type": "s", "in": 64 * len(names), "out": 5, "hash_ids": list(names), **more}


def session(name: str, *requests: dict[str, Any], scope: str = "local", block: int = 64) -> dict[str, Any]:
    return {
        "id": name,
        "models": ["m"],
        "block_size": block,
        "hash_id_scope": scope,
        "requests": list(requests),
    }


# ---- other projects' formats


@pytest.mark.parametrize("packed", [False, True])
def test_mooncake(tmp_path: Path, packed: bool) -> None:
    # Content says what a file is, not its name; requests may be out of order.
    path = write_lines(
        tmp_path / "toolagent_trace.data",
        mooncake(2500, 46, 47, 50),
        mooncake(500, 46, 47, 48),
        packed=packed,
    )
    trace = read_trace(path)
    assert (trace.name, trace.block_tokens, trace.unique_blocks) == ("toolagent_trace", 512, 4)
    assert [r.arrived_s for r in trace.requests] == [0.0, 2.0]
    assert [r.blocks for r in trace.requests] == [(0, 1, 2), (0, 1, 3)]
    first = trace.requests[0]
    assert (first.prompt_tokens, first.output_tokens) == (1536, 10)
    assert first.seconds == 10 * OUTPUT_SECONDS_PER_TOKEN


def test_qwen_names_single_blocks_which_are_chained(tmp_path: Path) -> None:
    trace = read_trace(write_lines(tmp_path / "t", qwen(0.0, 5, 6, 7), qwen(1.5, 5, 7, 7), qwen(2.0, 6, 7)))
    assert trace.block_tokens == 16
    assert [r.blocks for r in trace.requests] == [(0, 1, 2), (0, 3, 4), (5, 6)]
    assert trace.requests[1].arrived_s == 1.5


def test_a_session_file_with_sub_agents(tmp_path: Path) -> None:
    child = {"t": 10.0, "type": "subagent", "requests": [request(0.0, 1, 8), request(4.0, 1, 8, 9)]}
    later = {"t": 20.0, "type": "subagent", "requests": [request(20.5, 1)]}
    whole = session("a", request(0.0, 1, 2, api_time=3.5), child, request(12.0, 1, 2, 3), later)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(whole, indent=2))
    trace = read_trace(path)
    assert trace.block_tokens == 64
    assert [r.blocks for r in trace.requests] == [(0, 1), (0, 2), (0, 1, 3), (0, 2, 4), (0,)]
    # A sub-agent's time counts from its own start, unless it evidently counts from the session's.
    assert [r.arrived_s for r in trace.requests] == pytest.approx([0.0, 10.0, 12.0, 14.0, 20.5])
    assert trace.requests[0].seconds == 3.5


def test_a_directory_of_sessions_is_one_trace(tmp_path: Path) -> None:
    first, second = session("a", request(0.0, 1, 2), request(1.0, 1, 2, 3)), session("b", request(0.0, 1, 2))
    (tmp_path / "rates.txt").write_text("not a session\n")
    (tmp_path / "b.json").write_bytes(gzip.compress(json.dumps(second).encode()))
    (tmp_path / "a.json").write_text(json.dumps(first))
    trace = read_trace(tmp_path)
    assert (trace.name, len(trace.requests), trace.unique_blocks) == (tmp_path.name, 3, 5)
    # The same as lines of one file, where runs of names are written shorter.
    runs = {"t": 0.0, "in": 128, "out": 5, "hash_runs": [[1, 2]]}
    short = {"session": "b", "block_size": 64, "requests": [runs]}
    assert read_trace(write_lines(tmp_path / "lines", first, short)).requests == trace.requests


def test_names_of_a_global_scope_are_shared_by_sessions(tmp_path: Path) -> None:
    sessions = [session(name, request(0.0, 1, 2, ord(name)), scope="global") for name in "ab"]
    assert read_trace(write_lines(tmp_path / "t", *sessions)).unique_blocks == 4
    sessions[0]["hash_id_scope"] = sessions[1]["hash_id_scope"] = "local"
    assert read_trace(write_lines(tmp_path / "t", *sessions)).unique_blocks == 6


def test_sessions_start_as_a_poisson_process_of_the_seed(tmp_path: Path) -> None:
    sessions = [session(str(n), request(0.0, n + 1), request(5.0, n + 1, n + 100)) for n in range(6)]
    path = write_lines(tmp_path / "t", *sessions)
    chance = random.Random(3)
    order = list(range(6))
    chance.shuffle(order)
    starts_s: dict[int, float] = {}
    now_s = 0.0
    for number in order:
        now_s += chance.expovariate(6 / (2.0 * 3600.0))
        starts_s[number] = now_s
    expected = sorted(
        start_s + at_s - min(starts_s.values()) for start_s in starts_s.values() for at_s in (0.0, 5.0)
    )
    trace = read_trace(path, ReadOptions(seed=3, session_hours=2.0))
    assert [r.arrived_s for r in trace.requests] == expected
    assert read_trace(path, ReadOptions(seed=3, session_hours=2.0)).requests == trace.requests
    assert read_trace(path, ReadOptions(seed=4, session_hours=2.0)).requests != trace.requests


# ---- what a reader is asked for


def test_blocks_are_regrouped(tmp_path: Path) -> None:
    records = [request(0.0, 1, 2, 3, 4, 5), request(1.0, 1, 2, 3, 9), request(2.0, 1)]
    path = write_lines(tmp_path / "t", session("a", *records))
    trace = read_trace(path, ReadOptions(chunk_tokens=128))
    assert trace.block_tokens == 128
    assert [r.blocks for r in trace.requests] == [(0, 1), (0, 2)]
    assert [r.prompt_tokens for r in trace.requests] == [320, 256]
    with pytest.raises(
        SettingsError, match=r"--chunk-tokens=100 cannot be used: a multiple of the 64 tokens"
    ):
        read_trace(path, ReadOptions(chunk_tokens=100))
    with pytest.raises(TraceError, match=r"no request has a full block of 1024 tokens"):
        read_trace(path, ReadOptions(chunk_tokens=1024))


def test_time_is_scaled_and_requests_are_limited(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", *(mooncake(1000 * n, n, output=100) for n in (5, 3, 4)))
    trace = read_trace(path, ReadOptions(time_scale=0.5, limit=2))
    assert [r.arrived_s for r in trace.requests] == [0.0, 0.5]
    assert trace.requests[1].seconds == 100 * OUTPUT_SECONDS_PER_TOKEN
    assert trace.unique_blocks == 2


# ---- our own recordings


Chains = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 9)), min_size=1, max_size=12
)


@given(chains=Chains)
def test_a_recording_reads_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, chains: Any) -> None:
    file = io.BytesIO()
    writer = RecordingWriter(file, 2, FINGERPRINT)
    keys = [chain_keys(FINGERPRINT, [t for token in tokens for t in (token, 0)], 2) for tokens, _ in chains]
    for number, (chain, (_, output)) in enumerate(zip(keys, chains, strict=True)):
        writer.add(100.0 + number, chain, 2 * len(chain), output, 1.5)
    path = tmp_path_factory.mktemp("recording") / "t"
    path.write_bytes(gzip.compress(file.getvalue()))
    if not any(keys):
        with pytest.raises(TraceError, match="no request has a full block"):
            read_trace(path)
        return
    trace = read_trace(path)
    known: dict[bytes, int] = {}
    expected = [tuple(known.setdefault(key, len(known)) for key in chain) for chain in keys if chain]
    assert [r.blocks for r in trace.requests] == expected
    assert trace.block_tokens == 2
    assert {r.seconds for r in trace.requests} == {1.5}
    assert [r.output_tokens for r in trace.requests] == [
        o for (_, o), c in zip(chains, keys, strict=True) if c
    ]


def record(*chains: list[int], salt: bytes | None = None) -> bytes:
    file = io.BytesIO()
    writer = RecordingWriter(file, 16, FINGERPRINT, salt)
    for number, tokens in enumerate(chains):
        keys = chain_keys(FINGERPRINT, [t for token in tokens for t in [token] * 16], 16)
        writer.add(float(number), keys, 16 * len(tokens), 1)
    return file.getvalue()


def test_a_history_is_written_once() -> None:
    lines = [json.loads(line) for line in record([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]).splitlines()]
    assert lines[0]["kvbm_trace"] == recording.VERSION
    assert [len(line["keys"]) for line in lines[1:]] == [32, 11, 0]
    assert "after" not in lines[1]
    assert lines[3]["after"] == lines[2]["keys"]


def test_a_recording_holds_neither_keys_nor_salt() -> None:
    salt = bytes(32)
    assert record([1], salt=salt) == record([1], salt=salt)
    assert record([1]) != record([1])
    key = chain_keys(FINGERPRINT, [1] * 16, 16)[0]
    texts = [json.dumps(line) for line in map(json.loads, record([1]).splitlines())]
    assert not any(part in text for text in texts for part in (key.hex()[:12], FINGERPRINT.hex()[:12]))


def test_a_writer_that_forgets_writes_in_full_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "KNOWN_KEYS_MAX", 4)
    (tmp_path / "t").write_bytes(record([1, 2, 3], [5, 6], [1, 2, 3, 4], [1, 2, 3, 4, 7]))
    trace = read_trace(tmp_path / "t")
    assert [r.blocks for r in trace.requests] == [(0, 1, 2), (3, 4), (0, 1, 2, 5), (0, 1, 2, 5, 6)]


# ---- what cannot be read

HEADER = {"kvbm_trace": 1, "block_tokens": 16}
LINE = {"at_s": 0.0, "keys": "AAAAAAAAAAE", "prompt_tokens": 16, "output_tokens": 1}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([mooncake(0, 1), {**mooncake(1, 1), "timestamp": "x"}], r":2: timestamp='x' cannot be used: expected float"),
        ([{**mooncake(0, 1), "hash_ids": [1, -2]}], r":1: hash_ids\[1\]=-2 cannot be used: expected int >= 0"),
        ([{"timestamp": 1, "input_length": 5, "hash_ids": []}], r":1: output_length is missing"),
        ([{**qwen(0, 1), "input_length": 1.5}], r":1: input_length=1\.5 cannot be used: expected int"),
        ([session("a", request(0, 1), scope="universal")], r":1: hash_id_scope='universal' cannot be used: "),
        ([session("a", {"t": 0})], r":1: requests\[0\]: hash_ids=None cannot be used: a list of numbers"),
        ([session("a", {"t": 0, "requests": [{"t": -1}]})], r":1: requests\[0\]\.requests\[0\]\.t=-1"),
        ([session("a", request(0, 1)), session("b", request(0, 1), block=16)], r":2: block_size=16 cannot be used: 64"),
        ([session("a", request(0, 1 << 41))], r":1: requests\[0\]: hash_ids=2199023255552 cannot be used: numbers"),
        ([{"some": 1, "other": 2}], r":1: no format has the fields other, some; accepted: a recording of kvbm"),
        ([[1, 2]], r":1: line=\[1, 2\] cannot be used: a recording"),
        ([{**HEADER, "kvbm_trace": 9}], r":1: kvbm_trace=9 cannot be used: version 1"),
        ([{**HEADER, "block_tokens": 0}], r":1: block_tokens=0 cannot be used: expected int >= 1"),
        ([HEADER, {**LINE, "keys": "A!"}], r":2: keys='A!' cannot be used: base64"),
        ([HEADER, {**LINE, "keys": "AAAA"}], r":2: keys='AAAA' cannot be used: 8 bytes for each key; these are 3"),
        ([HEADER, {**LINE, "after": "AAAAAAAAAAI"}], r":2: after='AAAAAAAAAAI' cannot be used: a key of an earlier"),
        (
            [HEADER, LINE, {**LINE, "keys": "AAAAAAAAAAIAAAAAAAAAAQ"}],
            r":3: keys: 'AAAAAAAAAAE' follows another block than in an earlier line",
        ),
        ([], r"empty; accepted: a recording"),
        ([HEADER], r"no request has a full block"),
    ],
)  # fmt: skip
def test_an_error_names_the_place(tmp_path: Path, records: list[Any], message: str) -> None:
    path = write_lines(tmp_path / "trace.jsonl", *records)
    with pytest.raises(TraceError, match=r"trace\.jsonl.*" + message) as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_json(tmp_path: Path) -> None:
    path = tmp_path / "t"
    line = json.dumps(mooncake(0, 1)).encode() + b"\n"
    for text, message in (
        (b"# notes\n", r"t:1: not JSON: .* it begins with '# notes'"),
        (b'{"timestamp": 0,\n', r"t:1: not JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid x\n", r"t:1: this is a Git LFS pointer"),
        (gzip.compress(line * 1000)[:-10], r"t:\d*: cannot be read: the gzip stream ends too early"),
        (b"\x1f\x8bnonsense", r"t.*: cannot be read: "),
    ):
        path.write_bytes(text)
        with pytest.raises(TraceError, match=message):
            read_trace(path)
    with pytest.raises(TraceError, match=r"nowhere: cannot be read: No such file"):
        read_trace(tmp_path / "nowhere")


@pytest.mark.parametrize("packed", [False, True])
def test_a_recording_is_read_up_to_where_it_was_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setattr(logging.getLogger("kvbm"), "propagate", True)
    file = tmp_path / "t"
    written = io.BytesIO()
    out = gzip.GzipFile(fileobj=written, mode="wb") if packed else written
    writer = RecordingWriter(out, 4)
    for number in range(3):
        writer.add(float(number), [bytes([number] * 16)], 4, 1)
        out.flush()
    text = written.getvalue()
    counts = []
    for end in range(len(text) + 1):
        file.write_bytes(text[:end])
        caplog.clear()
        try:
            counts.append(len(read_trace(file).requests))
        except TraceError:
            counts.append(0)
        said = [record.getMessage() for record in caplog.records]
        assert all(
            re.fullmatch(r".*/t ends in the middle of line \d: what .* is read", line) for line in said
        )
    assert counts == sorted(counts) and sorted(set(counts)) == [0, 1, 2, 3]


def test_directories_hold_sessions_only(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# nothing\n")
    with pytest.raises(TraceError, match=r"no sessions: a directory must hold agentic sessions"):
        read_trace(tmp_path)
    write_lines(tmp_path / "x.jsonl", mooncake(0, 1))
    with pytest.raises(TraceError, match=r"x\.jsonl: in a directory every file that begins with \{ must be"):
        read_trace(tmp_path)
