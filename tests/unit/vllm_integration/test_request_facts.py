"""The facts of a request that `kvbm why` compares: the same tokens are the same, and no secret is told. And what its
client says of its future."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvbm.hints import UNHINTED, read_hint
from kvbm.leader.tracked import readable
from kvbm.protocol import Lookup
from kvbm.protocol_decoding import decode_to_manager
from kvbm.vllm_integration.request_facts import answer, asker_of, told_of


def request(tokens: list[int] | None, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"lora_request": None, "prompt_token_ids": tokens, **fields})


def test_the_first_block_of_tokens_alone_names_the_prompt() -> None:
    first = told_of(request([1, 2, 3, 4, 5]), 4)
    assert first.prompt == told_of(request([1, 2, 3, 4, 9, 9], cache_salt="s"), 4).prompt
    assert first.prompt != told_of(request([1, 2, 3, 5, 5]), 4).prompt
    assert (len(first.prompt), first.extras) == (16, ())


@pytest.mark.parametrize("tokens", [None, [], [1, 2, 3]])
def test_a_prompt_without_a_whole_block_has_no_name(tokens: list[int] | None) -> None:
    assert told_of(request(tokens), 4).prompt == b""


def test_what_else_shapes_the_keys_is_told_and_a_salt_only_as_a_digest() -> None:
    features = [SimpleNamespace(identifier="cat.png")]
    lora = SimpleNamespace(lora_name="dogs")
    told = told_of(request([1] * 4, cache_salt="tenant-secret", mm_features=features, lora_request=lora), 4)
    extras = dict(told.extras)
    assert extras["adapter"] == "dogs"
    assert len(extras["cache_salt"]) == len(extras["media"]) == 8
    assert "secret" not in str(told)
    other = dict(told_of(request([1] * 4, cache_salt="tenant-b", mm_features=features), 4).extras)
    assert (other["cache_salt"] != extras["cache_salt"], other["media"] == extras["media"]) == (True, True)


def test_text_that_is_no_unicode_is_told_all_the_same() -> None:
    """JSON can bring half of a surrogate pair, and vLLM takes it: the cache of everybody must not end by it."""
    features = [SimpleNamespace(identifier="\udc00.png")]
    lora = SimpleNamespace(lora_name="dogs\ud800")
    told = told_of(request([1] * 4, cache_salt="\ud800", mm_features=features, lora_request=lora), 4)
    asked = Lookup(
        lookup=1, keys=b"", request=readable("id-\ud800"), prompt=told.prompt, extras=dict(told.extras)
    )
    assert decode_to_manager(msgspec.msgpack.encode(asked)) == asked
    assert (asked.request, asked.extras["adapter"]) == ("id-?", "dogs?")


def test_who_asks_is_a_digest_of_the_salt() -> None:
    asker = asker_of(request([1], cache_salt="tenant-secret"))
    assert len(asker.tenant) == 16
    assert "secret" not in str(asker)
    assert asker_of(request([1], cache_salt="\ud800")).tenant != asker.tenant
    assert asker_of(request([1])) is UNHINTED


@pytest.mark.parametrize("said", [None, {}, {"kvbm": None}, "text", 5, {"do_remote_decode": True}])
def test_what_is_no_hint_is_none(said: object) -> None:
    assert asker_of(request([1], kv_transfer_params=said)) is UNHINTED


def test_a_hint_is_read_and_answered_part_by_part() -> None:
    asker = asker_of(request([1], kv_transfer_params={"kvbm": {"session": "s", "expect_s": "soon"}}))
    assert (asker.hint.session, asker.hint.expect_s) == ("s", None)
    assert answer(asker.verdicts) == {
        "kvbm_hints": [
            {"part": "session", "outcome": "accepted"},
            {"part": "expect_s", "outcome": "rejected", "reason": "not a number"},
        ]
    }
    assert answer(()) is None
    assert answer(read_hint(7).verdicts) == {
        "kvbm_hints": [{"part": "hint", "outcome": "rejected", "reason": "not a mapping"}]
    }
    nonsense = asker_of(request([1], kv_transfer_params={"kvbm": "text"}, session_id="s"))
    assert nonsense.hint.session == "s", "one field that cannot be used keeps no other from being read"
    assert [each.part for each in nonsense.verdicts] == ["session", "unknown"]
