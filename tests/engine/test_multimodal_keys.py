"""Keys of requests with images: equal where tokens and images are, different from the block on that holds another one.

No engine is started: vLLM's own requests are made by hand, and its own hashes say what ours must agree with.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from engine.vllm_versions import VERSION
from kvbm.block import BlockKey
from kvbm.vllm_integration.block_hashes import EngineHashes, OwnHashes, hashes_are_deterministic

pytestmark = pytest.mark.quick

BLOCK_TOKENS = 16
TOKENS = [7] * 160
"""Nothing but placeholders: only the images tell such prompts apart."""

Image = tuple[str, int, int]
"""Identifier, first token, number of tokens."""

Keys = Callable[[Request], list[BlockKey]]


def make_request(images: Sequence[Image], tokens: Sequence[int] = TOKENS, salt: str | None = None) -> Request:
    """A request as vLLM's engine core has it, with vLLM's own hashes."""
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=identifier,
            mm_position=PlaceholderRange(offset=offset, length=length),
        )
        for identifier, offset, length in images
    ]
    return Request(
        request_id="request",
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=64),
        pooling_params=None,
        mm_features=features,
        cache_salt=salt,
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, sha256),
    )


def engine_keys(request: Request) -> list[BlockKey]:
    return [BlockKey(block_hash) for block_hash in EngineHashes(request)]


def own_keys(request: Request) -> list[BlockKey]:
    return [BlockKey(block_hash) for block_hash in OwnHashes(request, BLOCK_TOKENS)]


def equal_blocks(keys: Keys, one: Request, other: Request) -> int:
    """How many leading blocks have equal keys; behind the first that differs none may be equal."""
    pairs = list(zip(keys(one), keys(other), strict=True))
    same = [ours == theirs for ours, theirs in pairs]
    count = same.index(False) if False in same else len(same)
    assert not any(same[count:]), same
    return count


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The steps of an engine's start."""
    kv_cache_utils.init_none_hash(sha256)


@pytest.fixture(params=[engine_keys, own_keys])
def keys(request: pytest.FixtureRequest) -> Keys:
    """From vLLM's hashes, and from our own chain, which stands in where vLLM's mean nothing to other processes."""
    found: Keys = request.param
    return found


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ([("cat", 40, 30)], [("cat", 40, 30)], 10),
        ([("cat", 40, 30)], [("dog", 40, 30)], 2),
        ([("cat", 0, 160)], [("dog", 0, 160)], 0),
        ([("cat", 47, 1)], [("dog", 47, 1)], 2),
        ([("cat", 48, 1)], [("dog", 48, 1)], 3),
        ([("cat", 47, 2)], [("dog", 47, 2)], 2),
        ([("cat", 40, 30)], [], 2),
        ([("cat", 40, 30)], [("cat", 41, 30)], 2),
        ([("cat", 32, 16)], [("cat", 48, 16)], 2),
        ([("cat", 8, 30), ("dog", 100, 20)], [("cat", 8, 30), ("dog", 100, 20)], 10),
        ([("cat", 8, 30), ("dog", 100, 20)], [("cat", 8, 30), ("cow", 100, 20)], 6),
        ([("cat", 8, 30), ("dog", 100, 20)], [("dog", 8, 30), ("cat", 100, 20)], 0),
        ([("cat", 33, 3), ("dog", 36, 3)], [("cat", 33, 3), ("cow", 36, 3)], 2),
        (
            [("cat", 33, 3), ("dog", 36, 3), ("cow", 80, 9)],
            [("cat", 33, 3), ("dog", 36, 3), ("hen", 80, 9)],
            5,
        ),
    ],
)
def test_keys_differ_from_the_block_on_that_holds_another_image(
    keys: Keys, first: list[Image], second: list[Image], equal: int
) -> None:
    assert equal_blocks(keys, make_request(first), make_request(second)) == equal


def test_an_image_that_begins_behind_the_last_full_block_changes_no_key(keys: Keys) -> None:
    tokens = TOKENS + [7] * 8
    one, other = make_request([("cat", 160, 8)], tokens), make_request([("dog", 160, 8)], tokens)
    assert equal_blocks(keys, one, other) == 10
    for request in (one, other):
        request.append_output_token_ids([9] * 8)
    assert equal_blocks(keys, one, other) == 10, "the block that became full holds the image"
    assert len(keys(one)) == 11


def test_other_tokens_around_the_same_image(keys: Keys) -> None:
    changed = [*TOKENS[:100], 8, *TOKENS[101:]]
    assert equal_blocks(keys, make_request([("cat", 40, 30)]), make_request([("cat", 40, 30)], changed)) == 6


def test_a_salt_and_an_image(keys: Keys) -> None:
    image = [("cat", 40, 30)]
    assert equal_blocks(keys, make_request(image, salt="a"), make_request(image, salt="b")) == 0
    assert equal_blocks(keys, make_request(image, salt="a"), make_request(image, salt="a")) == 10
    assert equal_blocks(keys, make_request([("a", 0, 4)]), make_request([], salt="a")) == 0


def random_images(chance: random.Random) -> list[Image]:
    """Up to four images in order, of three that there are, apart or side by side."""
    images: list[Image] = []
    start = chance.randrange(40)
    for _ in range(chance.randrange(5)):
        length = chance.choice((1, 3, 16, 40))
        if start + length > len(TOKENS):
            break
        images.append((chance.choice("abc"), start, length))
        start += length + chance.choice((0, 1, 13))
    return images


def test_ours_are_equal_exactly_where_those_of_vllm_are() -> None:
    """The chain that we compute ourselves must tell apart what vLLM tells apart, and nothing more."""
    chance = random.Random(1)
    images = [random_images(chance) for _ in range(150)]
    images += [[(chance.choice("abc"), start, length) for _, start, length in one] for one in images]
    requests = [make_request(one) for one in images]
    engines, own = list(map(engine_keys, requests)), list(map(own_keys, requests))
    shared = 0
    for block in range(len(TOKENS) // BLOCK_TOKENS):
        names: dict[BlockKey, BlockKey] = {}
        for theirs, ours in zip(engines, own, strict=True):
            assert names.setdefault(theirs[block], ours[block]) == ours[block]
        assert len(set(names.values())) == len(names)
        shared += len(requests) - len(names)
    assert shared > len(requests), "hardly any two requests share a block: nothing was compared"


def test_ours_read_block_by_block_are_those_read_at_once() -> None:
    """A request's hashes are read whenever some blocks have become full, also in the middle of an image."""
    chance = random.Random(2)
    for _ in range(50):
        request = make_request(random_images(chance))
        whole, complete = list(OwnHashes(request, BLOCK_TOKENS)), request.block_hashes
        gradual = OwnHashes(request, BLOCK_TOKENS)
        stops = sorted({0, *(chance.randrange(11) for _ in range(4)), 10})
        for start, stop in pairwise(stops):
            request.block_hashes = complete[:stop]
            assert gradual[start:stop] == whole[start:stop]
        assert list(gradual) == whole


def test_ours_go_on_while_the_answer_grows() -> None:
    images = [("cat", 40, 30), ("dog", 150, 10)]
    request = make_request(images)
    growing = OwnHashes(request, BLOCK_TOKENS)
    for token in range(40):
        request.append_output_token_ids([token])
        assert len(list(growing)) == len(request.block_hashes)
    assert len(growing) == 12
    assert list(growing) == list(OwnHashes(make_request(images, TOKENS + list(range(40))), BLOCK_TOKENS))


def test_what_goes_into_ours_means_the_same_in_every_process() -> None:
    """Their repr is hashed: it must hold values, and no address of an object."""
    request = make_request([("cat", 0, 30), ("dog", 31, 1)], salt="salt")
    extras, index = kv_cache_utils.generate_block_hash_extra_keys(request, 0, BLOCK_TOKENS, 0)
    assert extras is not None
    assert ast.literal_eval(repr(extras)) == extras
    assert index == 0, "the first image goes on in the next block"


def test_without_the_images_keys_would_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the tokens alone do not tell these requests apart."""

    def no_extras(request: Any, start: int, end: int, index: int) -> tuple[None, int]:
        return None, index

    monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", no_extras)
    one, other = make_request([("cat", 40, 30)]), make_request([("dog", 40, 30)])
    assert equal_blocks(own_keys, one, other) == equal_blocks(engine_keys, one, other) == 10


@pytest.mark.parametrize(("algorithm", "always_random"), [("sha256", False), ("xxhash", True)])
def test_vllm_s_hashes_are_taken_where_they_mean_the_same_in_every_process(
    algorithm: str, always_random: bool
) -> None:
    config = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm))
    assert hashes_are_deterministic(config) == (VERSION >= (0, 29) and not always_random)
