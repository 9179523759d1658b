"""Facts of an engine that decide whether it shares blocks with another one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="facts are read from what torch holds; torch is not installed")

from kvbm.vllm_integration.namespace import guessing


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_guesses_that_are_looked_up_in_the_text_change_no_kv(method: str) -> None:
    assert guessing(SimpleNamespace(method=method)) == guessing(None) == ""


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "draft_model", "medusa"])
def test_a_draft_is_a_fact(method: str) -> None:
    assert guessing(SimpleNamespace(method=method)) == method
