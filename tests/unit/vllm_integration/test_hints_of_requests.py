"""What the connector reads from a request of vLLM."""

from __future__ import annotations

from types import SimpleNamespace

from kvbm.hints import UNKNOWN, Hint, Outcome, Retain, read_hint
from kvbm.vllm_integration.hints import hint_of


def request(
    kvbm: object = None, extra_args: dict[str, object] | None = None, **fields: object
) -> SimpleNamespace:
    params = None if kvbm is None else {"kvbm": kvbm, "do_remote_decode": False}
    return SimpleNamespace(
        kv_transfer_params=params,
        sampling_params=SimpleNamespace(extra_args=extra_args),
        **{"session_id": None, "priority": 0, "kv_hints": None, "num_prompt_tokens": 1000, **fields},
    )


def test_a_request_that_says_nothing() -> None:
    assert hint_of(request()) is None
    assert hint_of(request({})) is None
    assert hint_of(SimpleNamespace()) is None, "an older vLLM has fewer fields"
    assert hint_of(SimpleNamespace(sampling_params=None, kv_transfer_params="x")) is None


def test_every_field_says_its_part_and_the_strongest_decides() -> None:
    action = SimpleNamespace(
        action_type="kvbm.hint", action_version="1.0", payload={"session": "c", "parent": "c", "expect_s": 4}
    )
    raw = hint_of(
        request(
            {"session": "a", "retain": [{"end_share": 0.5, "min_ttl": 9}]},
            {"kvbm_session": "b", "kvbm_parent": "b", "kvbm_final": 1},
            kv_hints=SimpleNamespace(actions=[action]),
            session_id="d",
            priority=-5,
        )
    )
    assert read_hint(raw).hint == Hint(
        session="a", parent="b", final=True, expect_s=4.0, retain=(Retain(end=500, min_ttl=9.0),)
    )
    assert hint_of(request(session_id="d", priority=-5)) == {"session": "d", "retain": [{"priority": 40}]}


def test_a_hint_that_is_no_mapping_is_rejected_and_the_rest_is_read() -> None:
    hint, verdicts = read_hint(hint_of(request("final", session_id="d")))
    assert hint == Hint(session="d")
    assert [verdict.part for verdict in verdicts if verdict.outcome is Outcome.REJECTED] == [UNKNOWN]


def test_the_request_is_not_changed() -> None:
    said = request({"retain": [{"end_share": 0.5}]})
    hint_of(said)
    assert said.kv_transfer_params["kvbm"] == {"retain": [{"end_share": 0.5}]}
