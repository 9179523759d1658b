"""The page about traces names the spans and attributes that are sent: all of them, and no other."""

from __future__ import annotations

import inspect
import re

import pytest

from kvbm.leader import traces
from kvbm.observe.metric_table import BY_NAME
from rigs.checkout import ROOT

PAGE = ROOT / "docs" / "operating" / "tracing.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="a source distribution has no docs")


def sent() -> set[str]:
    """The names in the module that makes the spans; one that ends in a reason goes without it."""
    found = re.findall(r'"((?:kvbm|gen_ai)\.[a-z_.]*[a-z_])(?:\.\{reason\})?"', inspect.getsource(traces))
    return set(found)


def test_names_of_spans_and_attributes_are_those_of_the_code() -> None:
    told = set(re.findall(r"\b((?:kvbm|gen_ai)\.[a-z_.]*[a-z_])", PAGE.read_text()))
    assert {"kvbm.request", "kvbm.copy", "kvbm.computed_tokens", "kvbm.expected_seconds"} <= sent()
    assert told == sent()


def test_metrics_that_it_sends_readers_to_exist() -> None:
    assert set(re.findall(r"`(kvbm_\w+)", PAGE.read_text())) <= set(BY_NAME)
