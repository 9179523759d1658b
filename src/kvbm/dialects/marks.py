"""How far into the prompt the marks of a request body reach.

A mark ends a prefix: everything up to and including the block that carries it. Where that is in tokens is known only
after the chat template and the tokenizer. So a prefix is the whole prompt where nothing follows its mark, and else a
share of the prompt by characters, which becomes tokens when they are counted: good enough to bias by, not to cut by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
_NOT_IN_PROMPT = {"type", "id", "tool_use_id", "tool_call_id", "call_id", "signature", "status"}


class Mark(NamedTuple):
    """What a block is marked with, and the range that ends with it, as parts of `retain`."""

    said: object
    extent: RawHint


class _Piece(NamedTuple):
    characters: int
    said: object


def marks(body: Mapping[str, object], name: str) -> list[Mark]:
    """The marks of this name, in the order of the prompt. An extent is empty for the whole prompt."""
    pieces = [piece for place in PLACES for piece in _pieces(body.get(place), name)]
    total = sum(piece.characters for piece in pieces)
    elsewhere = any(body.get(field) is not None for field in CONTINUES)
    found, before = [], 0
    for piece in pieces:
        before += piece.characters
        if piece.said is None:
            continue
        if elsewhere or before == total:
            found.append(Mark(piece.said, {}))
        elif before:
            found.append(Mark(piece.said, {SHARE: max(0.0001, round(before / total, 4))}))
    return found


def _pieces(value: object, name: str) -> Iterator[_Piece]:
    """The parts of a field that can carry a mark: tools, blocks of the system prompt, messages and their blocks."""
    if not isinstance(value, list):
        yield _Piece(_characters(value, name), None)
        return
    for item in value:
        if not isinstance(item, dict):
            yield _Piece(_characters(item, name), None)
            continue
        content = item.get("content")
        if isinstance(content, list):
            rest = {key: part for key, part in item.items() if key not in ("content", name)}
            yield _Piece(_characters(rest, name), None)
            for block in content:
                said = block.get(name) if isinstance(block, dict) else None
                yield _Piece(_characters(block, name), said)
            yield _Piece(0, item.get(name))
        else:
            yield _Piece(_characters(item, name), item.get(name))


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
                    count += len(key) if isinstance(key, str) else 0
                    pending.append(part)
    return count
