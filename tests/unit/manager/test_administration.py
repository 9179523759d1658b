"""An operator's messages: whose they are, their bounds, and that a large tier keeps nobody waiting."""

from __future__ import annotations

import pytest

from kvbm.admin_protocol import BlockPage, Describe, ListBlocks, ListLeases, decode_from_manager
from kvbm.client.admin import Admin
from kvbm.errors import ManagerRefused
from kvbm.manager import administration
from kvbm.protocol import PROTOCOL_VERSION, Hello, Message, Welcome
from kvbm.settings import Settings
from rigs.manager import KEYS, NAMESPACE, ManagerBench, refusal, store
from rigs.served import ServedManager


def fingerprint() -> str:
    return NAMESPACE.fingerprint.hex()


@pytest.mark.parametrize("message", [Describe(), ListLeases(), ListBlocks(fingerprint="", tier="host")])
def test_an_engine_may_not_ask_what_is_an_operators(manager: ManagerBench, message: Message) -> None:
    leader, _ = manager.engine()
    leader.send(message)
    assert f"{type(message).__name__} cannot be served: only to a session of role admin" in refusal(leader)


@pytest.mark.parametrize(
    "message",
    [
        ListBlocks(fingerprint="", tier="host", limit=1001),
        ListBlocks(fingerprint="", tier="host", start=-1),
        ListLeases(limit=0),
    ],
)
def test_a_page_out_of_bounds_is_refused(manager: ManagerBench, message: Message) -> None:
    admin = manager.client()
    admin.send(Hello(version=PROTOCOL_VERSION, role="admin"))
    admin.expect(Welcome)
    admin.send(message)
    assert "a page of limit=" in refusal(admin)


def test_a_listing_of_a_large_tier_gives_others_their_turn(
    manager: ManagerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(administration, "SLOTS_AT_ONCE", 4)
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:3])
    admin = manager.client()
    admin.channel._decode = decode_from_manager
    admin.send(Hello(version=PROTOCOL_VERSION, role="admin"))
    admin.expect(Welcome)
    (session,) = [s for s in manager.server.sessions.values() if s.hello and s.hello.role == "admin"]
    listing = manager.server._handlers[ListBlocks](
        session, ListBlocks(fingerprint=fingerprint(), tier="host")
    )
    assert listing is not None
    assert sum(1 for _ in listing) == 16 // 4
    assert len(admin.expect(BlockPage).rows) == 3


def test_a_client_hears_the_managers_reason_with_its_socket(tmp_path) -> None:
    served = ServedManager(tmp_path, {"host_blocks": 16})
    try:
        with Admin(served.path, Settings(runtime_dir=str(tmp_path))) as admin:
            with pytest.raises(ManagerRefused, match=rf"manager at {served.path} refused: a page of limit=0"):
                admin.ask(ListLeases(limit=0), Welcome)
    finally:
        served.stop()
