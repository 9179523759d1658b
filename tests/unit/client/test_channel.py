"""A client's end of a session: the line that says why it ended."""

from __future__ import annotations

import socket

import pytest

from kvbm import framing
from kvbm.client.channel import Channel
from kvbm.errors import ManagerUnavailable
from kvbm.protocol import Reset


def test_a_manager_that_takes_no_messages_is_not_said_to_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(ours)
    monkeypatch.setattr(framing, "OUTGOING_BYTES_MAX", 0)
    with pytest.raises(ManagerUnavailable, match=r"^the manager takes no messages: \d+ bytes wait$"):
        channel.send(Reset())
    theirs.close()
    monkeypatch.undo()
    with pytest.raises(ManagerUnavailable, match=r"^the manager has gone: "):
        channel.send(Reset())
    channel.close()
