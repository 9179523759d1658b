"""What clients say, as it reaches the manager: read again, counted, and put into the words of the policies.

A leader has read it already; another client of the socket may not have, so nothing here trusts its form.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbm.hints import ClientHint, Outcome, Verdict, Why, from_tuples, read_hint
from kvbm.manager.retaining import final_verdicts, goes_first, of_ranges
from kvbm.observe.metrics import Metrics
from kvbm.policy.contract import ClientWord, EvictionPolicy, believes
from kvbm.protocol import Lookup, Says

TENANT_CHARACTERS_MAX = 64


def heard(message: Lookup | Says) -> ClientHint:
    """What a message says, and what became of it where it was read first. Nothing raises: no hint is worth that."""
    read = read_hint(message.hint or None)
    # What a leader has read is clean by now: its own verdicts tell of what it left out.
    verdicts = from_tuples(message.verdicts) or read.verdicts
    return ClientHint(message.tenant[:TENANT_CHARACTERS_MAX], read.hint, verdicts)


def decided_here(
    read: Sequence[Verdict], judged: Sequence[Verdict], others: Sequence[Verdict]
) -> tuple[Verdict, ...]:
    """What became of parts at the manager: of all ranges, where some were `judged`, and of `others`."""
    return (*(of_ranges(final_verdicts(read, judged)) if judged else ()), *others)


def doubted(asker: ClientHint, policy: EvictionPolicy, decided: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """Verdicts on what the policy does not believe of this client, where nothing else was decided."""
    said = [part for part in ("final", "expect_s") if getattr(asker.hint, part)]
    if not said or believes(policy, asker.tenant):
        return ()
    known = {verdict.part for verdict in decided}
    reason = "the eviction policy ignores it: clients of this salt were wrong too often"
    return tuple(Verdict(part, Outcome.REJECTED, reason, Why.DOUBTED) for part in said if part not in known)


def count(verdicts: Iterable[Verdict], metrics: Metrics) -> None:
    """Count what became of each part."""
    for part, outcome, _, why in verdicts:
        metrics.add("kvbm_hints_total", part=part, outcome=outcome.value, reason=why.value)


def word_of(asker: ClientHint, tokens: int | None = None) -> ClientWord | None:
    """What the policies are told of a prompt of so many tokens; None where nothing that is said concerns them."""
    hint = asker.hint
    final = hint.final or hint.demote or any(goes_first(each, tokens) for each in hint.retain)
    if hint.session is None and not final and hint.expect_s is None:
        return None
    return ClientWord(asker.tenant, hint.session or "", final, hint.expect_s)
