"""The examples of the guide say what they seem to say."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.hints import Hint, Outcome, Retain, read_hint
from kvbm.vllm_integration.hints import PATHS, hint_of, with_hint
from rigs.checkout import ROOT

PAGE = ROOT / "docs/guides/hints.md"
SAID = [
    Hint(session="chat-17", expect_s=40.0),
    Hint(session="chat-17", retain=(Retain(min_ttl=1800.0),)),
    Hint(retain=(Retain(end=500, min_ttl=3600.0),)),
    Hint(session="chat-17", retain=(Retain(priority=35, max_ttl=86_400.0),)),
    Hint(session="5e55", retain=(Retain(min_ttl=3600.0),)),
    Hint(session="run:search", parent="run", final=True, retain=(Retain(priority=45),)),
    Hint(session="chat-17", expect_s=40.0),
]
"""What the calls on the page mean, in their order, of a prompt of 1,000 tokens."""


def calls() -> list[tuple[str, dict[str, str], bytes]]:
    """Path, headers and body of each call of curl on the page."""
    text = re.sub(r" \\\n\s*", " ", PAGE.read_text())
    found = []
    for path, words, body in re.findall(
        r"^curl localhost:8000(\S+)((?: -H '[^']+')*) -d '([^']*)'", text, re.MULTILINE
    ):
        headers = dict(header.split(": ", 1) for header in re.findall(r"-H '([^']+)'", words))
        found.append((path, {name.lower(): value for name, value in headers.items()}, body.encode()))
    return found


@pytest.mark.skipif(not PAGE.exists(), reason="a source distribution has no docs")
def test_the_examples_of_the_guide() -> None:
    found = calls()
    assert len(found) == PAGE.read_text().count("curl localhost")
    assert [read(*call) for call in found] == SAID


def read(path: str, headers: dict[str, str], body: bytes) -> Hint:
    assert path in PATHS
    fields: dict[str, Any] = json.loads(with_hint(headers, body) or body)
    request = SimpleNamespace(
        kv_transfer_params=fields.get("kv_transfer_params"),
        sampling_params=SimpleNamespace(extra_args=fields.get("vllm_xargs")),
        num_prompt_tokens=1000,
    )
    hint, verdicts = read_hint(hint_of(request))
    assert {verdict.outcome for verdict in verdicts} == {Outcome.ACCEPTED}
    return hint
