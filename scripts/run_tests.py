"""The tests, in two sets that have no test in common but the property tests, which run with more examples in the second.

    run_tests.py          what every change needs: all tests that are not marked slow
    run_tests.py --rest   the others: slow ones, and the property tests again

Other arguments go to pytest. Tests that start no engine run as many at a time as there are cores. Engines run one by
one: an engine and its manager take two cores, and a manager that gets no processor time grants no slots, so that blocks
are not stored that tests expect. Tests under Dynamo and Ray, and those on other releases of vLLM, have targets of their
own.
"""

from __future__ import annotations

import subprocess
import sys
import time

NOTHING_COLLECTED = 5
ELSEWHERE = "not dynamo and not ray"
PARALLEL = ("-n", "auto", "--dist", "loadfile")
MANY_EXAMPLES = ("--hypothesis-profile", "thorough")
SLOWEST = ("--durations=40", "--durations-min=1")

EVERY_CHANGE = {
    "without an engine": ("-m", "not slow and not engine and not sglang", *PARALLEL),
    "vLLM": ("-m", "not slow and engine"),
}
REST = {
    "without an engine": ("-m", "(slow or hypothesis) and not engine and not sglang", *PARALLEL, *MANY_EXAMPLES),
    "vLLM": ("-m", "slow and engine"),
    "SGLang": ("-m", "sglang"),
}
