"""How far into the prompt the marks of a request body reach.

A mark ends a prefix: everything up to and including the block that carries it. Where that is in tokens is known only
after the chat template and the tokenizer. So a prefix is the whole prompt where nothing follows its mark, and else a
share of the prompt by characters, which becomes tokens when they are counted: good enough to bias by, not to cut by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from kvbm.dialects.raw import SHARE, RawHint

PLACES = ("tools", "system", "instructions", "messages", "input")
"""The fields that become the prompt, in the order in which templates and the APIs put them."""
CONTINUES = ("previous_response_id", "conversation")
"""With one of these, most of the prompt is not in the body."""
MEDIA_CHARACTERS = 4_000
"""What an image, a sound or a file counts as: some thousand tokens."""

_MEDIA = (
    "audio",
    "document",
    "file",
    "image",
    "image_url",
    "input_audio",
    "input_file",
    "input_image",
    "video",
    "video_url",
)
_NOT_IN_PROMPT = {"call_id", "id", "role", "signature", "status", "tool_call_id", "tool_use_id", "type"}
_FRAMES = {"content", "input", "text", "thinking"}
"""Names of fields that templates do not print. Others, as those in a tool's schema, they print."""


class Mark(NamedTuple):
    """What a block is marked with, and the range that ends with it, as parts of `retain`."""

    said: object
    extent: RawHint


class _Part(NamedTuple):
    value: object
    said: object


def marks(body: Mapping[str, object], name: str) -> list[Mark]:
    """The marks of this name, in the order of the prompt. An extent is empty for the whole prompt."""
    parts = [part for place in PLACES for part in _parts(body.get(place), name)]
    if all(part.said is None for part in parts):
        return []
    elsewhere = any(body.get(field) is not None for field in CONTINUES)
    # A server's thread counts these, so a prompt with one mark at its end is not counted at all.
    counted = not elsewhere and any(part.said is not None for part in parts[:-1])
    ends = list(accumulate(_characters(part.value, name) if counted else 1 for part in parts))
    found = []
    for part, before in zip(parts, ends, strict=True):
        if part.said is None:
            continue
        if elsewhere or before == ends[-1]:
            found.append(Mark(part.said, {}))
        elif before:
            found.append(Mark(part.said, {SHARE: max(0.0001, round(before / ends[-1], 4))}))
    return found


def _parts(value: object, name: str) -> Iterator[_Part]:
    """What can carry a mark: tools, blocks of the system prompt, messages and their blocks."""
    if not isinstance(value, list):
        if value is not None:
            yield _Part(value, None)
        return
    for item in value:
        if not isinstance(item, dict):
            yield _Part(item, None)
            continue
        content = item.get("content")
        if not isinstance(content, list):
            yield _Part(item, item.get(name))
            continue
        if len(item) > 2:  # more than its role
            yield _Part({key: part for key, part in item.items() if key != "content"}, None)
        for block in content:
            yield _Part(block, block.get(name) if isinstance(block, dict) else None)
        if item.get(name) is not None:
            yield _Part(None, item[name])


def _characters(value: object, name: str) -> int:
    """The text in a value. Bodies may be nested deeper than functions can call themselves."""
    count, pending = 0, [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            count += len(each)
        elif isinstance(each, list):
            pending.extend(each)
        elif isinstance(each, dict):
            if each.get("type") in _MEDIA:
                count += MEDIA_CHARACTERS
                continue
            for key, part in each.items():
                if key != name and key not in _NOT_IN_PROMPT:
                    count += len(key) if isinstance(key, str) and key not in _FRAMES else 0
                    if isinstance(part, str):
                        count += len(part)
                    elif part is not None:
                        pending.append(part)
    return count
