"""The admin API against the command line: the same questions and actions have the same answers and effects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbm.cli.web.operations import OPERATIONS
from kvbm.hashing import chain_keys
from rigs.admin import Node
from rigs.manager import KEYS, LAYOUT, NAMESPACE, OTHER
from rigs.manager_probe import wait_for
from rigs.web import served

END_S = 20.0
MakeNode = Callable[..., Node]


def without_times(document: Any) -> Any:
    """A document less what changes from one question to the next: clocks, and what they are divided by."""
    if isinstance(document, dict):
        return {
            name: without_times(value)
            for name, value in document.items()
            if not re.search(r"(_s|seconds|seconds_ago)$", name) and name != "sessions"
        }
    if isinstance(document, str):
        return re.sub(r"in the last \d+ s", "", document)
    return [without_times(each) for each in document] if isinstance(document, list) else document


@pytest.mark.slow
def test_every_question_has_the_fields_of_the_command(make_node: MakeNode, tmp_path: Path) -> None:
    node, web = served(make_node, tmp_path)
    engine = node.engine(str(node.runtime_dir / "manager.sock"))
    engine.store(KEYS[:5])
    engine.lookup(KEYS[:8])
    commands = {
        "/api/status": ("status",),
        "/api/top": ("top", "--once"),
        "/api/why": ("why",),
        "/api/blocks?limit=3&start=1": ("inspect", "blocks", "--limit", "3", "--start", "1"),
        "/api/blocks?tier=G3": ("inspect", "blocks", "--tier", "G3"),
        "/api/leases?limit=1": ("inspect", "leases", "--limit", "1"),
        "/api/namespaces": ("inspect", "namespaces"),
        "/api/queues": ("inspect", "queues"),
    }
    wait_for(lambda: len(web.document("/api/blocks?tier=G3")["blocks"]) == 5, END_S, "not on disk")
    for target, words in commands.items():
        assert without_times(web.document(target)) == without_times(node.json(*words)), target
        assert set(web.document(target)) == set(node.json(*words)), target
    assert {target.partition("?")[0] for target in commands} == {
        each.path for each in OPERATIONS if each.method == "GET"
    }


def test_every_action_has_the_fields_and_the_effect_of_the_command(
    make_node: MakeNode, tmp_path: Path
) -> None:
    node, web = served(make_node, tmp_path)
    tokens = list(range(LAYOUT.block_tokens * 4))
    keys = list(chain_keys(NAMESPACE.fingerprint, tokens, LAYOUT.block_tokens))
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps(tokens))
    engine = node.engine(str(node.runtime_dir / "manager.sock"))
    engine.store(keys)
    file = ("--prompt-file", str(prompt))
    pinned = web.post("/api/pin", {"tokens": tokens, "hours": 0.5}).json()
    assert pinned == {"pinned": 4, "ready": 4, "blocks": 4, "seconds": 1800.0}
    assert node.json("pin", *file, "--hours", "0.5") == pinned
    known = web.post("/api/why-prompt", {"tokens": tokens}).json()
    asked = {**node.json("why", *file), "request": ""}
    assert without_times(known) == without_times(asked)
    assert (set(known), known["prefix"]["host"]) == (set(asked), 4)
    assert [row["engine"] for row in web.document("/api/leases")["leases"]].count("(pin)") == 1
    assert web.post("/api/unpin", {"tokens": tokens}).json() == {"pins": 1, "blocks": 4}
    assert web.post("/api/unpin", {"tokens": tokens}).json() == {"pins": 0, "blocks": 0}
    assert web.post("/api/pin", {"tokens": tokens, "namespace": NAMESPACE.short[:4]}).status == 200
    assert web.post("/api/unpin-all", {}).json() == {"pins": 1, "blocks": 4}
    assert node.json("unpin", "--all") == {"pins": 0, "blocks": 0}
    engine.close()
    wait_for(lambda: not web.document("/api/leases")["leases"], END_S, "leases stay")
    wait_for(lambda: len(web.document("/api/blocks?tier=G3")["blocks"]) == 4, END_S, "not on disk")
    dropped = web.post("/api/reset", {"tier": "G2"}).json()
    assert dropped["tiers"] == {"host": {"type": "reset_done", "dropped": 4, "in_use": 0, "undone": ""}}
    assert set(node.json("reset", "--tier", "G2")) == set(dropped)
    fetched = web.post("/api/prefetch", {"tokens": tokens}).json()
    assert (fetched["blocks"], fetched["coming"] + fetched["ready"]) == (4, 4)
    wait_for(lambda: len(web.document("/api/blocks")["blocks"]) == 4, END_S, "it does not come up")
    wait_for(lambda: not web.document("/api/leases")["leases"], END_S, "the prefetch does not end")
    assert set(node.json("prefetch", *file)) == set(fetched)
    unknown = web.post("/api/prefetch", {"session": "nobody", "salt": "x"}).json()
    assert unknown == {"coming": 0, "ready": 0, "blocks": 0}
    assert web.post("/prefetch", {"tokens": tokens}).json()["blocks"] == 4
    for wrong in ({}, {"salt": "x"}, {"tokens": tokens, "session": "s"}, {"tokens": tokens, "salt": "x"}):
        assert web.post("/api/prefetch", wrong).status == 409


def test_what_the_manager_lacks_is_named(make_node: MakeNode, tmp_path: Path) -> None:
    node, web = served(make_node, tmp_path, "--namespaces", "2")
    path = str(node.runtime_dir / "manager.sock")
    node.engine(path, "one").store(KEYS[:2])
    node.engine(path, "two", OTHER)
    several = web.get("/api/blocks")
    assert (several.status, NAMESPACE.short in several.error, OTHER.short in several.error) == (
        404,
        True,
        True,
    )
    assert several.error.startswith("namespace='' cannot be used")
    assert len(web.document(f"/api/blocks?namespace={NAMESPACE.short}")["blocks"]) == 2
    assert web.get("/api/why?request=nobody").error.startswith("request='nobody' cannot be used")
    assert web.get("/api/why?request=nobody").status == 404
    short = web.post("/api/pin", {"tokens": [1], "namespace": NAMESPACE.short})
    assert (short.status, short.error.startswith("tokens='' cannot be used")) == (409, True)
    assert web.post("/api/unpin-all", {"model": "no/model"}).status == 404
