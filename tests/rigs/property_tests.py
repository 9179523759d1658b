"""How many examples property tests try: few with `make test`, all with `make test-all`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

FULL_EXAMPLES = 100
"""Hypothesis's own default."""
QUICK_EXAMPLES = 20


def register_profiles() -> None:
    """Register `quick` and `thorough`, and load `quick`; pytest's --hypothesis-profile loads the other."""
    for name, count in (("quick", QUICK_EXAMPLES), ("thorough", FULL_EXAMPLES)):
        settings.register_profile(
            name,
            max_examples=count,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            derandomize=True,
        )
    settings.load_profile("quick")


def scale_examples(count: int) -> int:
    """A test's share of `count` examples in the loaded profile; all of them in `thorough`."""
    return max(5, count * settings().max_examples // FULL_EXAMPLES)
