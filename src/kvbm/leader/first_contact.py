"""An engine that asks once, when it needs the answer: question and answer in one call, within the step's budget.

Such an engine cannot be told "ask again". What does not lie in host memory when the answer comes is computed; the
manager brings it up for the next time (`rising`). An answer that is late counts as a miss, with the reason "deadline".
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbm.hints import UNHINTED, ClientHint
from kvbm.leader.leader import Leader
from kvbm.leader.step_budget import MESSAGES_MAX
from kvbm.leader.tracked import NOTHING_TOLD, Keep, Told


def ask_once(
    leader: Leader,
    request: str,
    hashes: Sequence[bytes],
    extras: bytes | None,
    computed: int,
    before_tail: int,
    keep: Keep | None = None,
    told: Told = NOTHING_TOLD,
    asker: ClientHint = UNHINTED,
) -> int:
    """How many blocks after the first `computed` lie in host memory, leased until they are loaded; at most up to
    `before_tail`. `Leader.allocated` follows where there are some; where there are none, the question is over.

    The arguments are those of `Leader.request_added`. The leader must be one that is asked `at_once`.
    """
    leader.request_added(request, hashes, extras, computed, keep, told, before_tail=before_tail, asker=asker)
    answer = leader.matched(request, computed, before_tail)
    for _ in range(MESSAGES_MAX):
        if not (answer.later and leader.may_wait(request)):
            break
        answer = leader.matched(request, computed, before_tail)
    if answer.later:
        leader.lookups.too_late(request)
    blocks = 0 if answer.later else max(0, min(answer.blocks, before_tail - computed))
    if not blocks:
        leader.allocated(request, 0, ())
    return blocks
