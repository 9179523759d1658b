"""Is it working, is it worth it, what should be changed: the answer in sentences, the most important first."""

from __future__ import annotations

import msgspec

from kvbm.observe.unread import NO_KEY_MATCHES
from kvbm.present.numbers import format_bytes
from kvbm.settings import variable

_LOOKUPS_MIN = 8
"""Fewer say nothing about a workload."""
_NOTABLE = 0.1
_FAULT, _ADVICE, _NORMAL = "fault", "advice", "normal"


class Finding(msgspec.Struct, frozen=True):
    """One sentence. `level`: a fault (something does not work), advice (a setting would help), or normal."""

    level: str
    text: str


class Signs(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that the verdict rests on, over the window. Shares are 0 to 1; of blocks, of all that were found."""

    window_s: float
    uptime_s: float
    unit: str = "tokens"
    engines: int = 0
    incomplete: tuple[tuple[str, int, int], ...] = ()
    faults: tuple[tuple[str, str], ...] = ()
    lookups: float = 0.0
    asked: float = 0.0
    hit_rate: float = 0.0
    loaded: float = 0.0
    saved_s: float = 0.0
    lost_lookups: float = 0.0
    corrupt: float = 0.0
    corrupt_remote: float = 0.0
    failed: float = 0.0
    host_full: bool = False
    host_evicted_per_s: float = 0.0
    host_leased_share: float = 0.0
    has_disk: bool = False
    disk_full: bool = False
    disk_evicted_per_s: float = 0.0
    disk_hit_share: float = 0.0
    has_remote: bool = False
    remote_hit_share: float = 0.0
    remote_written_blocks: float = 0.0
    remote_too_late_blocks: float = 0.0
    remote_over_budget_blocks: float = 0.0
    cost_share: float = 0.0
    late_share: float = 0.0
    no_room_share: float = 0.0
    refused_stores: float = 0.0
    written_bytes: float = 0.0
    stored_bytes: float = 0.0
    onboarding: int = 0


def judge(signs: Signs) -> tuple[Finding, ...]:
    """Faults first, then whether it is worth it, then advice."""
    faults = _faults(signs)
    worth = [Finding(_NORMAL, text) for text in _worth(signs)]
    return (*faults, *worth, *_advice(signs))


def _faults(signs: Signs) -> list[Finding]:
    found = [f"namespace {namespace}: {fault}" for namespace, fault in signs.faults]
    for name, missing, ranks in signs.incomplete:
        found.append(f"engine {name} has no cache: {missing} of its {ranks} ranks are not attached")
    if signs.corrupt:
        found.append(
            f"{signs.corrupt:,.0f} blocks had a wrong checksum and were dropped: look at the medium of the disk tier"
        )
    if signs.corrupt_remote:
        found.append(
            f"{signs.corrupt_remote:,.0f} blocks of the remote store had a wrong checksum and were dropped: look at "
            "the store, and at who else writes there"
        )
    if signs.failed:
        found.append(
            f"{signs.failed:,.0f} blocks could not be read, written or loaded: look at the manager's log"
        )
    return [Finding(_FAULT, text) for text in found]


def _worth(signs: Signs) -> list[str]:
    alone = [] if signs.engines else ["no engine is connected"]
    if not signs.lookups:
        return alone or [f"no request in the last {_window(signs)}"]
    return [*alone, _gain(signs, _window(signs))]


def _gain(signs: Signs, window: str) -> str:
    text = f"hit rate {signs.hit_rate:.0%} of the {signs.asked:,.0f} {signs.unit} asked in the last {window}"
    if signs.saved_s >= 0.05:
        return f"{text}: saved {_seconds(signs.saved_s)} of prefill"
    if signs.loaded:
        return f"{text}: {signs.loaded:,.0f} {signs.unit} were loaded, not computed"
    return f"{text}: nothing was loaded"


def _advice(signs: Signs) -> list[Finding]:
    if signs.lookups < _LOOKUPS_MIN:
        return []
    advice = []
    # Rates that the table beside it would round to nothing are no reason to buy memory.
    evicting = signs.host_full and signs.host_evicted_per_s >= 0.1
    if evicting and signs.has_disk and signs.disk_hit_share >= _NOTABLE:
        advice.append(
            f"host is full and evicts {_rate(signs.host_evicted_per_s)} blocks/s, and {signs.disk_hit_share:.0%} of "
            "what is found comes back from disk: more host memory would help"
        )
    elif evicting and signs.lost_lookups >= _NOTABLE * signs.lookups:
        advice.append(
            f"host is full and evicts {_rate(signs.host_evicted_per_s)} blocks/s, and "
            f"{signs.lost_lookups / signs.lookups:.0%} of the requests found nothing of a prefix that was asked for "
            f"before: more host memory{'' if signs.has_disk or signs.has_remote else ', or a disk tier,'} would help"
        )
    if signs.disk_full and signs.disk_evicted_per_s >= 0.1 and signs.lost_lookups >= _NOTABLE * signs.lookups:
        advice.append(
            f"disk is full and evicts {_rate(signs.disk_evicted_per_s)} blocks/s, and prefixes are gone that requests "
            "ask for again: a larger disk tier would help"
        )
    late, written = signs.remote_too_late_blocks, signs.remote_written_blocks
    if late >= 1.0 and late >= _NOTABLE * (late + written):
        advice.append(
            f"{late / (late + written):.0%} of the blocks on their way to the store were evicted from host before "
            f"their turn: more host memory, or less time between ({variable('remote_linger_s')}), would help"
        )
    if signs.remote_over_budget_blocks >= 1.0:
        advice.append(
            f"{signs.remote_over_budget_blocks:,.0f} blocks were not written to the store, as the hour's budget was "
            f"spent ({variable('remote_write_bytes')}, {variable('remote_requests')})"
        )
    if signs.no_room_share >= _NOTABLE or (signs.refused_stores and signs.host_leased_share > 0.5):
        advice.append(
            f"leases hold {signs.host_leased_share:.0%} of host memory and blocks find no room: more host memory, or "
            "fewer requests at once, would help"
        )
    if signs.cost_share >= _NOTABLE:
        advice.append(
            f"{signs.cost_share:.0%} of what was found is computed, as loading it would take longer"
        )
    if signs.late_share >= _NOTABLE:
        advice.append(
            f"{signs.late_share:.0%} of what was found arrives too late ({signs.onboarding:,} blocks wait to be read): "
            f"a faster {'store' if signs.remote_hit_share > signs.disk_hit_share else 'disk'}, or more host memory, "
            "would help"
        )
    written = signs.stored_bytes + signs.written_bytes
    if not advice and signs.hit_rate < 0.01 and written and signs.uptime_s > 600.0:
        nothing = not signs.hit_rate and not signs.lost_lookups
        advice.append(
            f"{format_bytes(written)} were written and {'' if nothing else 'almost '}nothing is found: if requests "
            f"share no prefixes, KVBM does not pay here{f'. {NO_KEY_MATCHES}' if nothing else ''}"
        )
    return [Finding(_ADVICE, text) for text in advice]


def _window(signs: Signs) -> str:
    return "minute" if 50.0 <= signs.window_s <= 75.0 else f"{max(signs.window_s, 0.0):.0f} s"


def _seconds(seconds: float) -> str:
    if seconds >= 600.0:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10.0 else f"{seconds:.1f} s"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 10.0 else f"{per_s:.1f}"
