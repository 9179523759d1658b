"""`kvbm prefetch` and its operation of the admin API, against a manager that a test plays."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from kvbm.admin_protocol import Describe, Description, Prefetch, Prefetched, SpaceReport
from kvbm.cli import prefetch as command
from kvbm.cli.web import documents as doc
from kvbm.cli.web.operations import OPERATIONS, ManagerGate
from kvbm.cli.web.troubles import Denied
from kvbm.errors import ManagerRefused, SettingsError
from kvbm.hints import NAME_CHARACTERS_MAX, tenant_digest

SPACE = SpaceReport(
    namespace="abc", fingerprint="abcdef", model="m", fields=(), ephemeral=False, staging=False, block_tokens=4,
    block_bytes=4096, tiers=(), fault="", onboard_blocks=0, offload_blocks=0, leases=0, reservations=0,
)  # fmt: skip
DESCRIPTION = Description(
    version="", pid=1, epoch=1, uptime_s=1.0, spaces=(SPACE,), engines=(), asked_blocks=0, hit_blocks={}, sessions=0,
    fences=0, refused=0,
)  # fmt: skip


class PlayedAdmin:
    """A session with a manager that knows one session."""

    socket_path = "m.sock"

    def __init__(self, *args: object) -> None:
        self.asked: list[Prefetch] = []

    def __enter__(self) -> PlayedAdmin:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ask(self, request: Any, kind: type) -> Any:
        if isinstance(request, Describe):
            return DESCRIPTION
        assert (type(request), kind) == (Prefetch, Prefetched)
        if request.session == "refused":
            return Prefetched(refusal="the prefetches take all")
        known = (request.session, request.tenant) == ("s", tenant_digest("salt"))
        return Prefetched(known=known, asked=6, blocks=5, ready=2) if known else Prefetched()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(command, "Admin", PlayedAdmin)
    monkeypatch.setattr(command, "choose_manager", lambda settings: "m.sock")
    return lambda *words: CliRunner().invoke(command.app, words)


def test_a_session_by_its_name_and_its_clients_salt(run: Callable[..., Any]) -> None:
    done = run("--session", "s", "--salt", "salt")
    assert (done.exit_code, done.stdout) == (
        0,
        "3 of 6 blocks are on their way from disk, 2 were in host memory\n",
    )
    done = run("--session", "s", "--salt", "salt", "--json")
    assert json.loads(done.stdout) == {"coming": 3, "ready": 2, "blocks": 6}
    done = run("--session", "s")
    assert (done.exit_code, "no such session is known" in done.stdout) == (1, True)
    done = run("--session", "s", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (1, {"coming": 0, "ready": 0, "blocks": 0})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "--prompt-file"),
        (("--salt", "x"), "--prompt-file"),
        (("--session", "s", "--prompt-file", "x"), "--prompt-file"),
        (("--prompt-file", "x", "--salt", "x"), "--salt"),
        (("--session", "s" * (NAME_CHARACTERS_MAX + 1)), "--session"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    run: Callable[..., Any], words: tuple[str, ...], told: str
) -> None:
    done = run(*words)
    assert isinstance(done.exception, SettingsError)
    assert str(done.exception).startswith(told)


def test_a_refusal_is_told(run: Callable[..., Any]) -> None:
    done = run("--session", "refused")
    assert isinstance(done.exception, ManagerRefused)
    assert "m.sock refused: the prefetches take all" in str(done.exception)


class PlayedGate(ManagerGate):
    def __init__(self) -> None:
        pass

    @contextlib.contextmanager
    def session(self) -> Iterator[Any]:
        yield PlayedAdmin()


def test_the_same_over_http() -> None:
    (operation,) = (each for each in OPERATIONS if each.path == "/api/prefetch")
    assert operation.also == "/prefetch"

    def post(**body: Any) -> Any:
        return operation.run(PlayedGate(), doc.PrefetchBody(**body))

    assert post(session="s", salt="salt") == doc.PrefetchDone(coming=3, ready=2, blocks=6)
    assert post(session="s") == doc.PrefetchDone(coming=0, ready=0, blocks=0)
    with pytest.raises(ManagerRefused, match="take all"):
        post(session="refused")
    for wrong in ({}, {"salt": "x"}, {"tokens": [1], "session": "s"}, {"tokens": [1], "salt": "x"}):
        with pytest.raises(Denied) as caught:
            post(**wrong)
        assert caught.value.status == 409
