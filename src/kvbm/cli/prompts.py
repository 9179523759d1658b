"""A prompt from a file, and the keys that engines may have given its blocks.

A leader names blocks by vLLM's own chained hashes, or by a chain of ours where vLLM's differ between processes; a
program with `kvbm.BlockManager` by its own chain. The manager does not know which of them an engine uses, so all are
made, and the manager says of which it holds blocks. Requests with an adapter, a cache salt or images have other keys,
and so have those of weights that were changed in memory: they are not found by their tokens.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from kvbm.admin_protocol import FindPrefix, PrefixFound, SpaceReport
from kvbm.client.admin import Admin
from kvbm.errors import SettingsError
from kvbm.hashing import chain_keys, join_keys
from kvbm.protocol import KEYS_PER_MESSAGE_MAX
from kvbm.settings import process_environment
from kvbm.vllm_integration.block_hashes import own_chain

PROMPT_BYTES_MAX = 64 << 20
TOKEN_MAX = (1 << 31) - 1
VLLM_SEED = "vllm-none-hash"
"""The start of vLLM's chain where PYTHONHASHSEED is not set."""


def read_tokens(file: Path) -> list[int]:
    """The token ids of a prompt, from a file with a JSON list of them. Raises SettingsError in one line."""
    text = _read(file)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not _are_tokens(content):
        accepted = "a JSON list of token ids, as the server's /tokenize returns them"
        raise SettingsError("--prompt-file", str(file), accepted)
    return cast("list[int]", content)


def _are_tokens(content: object) -> bool:
    return isinstance(content, list) and all(type(each) is int and 0 <= each <= TOKEN_MAX for each in content)


def _read(file: Path) -> str:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would be waited for
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SettingsError("--prompt-file", str(file), "a regular file")
            with open(descriptor, "rb", closefd=False) as opened:
                content = opened.read(PROMPT_BYTES_MAX + 1)
        finally:
            os.close(descriptor)
        if len(content) > PROMPT_BYTES_MAX:
            raise SettingsError("--prompt-file", str(file), f"a file of at most {PROMPT_BYTES_MAX >> 20} MiB")
        return content.decode()
    except OSError as error:
        accepted = f"a file that can be read ({error.strerror})"
        raise SettingsError("--prompt-file", str(file), accepted) from None
    except UnicodeDecodeError:
        raise SettingsError("--prompt-file", str(file), "a JSON list of token ids") from None


def held_chain(
    admin: Admin, space: SpaceReport, tokens: Sequence[int], name: str
) -> tuple[list[bytes], PrefixFound]:
    """The prompt's keys, in the form of which the manager holds the most blocks, and how many that is."""
    best, most = list[bytes](), PrefixFound(blocks=0, host=0)
    for keys in candidates(space, tokens, name):
        request = FindPrefix(fingerprint=space.fingerprint, keys=join_keys(keys))
        found = admin.ask(request, PrefixFound)
        if not best or found.blocks > most.blocks:
            best, most = keys, found
    return best, most


def candidates(space: SpaceReport, tokens: Sequence[int], name: str) -> Iterator[list[bytes]]:
    """The keys of the prompt's full blocks, in each form that an engine may give them. Raises SettingsError, which
    names the prompt's file."""
    size = space.block_tokens
    tokens = tokens[: min(len(tokens) // size, KEYS_PER_MESSAGE_MAX) * size]
    if not tokens:
        raise SettingsError("--prompt-file", name, f"a prompt of at least one block: {size} tokens")
    blocks = [tuple(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    seeds = dict.fromkeys((VLLM_SEED, process_environment().get("PYTHONHASHSEED", VLLM_SEED)))
    for digest in _digests():
        for seed in seeds:
            keys, parent = list[bytes](), digest(seed)
            for block in blocks:
                parent = digest((parent, block, None))
                keys.append(parent)
            yield keys
    yield own_chain(blocks)
    yield list(chain_keys(bytes.fromhex(space.fingerprint), tokens, size))


def _digests() -> Iterator[Callable[[Any], bytes]]:
    """vLLM's hashes that are the same in every process: `sha256`, and `sha256_cbor` where its encoder is installed."""
    yield lambda value: hashlib.sha256(_pickled(value)).digest()
    try:
        dumps = importlib.import_module("cbor2").dumps
    except ImportError:
        return
    yield lambda value: hashlib.sha256(dumps(value, canonical=True)).digest()


def _pickled(value: Any) -> bytes:
    """What vLLM hashes: Python's pickle format 5 of a text, or of (parent, tokens, None). It is only ever written."""
    body = _text_opcodes(value) if isinstance(value, str) else _block_opcodes(*value)
    return b"\x80\x05\x95" + len(body).to_bytes(8, "little") + body


def _text_opcodes(text: str) -> bytes:
    encoded = text.encode()
    return b"\x8c" + bytes((len(encoded),)) + encoded + b"\x94."


def _block_opcodes(parent: bytes, tokens: Sequence[int], extras: None) -> bytes:
    del extras  # a prompt of text has none
    numbers = b"".join(map(_number_opcodes, tokens))
    # Up to three items have opcodes of their own.
    items = numbers + bytes((0x84 + len(tokens),)) if len(tokens) <= 3 else b"(" + numbers + b"t"
    return b"C" + bytes((len(parent),)) + parent + b"\x94" + items + b"\x94N\x87\x94."


def _number_opcodes(number: int) -> bytes:
    if number < 1 << 8:
        return b"K" + bytes((number,))
    if number < 1 << 16:
        return b"M" + number.to_bytes(2, "little")
    return b"J" + number.to_bytes(4, "little")
