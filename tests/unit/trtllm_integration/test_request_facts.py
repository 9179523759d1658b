"""What stands in a request's keys beside its tokens, and which requests are not kept."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.hashing import Chain
from kvbm.trtllm_integration.request_facts import (
    AdapterPaths,
    Unkept,
    block_extras,
    media_reason,
    media_tokens,
    salt_of,
    tells_salt,
    told_of,
)

TOKENS = list(range(40))


def keys(tokens: list[int] = TOKENS, **facts: Any) -> list[bytes]:
    request = SimpleNamespace(**facts)
    return list(Chain.under(bytes(32), 4, tokens, block_extras(request, 4)).keys)


def test_each_salt_has_keys_of_its_own() -> None:
    plain, one, other = keys(), keys(cache_salt_id=1), keys(cache_salt_id=2)
    assert not {*plain} & {*one}
    assert not {*one} & {*other}
    assert one == keys(cache_salt_id=1)
    assert not {*keys(cache_salt="1")} & {*one}, "a text is no number"


def test_keys_grow_with_what_is_generated() -> None:
    request = SimpleNamespace(cache_salt_id=3)
    chain = Chain.under(bytes(32), 4, TOKENS[:6], block_extras(request, 4))
    live = chain.live_keys
    chain.extend(TOKENS[6:])
    assert list(live) == keys(cache_salt_id=3)


def test_media_shape_the_keys_from_their_block_on() -> None:
    def image(content: int, position: int = 9) -> dict[str, Any]:
        return {
            "multimodal_positions": [position],
            "multimodal_lengths": [6],
            "multimodal_hashes": [[content] * 8],
        }

    plain, one, other, moved = keys(), keys(**image(1)), keys(**image(2)), keys(**image(1, 10))
    assert plain[:2] == one[:2] == other[:2] == moved[:2]
    for later in (other, moved, plain):
        assert not {*one[2:]} & {*later[2:]}


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({}, ""),
        ({"multimodal_positions": [3], "multimodal_lengths": [2], "multimodal_hashes": [[1]]}, ""),
        (
            {"multimodal_positions": [3], "multimodal_lengths": None, "multimodal_hashes": [[1]]},
            "does not name",
        ),
        (
            {"multimodal_positions": [3, 9], "multimodal_lengths": [2, 2], "multimodal_hashes": [[1]]},
            "does not name",
        ),
        ({"multimodal_embedding": object()}, "without positions"),
        ({"prompt_embedding_table": [1]}, "without positions"),
        ({"py_multimodal_data": {}}, ""),
        ({"py_multimodal_data": {"image": 1}}, "without positions"),
    ],
)
def test_media_that_have_no_name(facts: dict[str, Any], why: str) -> None:
    reason = media_reason(SimpleNamespace(**facts), TOKENS, frozenset({999}))
    assert (why in reason) if why else not reason


def test_a_placeholder_alone_tells_of_media() -> None:
    placeholders = media_tokens(
        {"image_token_id": 7, "video_token_index": 900, "eos_token_id": 2, "name": "x"}
    )
    assert placeholders == {7, 900}
    assert media_reason(SimpleNamespace(), TOKENS, placeholders)
    assert not media_reason(SimpleNamespace(), TOKENS, media_tokens({}))


def test_what_is_told_of_a_request_has_no_secrets() -> None:
    request = SimpleNamespace(cache_salt="a secret", lora_task_id=4)
    told = told_of(request, TOKENS, 4)
    assert dict(told.extras).keys() == {"adapter", "cache_salt"}
    assert "secret" not in repr(told)
    assert told.prompt == told_of(SimpleNamespace(), TOKENS[:4], 4).prompt != b""
    assert told_of(request, TOKENS[:3], 4).prompt == b""


def test_releases_that_do_not_tell_of_salts() -> None:
    assert not tells_salt(SimpleNamespace())
    assert tells_salt(SimpleNamespace(cache_salt_id=None))
    assert salt_of(SimpleNamespace(cache_salt_id=None)) == ""


def test_paths_of_adapters_are_learned() -> None:
    paths = AdapterPaths()
    paths.learn(SimpleNamespace(lora_task_id=4))
    assert paths.path(4) is None
    paths.learn(SimpleNamespace(lora_task_id=4, py_lora_path="one"))
    paths.learn(SimpleNamespace(lora_task_id=4, py_lora_path=None))
    assert paths.path(4) == "one"
    paths.learn(SimpleNamespace(lora_task_id=4, py_lora_path="other"))
    assert paths.path(4) is None, "nobody knows which one a rank has loaded"
    paths.learn(SimpleNamespace(lora_task_id=4, py_lora_path="one"))
    assert paths.path(4) is None


def test_requests_that_are_not_kept_are_counted_and_not_told_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unkept = Unkept()
    with caplog.at_level(logging.WARNING, logger="kvbm.trtllm"):
        for _ in range(25):
            unkept.note("why")
    assert [record.message for record in caplog.records] == [
        "blocks of 1 request are not kept: why",
        "blocks of 10 requests are not kept: why",
    ]
    assert unkept.by_reason == {"why": 25}
