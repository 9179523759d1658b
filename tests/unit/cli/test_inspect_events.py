"""`kvbm inspect events`: the lines of messages, and what cannot be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from kvbm.cli import main as entry
from kvbm.clock import Clock
from kvbm.events import subscriber
from kvbm.events.subscriber import Message
from kvbm.events.wire import cleared_fields, encode, removed_fields

STORED = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": [5, 6, 7, 8],
    "block_size": 2,
    "medium": "CPU",
}
MESSAGES = [
    Message("0123456789ab", 4, encode(1.0, [STORED, removed_fields(1, "STORAGE")])),
    None,
    Message("0123456789ab", 5, encode(1.0, [cleared_fields(), STORED | {"token_ids": []}])),
]

Inspect = Callable[..., str]


@pytest.fixture
def inspect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Inspect:
    def call(messages: list[Message | None], *words: str) -> str:
        def read(endpoint: str, most_s: float, clock: Clock) -> Iterator[Message | None]:
            assert (endpoint, most_s) == ("tcp://127.0.0.1:5557", 5.0), (
                "all interfaces are read at the loopback"
            )
            return iter(messages)

        monkeypatch.setattr(subscriber, "read_messages", read)
        with pytest.raises(SystemExit) as ended:
            entry.main(("inspect", "events", "--endpoint", "tcp://*:5557", *words))
        assert not ended.value.code
        return capsys.readouterr().out

    return call


def test_an_event_is_a_line(inspect: Inspect) -> None:
    lines = inspect(MESSAGES).splitlines()
    assert lines[:4] == [
        "0123456789ab 4  stored  G2 host  0000000000000001  2 tokens",
        "0123456789ab 4  stored  G2 host  0000000000000002  after 0000000000000001  2 tokens",
        "0123456789ab 4  removed  G3 disk  0000000000000001",
        "- unreadable: a message has other frames than topic, number and payload",
    ]
    assert lines[4] == "0123456789ab 5  cleared"
    assert lines[5].startswith("0123456789ab 5 unreadable: a KV event cannot be read: ValueError")
    assert len(lines) == 6


def test_json_has_an_object_a_line(inspect: Inspect) -> None:
    rows = list(map(json.loads, inspect(MESSAGES, "--json").splitlines()))
    assert rows[1] == {
        "namespace": "0123456789ab",
        "number": 4,
        "event": "stored",
        "tier": "host",
        "block": "0000000000000002",
        "before": "0000000000000001",
        "tokens": 2,
    }
    assert [row.get("event", "") for row in rows] == ["stored", "stored", "removed", "", "cleared", ""]
    assert [bool(row.get("error")) for row in rows] == [False, False, False, True, False, True]


def test_where_nothing_comes_one_line_says_so(inspect: Inspect) -> None:
    assert inspect([]) == "tcp://*:5557: no event came within 5 s\n"
    assert inspect([], "--json") == ""
