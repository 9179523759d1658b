"""What clients say, as it reaches the manager: read again, counted, and put into the words of the policies.

A leader has read it already; another client of the socket may not have, so nothing here trusts its form.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbm.hints import ClientHint, Verdict, from_tuples, read_hint
from kvbm.observe.metrics import Metrics
from kvbm.policy.contract import ClientWord
from kvbm.protocol import Lookup

TENANT_CHARACTERS_MAX = 64


def heard(message: Lookup) -> ClientHint:
    """What a lookup says, and what became of it where it was read first. Nothing raises: no hint is worth a session."""
    read = read_hint(message.hint or None)
    # What a leader has read is clean by now: its own verdicts tell of what it left out.
    verdicts = from_tuples(message.verdicts) or read.verdicts
    return ClientHint(message.tenant[:TENANT_CHARACTERS_MAX], read.hint, verdicts)


def count(verdicts: Iterable[Verdict], metrics: Metrics) -> None:
    """Count what became of each part."""
    for part, outcome, _, why in verdicts:
        metrics.add("kvbm_hints_total", part=part, outcome=outcome.value, reason=why.value)


def settled(read: Iterable[Verdict], decided: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """The final verdict of each part: what was decided here, or else what became of it where it was read."""
    parts = {verdict.part for verdict in decided}
    return (*(verdict for verdict in read if verdict.part not in parts), *decided)


def word_of(asker: ClientHint) -> ClientWord | None:
    """What the policies are told; None where the client says nothing that concerns them."""
    hint = asker.hint
    if hint.session is None and not hint.final and hint.expect_s is None and not hint.demote:
        return None
    return ClientWord(asker.tenant, hint.session or "", hint.final or hint.demote, hint.expect_s)
