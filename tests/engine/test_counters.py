"""What an engine's manager says in its metrics when a reply has just come."""

from __future__ import annotations

import random

from engine import pages
from engine.launcher import Launcher
from engine.tier_settings import host
from engine.workload import BLOCK_TOKENS, Request, random_tokens

BLOCKS = 5
REQUESTS = 6
AHEAD_S = 0.1
"""Long enough to read a page that waits for nothing."""


def test_the_first_page_counts_a_reply_of_one_token(launcher: Launcher) -> None:
    """The engine copies the prompt's blocks in the step after the reply: the page waits for that, a little.

    A machine may stop for longer than a page waits, and that page is short of one reply. The next one is not.
    """
    engine = launcher.start(host())
    source = random.Random(7)
    requests = [
        Request(f"r{number}", random_tokens(source, BLOCKS * BLOCK_TOKENS + 1), 1)
        for number in range(REQUESTS)
    ]
    found = engine.call(pages.at_replies, requests, launcher.metrics_port, AHEAD_S, timeout_s=60.0)
    stored = [page["kvbm_offload_blocks_d2h"] for page in found]
    right = [count == BLOCKS * (number + 1) for number, count in enumerate(stored)]
    assert sum(right) > REQUESTS // 2, stored
    for page, count in zip(found, stored, strict=True):
        assert page['kvbm_pool_blocks{tier="host",state="resident"}'] == count
    after = launcher.metrics()
    assert after["kvbm_offload_blocks_d2h"] == BLOCKS * REQUESTS
    assert after['kvbm_pool_blocks{tier="host",state="resident"}'] == BLOCKS * REQUESTS
    assert after['kvbm_pool_blocks{tier="host",state="filling"}'] == 0
