"""`kvbm pin`, `unpin` and `prefetch`, as an operator runs them against a manager that serves engines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbm.cli.prompts import candidates
from kvbm.hashing import join_keys
from kvbm.hints import tenant_digest
from kvbm.protocol import Lookup, LookupReply, Release
from kvbm.vllm_integration.request_facts import prompt_digest
from rigs.admin import Engine, Node
from rigs.manager import LAYOUT, NAMESPACE, OTHER

pytestmark = pytest.mark.slow

TOKENS = list(range(700, 720))
"""Five blocks."""


@pytest.fixture
def node(make_node: Callable[..., Node], tmp_path: Path) -> Node:
    """With a disk tier."""
    return make_node(host_blocks=32, disk_blocks=80, disk_dir=tmp_path / "disk", disk_admission="all")


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(TOKENS))
    return str(path)


def stored(node: Node, path: str, form: int = 0) -> tuple[Engine, list[bytes]]:
    """An engine that stored the prompt, with its keys in one of the forms that there are; it holds no lease of it."""
    first = node.engine(path, "first")
    (space,) = node.json("inspect", "namespaces")["namespaces"]
    keys = forms(space)[form]
    first.store(keys)
    second = node.engine(path, "second")
    first.close()
    while node.json("inspect", "leases")["leases"]:
        pass
    return second, keys


def forms(space: dict[str, object]) -> list[list[bytes]]:
    return list(candidates(SimpleNamespace(**space), TOKENS, "prompt"))


@pytest.mark.parametrize("form", [0, -2, -1])
def test_a_pinned_prompt_survives_what_evicts_and_resets(node: Node, prompt: str, form: int) -> None:
    """In the form of vLLM's hashes, of our own chain, and of the library's."""
    _, keys = stored(node, node.manage(), form)
    pinned = node.json("pin", "--prompt-file", prompt, "--hours", "2")
    assert pinned == {"pinned": 5, "ready": 5, "blocks": 5, "seconds": 7200.0}
    (lease,) = node.json("inspect", "leases")["leases"]
    assert (lease["engine"], lease["blocks"]) == ("(pin)", 5)
    assert 7000 < lease["ends_in_s"] <= 7200
    assert node.json("reset", "--tier", "G2")["tiers"]["host"]["in_use"] == 5
    assert node.json("pin", "--prompt-file", prompt)["pinned"] == 5
    assert node.json("inspect", "leases")["total"] == 1, "a second pin replaces the first"
    assert node.json("unpin", "--prompt-file", prompt) == {"pins": 1, "blocks": 5}
    assert node.json("reset", "--tier", "G2")["tiers"]["host"] == {
        "type": "reset_done",
        "dropped": 5,
        "in_use": 0,
        "undone": "",
    }
    assert node.kvbm("unpin", "--prompt-file", prompt)[0] == 1
    assert len(keys) == len(TOKENS) // LAYOUT.block_tokens


def test_prefetch_brings_a_prompt_up_from_disk(node: Node, prompt: str) -> None:
    _, keys = stored(node, node.manage())
    while len(node.json("inspect", "blocks", "--tier", "G3")["blocks"]) < 5:
        pass
    node.json("reset", "--tier", "G2")
    assert node.json("inspect", "blocks")["blocks"] == []
    found = node.json("prefetch", "--prompt-file", prompt)
    assert (found["coming"] + found["ready"], found["blocks"]) == (5, 5)
    while node.json("inspect", "leases")["leases"]:
        pass  # its lease ends when all have come
    rows = node.json("inspect", "blocks")["blocks"]
    assert {row["key"] for row in rows} == {key.hex() for key in keys}
    assert all(row["state"] == "resident" for row in rows)


@pytest.mark.slow
def test_prefetch_brings_a_session_up_from_disk(node: Node) -> None:
    engine, keys = stored(node, node.manage())
    said = {"session": "conversation-7"}
    lookup = Lookup(lookup=900, keys=join_keys(keys), hint=said, tenant=tenant_digest("a secret"))
    engine.leader.send(lookup)
    engine.expect(LookupReply)
    engine.leader.send(Release(lookup=900))
    while len(node.json("inspect", "blocks", "--tier", "G3")["blocks"]) < 5:
        pass
    node.json("reset", "--tier", "G2")
    (space,) = node.json("inspect", "namespaces")["namespaces"]
    assert space["named_sessions"] == 1
    words = ("prefetch", "--session", "conversation-7")
    code, out, err = node.kvbm(*words)
    assert (code, err) == (1, "")
    assert "no such session is known" in out
    assert node.json(*words, "--salt", "a secret") == {"coming": 5, "ready": 0, "blocks": 5}
    while len(node.json("inspect", "blocks")["blocks"]) < 5:
        pass
    assert node.kvbm(*words, "--salt", "a secret")[1].startswith("0 of 5 blocks are on their way")
    for wrong in (("prefetch",), ("prefetch", "--salt", "x"), (*words, "--prompt-file", "x")):
        assert "--prompt-file" in node.refused(*wrong)
    assert "--session" in node.refused("prefetch", "--session", "x" * 257)


def test_a_prompt_that_no_engine_computed_is_not_pinned(node: Node, prompt: str) -> None:
    node.engine(node.manage())
    for command in ("pin", "prefetch", "unpin"):
        code, out, err = node.kvbm(command, "--prompt-file", prompt)
        assert (code, err) == (1, ""), command
        assert out.startswith("0 "), out
    assert "let an engine compute the prompt" in node.kvbm("pin", "--prompt-file", prompt)[1]


@pytest.mark.slow
def test_what_cannot_be_pinned_is_refused_in_one_line(node: Node, prompt: str, tmp_path: Path) -> None:
    stored(node, node.manage())
    text, short, odd = tmp_path / "prompt.txt", tmp_path / "short.json", tmp_path / "odd.json"
    text.write_text("Once upon a time")
    short.write_text("[1, 2, 3]")
    odd.write_text('[1, "two"]')
    chat, pipe = tmp_path / "chat.json", tmp_path / "pipe"
    chat.write_text('{"messages": [{"role": "user", "content": "Hello"}]}')
    os.mkfifo(pipe)
    for words, told in (
        (("--prompt-file", str(tmp_path / "none")), "a file that can be read"),
        (
            ("--prompt-file", str(short)),
            f"--prompt-file='{short}' cannot be used: a prompt of at least one block",
        ),
        (("--prompt-file", str(pipe)), "a regular file"),
        (("--prompt-file", str(tmp_path)), "a regular file"),
        (("--prompt-file", str(odd)), "a JSON list of token ids"),
        (("--prompt-file", str(text)), "a JSON list of token ids"),
        (("--prompt-file", str(chat)), "a JSON list of token ids"),
        (("--prompt-file", prompt, "--model", "other"), "--model='other' cannot be used"),
        (("--prompt-file", prompt, "--hours", "169"), "--hours='169' cannot be used"),
        (("--prompt-file", prompt, "--hours", "soon"), "--hours='soon' cannot be used"),
    ):
        assert told in node.refused("pin", *words)
    assert "--all" in node.refused("unpin")
    assert node.json("inspect", "leases")["total"] == 0


def test_pins_leave_most_of_host_memory_to_engines(make_node: Callable[..., Node], prompt: str) -> None:
    node = make_node(host_blocks=16)
    stored(node, node.manage())
    code, out, _ = node.kvbm("pin", "--prompt-file", prompt)
    assert code == 0
    assert "4 of 5 blocks pinned for 1 h" in out
    assert "over what pins may hold together (4 blocks)" in out
    assert node.json("unpin", "--all") == {"pins": 1, "blocks": 4}


def evicting(node: Node, engine: Engine) -> None:
    """Blocks that nobody asked for before take the room of all that is not leased."""
    engine.store([bytes((7, number)) * 16 for number in range(32)])


def test_why_says_of_a_prompt_how_far_it_matches_now_and_why_no_further(node: Node, prompt: str) -> None:
    engine, keys = stored(node, node.manage())
    whole = node.json("why", "--prompt-file", prompt)
    assert (whole["blocks"], whole["host"], whole["first_missing"], whole["reason"]) == (5, 5, None, "hit")
    while len(node.json("inspect", "blocks", "--tier", "G3")["blocks"]) < 5:
        pass
    node.json("reset", "--tier", "G2")
    below = node.json("why", "--prompt-file", prompt)
    assert below["prefix"] == {"host": 0, "disk": 5}
    assert (below["host"], below["disk"], below["first_missing"]) == (0, 5, None)
    node.json("reset", "--tier", "G3")
    engine.store(keys[:2])
    part = node.json("why", "--prompt-file", prompt)
    assert (part["prefix"]["host"], part["first_missing"], part["missing"]) == (2, 2, {"reset": 3})
    assert part["left"]["host"]["what"] == part["left"]["disk"]["what"] == "reset"
    code, out, err = node.kvbm("why", "--prompt-file", prompt, "--model", NAMESPACE.model)
    assert (code, err) == (0, "")
    assert out.startswith(f"{prompt} ({NAMESPACE.model}, namespace {NAMESPACE.short}, 0.0 s ago)\n")
    assert "5 blocks of 4 tokens; its beginning in each tier: host 2 (8 tokens), disk " in out
    assert "block 3 (tokens 9-12): dropped from host by a reset" in out
    assert "3 blocks in no tier: reset (somebody reset the tier)" in out
    asked = node.json("why")
    assert "prompt" not in str(asked["requests"]), "the question is no request"


@pytest.mark.parametrize("form", [0, -2, -1])
def test_why_finds_what_was_evicted_in_any_form_of_the_keys(
    make_node: Callable[..., Node], prompt: str, form: int
) -> None:
    node = make_node(host_blocks=32)
    engine, _ = stored(node, node.manage(), form)
    evicting(node, engine)
    found = node.json("why", "--prompt-file", prompt)
    assert (found["blocks"], found["host"], found["missing"]) == (5, 0, {"evicted": 5})
    assert found["eviction_policy"] in node.kvbm("why", "--prompt-file", prompt)[1]


def test_why_of_a_prompt_that_came_with_another_salt_or_to_another_namespace(node: Node, prompt: str) -> None:
    path = node.manage("manager.sock", "--namespaces", "2")
    engine = node.engine(path)
    node.engine(path, "engine-2", OTHER)
    digest = prompt_digest(TOKENS, LAYOUT.block_tokens)
    assert node.json("why", "--prompt-file", prompt, "--namespace", NAMESPACE.short)["missing"] == {
        "never_seen": 5
    }
    salted = Lookup(
        lookup=900, keys=b"s" * 32, prompt=digest, request="salted", extras={"cache_salt": "0badcafe"}
    )
    engine.leader.send(salted)
    engine.expect(LookupReply)
    found = node.json("why", "--prompt-file", prompt, "--namespace", NAMESPACE.short)
    assert found["missing"] == {"salt_changed": 5}
    assert found["differs"] == ["cache_salt is none here, 0badcafe there"]
    there = node.json("why", "--prompt-file", prompt, "--namespace", OTHER.short)
    assert there["missing"] == {"model_changed": 5}
    assert any(line.startswith("weights is bb here, aa there") for line in there["differs"]), there["differs"]


def test_a_form_of_keys_that_we_do_not_know_is_not_called_other_extras(node: Node, prompt: str) -> None:
    engine = node.engine(node.manage())
    digest = prompt_digest(TOKENS, LAYOUT.block_tokens)
    engine.leader.send(Lookup(lookup=900, keys=b"s" * 32, prompt=digest, request="odd"))
    engine.expect(LookupReply)
    assert node.json("why", "--prompt-file", prompt)["missing"] == {"never_seen": 5}


def test_why_refuses_what_does_not_go_together(node: Node, prompt: str) -> None:
    assert "only together with --prompt-file" in node.refused("why", "--model", "x")
    assert "only together with --prompt-file" in node.refused("why", "--namespace", "ab")
    assert "--limit=3 cannot be used" in node.refused("why", "cmpl-1", "--limit", "3")
    assert "--limit=3 cannot be used" in node.refused("why", "--prompt-file", prompt, "--limit", "3")
    assert "no value together with --prompt-file" in node.refused("why", "cmpl-1", "--prompt-file", prompt)


@pytest.mark.slow
def test_with_a_disk_alone_what_passes_through_memory_is_the_disks(
    make_node: Callable[..., Node], prompt: str, tmp_path: Path
) -> None:
    node = make_node(host_blocks=0, disk_blocks=80, disk_dir=tmp_path / "disk", disk_admission="all")
    stored(node, node.manage())
    found = node.json("why", "--prompt-file", prompt)
    assert (found["tiers"], found["prefix"]) == (["disk"], {"disk": 5})
    assert (found["host"], found["disk"], found["first_missing"]) == (0, 5, None)


@pytest.mark.slow
def test_the_option_that_is_wrong_is_blamed(node: Node, prompt: str) -> None:
    path = node.manage("manager.sock", "--namespaces", "2")
    node.engine(path)
    node.engine(path, "engine-2", OTHER)
    here, there = NAMESPACE.short, OTHER.short
    for words, told in (
        (("--model", "other"), "--model='other' cannot be used"),
        (("--model", "other", "--namespace", here), "--model='other' cannot be used"),
        (("--model", NAMESPACE.model, "--namespace", "zz"), "--namespace='zz' cannot be used"),
        (("--namespace", "zz"), "--namespace='zz' cannot be used"),
        ((), "--namespace='' cannot be used"),
        (("--model", NAMESPACE.model), "--namespace='' cannot be used"),
    ):
        said = node.refused("why", "--prompt-file", prompt, *words)
        assert told in said
        assert here in said and there in said, "they are listed"
    assert node.json("why", "--prompt-file", prompt, "--namespace", here.upper())["namespace"] == here
