"""What `kvbm why --prompt-file` asks: how far this prompt matches now, in the form of keys that says the most."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbm.admin_protocol import Describe, Description, SpaceReport, WhyPrompt, WhyReply
from kvbm.cli.managers import choose_space, settings_for
from kvbm.cli.prompts import candidates, read_tokens
from kvbm.client.admin import Admin, choose_manager
from kvbm.errors import ManagerRefused
from kvbm.hashing import join_keys
from kvbm.vllm_integration.request_facts import prompt_digest


def ask_prompt(file: Path, model: str, namespace: str, manager: str) -> WhyReply:
    """The manager's word on the prompt, as one request that is named after the file.

    Raises SettingsError, ManagerUnavailable, ManagerRefused.
    """
    settings = settings_for(manager)
    with Admin(choose_manager(settings), settings) as admin:
        space = choose_space(admin.ask(Describe(), Description).spaces, namespace, model)
        return about_prompt(admin, space, read_tokens(file), str(file))


def about_prompt(admin: Admin, space: SpaceReport, tokens: Sequence[int], name: str) -> WhyReply:
    """The manager's word on a prompt, as one request of this name. Raises SettingsError, ManagerRefused."""
    digest = prompt_digest(tokens, space.block_tokens)
    replies = [
        admin.ask(WhyPrompt(fingerprint=space.fingerprint, keys=join_keys(keys), prompt=digest), WhyReply)
        for keys in candidates(space, tokens, name)
    ]
    known = [reply for reply in replies if reply.requests]
    if not known:
        raise ManagerRefused(f"the namespace {space.namespace} has just gone")
    best = max(known, key=lambda reply: _known_blocks(reply.requests[0]))
    best.requests[0]["request"] = name
    return best


def _known_blocks(found: dict[str, Any]) -> tuple[int, int]:
    """How much a form of the keys says: blocks that are held, then missing ones that were here once."""
    never = found["missing"].get("never_seen", 0)
    return found["host"] + found["disk"] + found["remote"], sum(found["missing"].values()) - never


def prefix_line(found: dict[str, Any]) -> str:
    """How far the prompt matches in each tier by itself."""
    size = found["block_tokens"]
    reach = ", ".join(f"{tier} {blocks} ({blocks * size} tokens)" for tier, blocks in found["prefix"].items())
    return f"{found['blocks']} blocks of {size} tokens; its beginning in each tier: {reach}"
