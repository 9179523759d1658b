"""The results of the experiment: their values, the verdict over them, the table and the JSON file.

Pure but for `save`: everything here can be tested without an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from kvbm.demo.client import Likelihoods, RequestError
from kvbm.demo.counters import TIERS
from kvbm.present.numbers import quantile
from kvbm.present.tables import FittingTable, plain_table, save_json

SHOWN_CHARACTERS = 60


TIE_NATS = 1e-4
"""Two tokens so alike in likelihood are a tie: which one is first depends on rounding, which differs between computing
a prompt in one piece and in two (by 1e-5 in float32 here). Wrong KV moves likelihoods by much more.
"""


class AnsweredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One answered request. `seen`: an earlier request of the run had the same document.

    Where the text differs from that of the first run `apart_nats` is how far the two first differing tokens are apart
    in likelihood when the same server computes them anew; None where that was not asked, or is not known.
    """

    document: int
    question: int
    seen: bool
    ttft_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    text: str
    token_ids: tuple[int, ...]
    apart_nats: float | None = None

    @property
    def tied(self) -> bool:
        """The text differs at a tie alone."""
        return self.apart_nats is not None and self.apart_nats <= TIE_NATS


Recompute = Callable[[AnsweredRequest, int], tuple[tuple[int, ...], Likelihoods]]
"""Computes a request's first tokens, so many of them, without any cache. May raise RequestError."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One server's run: its settings, its answers, and the prompt tokens by tier.

    `required_tier` must have served tokens for the run to show what it is meant to show; empty: none.
    """

    name: str
    title: str
    environment: Mapping[str, str]
    required_tier: str
    start_s: float
    requests: tuple[AnsweredRequest, ...]
    hit_tokens: Mapping[str, int]


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All results of the experiment, with its machine and its settings."""

    machine: Mapping[str, str]
    settings: Mapping[str, str | int]
    runs: tuple[Run, ...]


def ttfts_s(run: Run, *, seen_only: bool) -> list[float]:
    """Times to first token, of all requests or of those whose document was seen before."""
    return [request.ttft_s for request in run.requests if request.seen or not seen_only]


def median_ttft_s(run: Run) -> float:
    """The median time to first token where a document was seen before."""
    return quantile(ttfts_s(run, seen_only=True), 0.5)


def speedup(results: Results, run: Run) -> float:
    """How many times sooner the first token comes than without KVBM, where the document was seen before."""
    return median_ttft_s(results.runs[0]) / median_ttft_s(run)


def prompt_tokens(run: Run) -> int:
    """Tokens of all prompts of a run."""
    return sum(request.prompt_tokens for request in run.requests)


def first_difference(results: Results) -> str | None:
    """The first request that two runs answered differently, in words; None when all are equal but for ties."""
    reference = results.runs[0]
    for run in results.runs[1:]:
        if len(run.requests) != len(reference.requests):
            return f"{run.name} answered {len(run.requests)} requests, {reference.name} {len(reference.requests)}"
        for number, (want, got) in enumerate(zip(reference.requests, run.requests, strict=True), start=1):
            if got.tied or (want.text, want.token_ids) == (got.text, got.token_ids):
                continue
            at = find_divergence(want.token_ids, got.token_ids)
            return (
                f"request {number} (document {want.document + 1}, question {want.question + 1}), token {at + 1}:"
                f"\n  {reference.name}: {_shown(want.text)}\n  {run.name}: {_shown(got.text)}"
            )
    return None


def ties(results: Results) -> int:
    """How many requests were answered differently at a tie of two tokens."""
    return sum(request.tied for run in results.runs for request in run.requests)


def problems(results: Results, *, same_text_required: bool = True) -> list[str]:
    """The reasons why the experiment failed; empty when it did not."""
    found = []
    difference = first_difference(results) if same_text_required else None
    if difference is not None:
        found.append(f"the runs gave different texts: {difference}")
    for run in results.runs:
        if run.required_tier and not run.hit_tokens.get(run.required_tier):
            found.append(f"run {run.name!r} has no {run.required_tier} hits: no token came from that tier")
    return found


def render(results: Results) -> RenderableType:
    """The tables, and below them the machine and the settings. They fit 80 columns."""
    lines = [f"{name}: {value}" for name, value in {**results.machine, **results.settings}.items()]
    for run in results.runs:
        if run.environment:
            lines.append(f"{run.name}: " + " ".join(f"{k}={v}" for k, v in run.environment.items()))
    return Group(_times(results), _sources(results), Text("\n".join(lines), style="dim"))


def _times(results: Results) -> RenderableType:
    headings = ("seen\np50", "before\np95", "all\np50", "\np95", "speed-up\nof seen p50")
    table = _table("Time to first token, ms", *headings)
    for run in results.runs:
        values = [
            f"{quantile(ttfts_s(run, seen_only=seen_only), fraction) * 1e3:,.0f}"
            for seen_only in (True, False)
            for fraction in (0.5, 0.95)
        ]
        table.add_row(run.title, *values, f"{speedup(results, run):.1f} ×")
    return table


def _sources(results: Results) -> RenderableType:
    table = _table("Prompt tokens by the tier they came from", *TIERS, "computed")
    for run in results.runs:
        tokens = [run.hit_tokens.get(tier, 0) for tier in TIERS]
        computed = prompt_tokens(run) - sum(tokens)
        table.add_row(run.title, *(f"{count:,}" for count in (*tokens, computed)))
    return table


def _table(title: str, *headings: str) -> FittingTable:
    table = plain_table(("run", *headings), words={"run"}, title=title)
    table.min_width, table.columns[0].min_width = 72, 24
    return table


def save(results: Results, path: Path) -> None:
    """Write the results as indented JSON: the figures of the table, then every raw value."""
    summary = {
        run.name: {
            **{
                f"ttft_{kind}_p{percent}_s": quantile(ttfts_s(run, seen_only=kind == "seen"), percent / 100)
                for kind in ("seen", "all")
                for percent in (50, 95)
            },
            "speedup_p50": speedup(results, run),
            "prompt_tokens": prompt_tokens(run),
            "hit_tokens": run.hit_tokens,
        }
        for run in results.runs
    }
    document = {
        "summary": summary,
        "first_difference": first_difference(results),
        **msgspec.to_builtins(results),
    }
    save_json(document, path)


def find_divergence(left: Sequence[int], right: Sequence[int]) -> int:
    """The first position at which two answers differ."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def measure_difference(recompute: Recompute, want: AnsweredRequest, got: AnsweredRequest) -> AnsweredRequest:
    """`got`, with how far apart in likelihood the first differing tokens are when the server computes them anew.

    Unchanged if nothing differs, if the recomputed answer begins otherwise, or if it does not have both tokens among
    the likeliest.
    """
    at = find_divergence(want.token_ids, got.token_ids)
    if at >= min(len(want.token_ids), len(got.token_ids)):
        return got
    try:
        tokens, likelihoods = recompute(got, at + 1)
    except RequestError:  # not every server reports likelihoods: then the difference stands
        return got
    if tokens[:at] != got.token_ids[:at] or len(likelihoods) <= at:
        return got
    left, right = (likelihoods[at].get(each.token_ids[at]) for each in (want, got))
    if left is None or right is None:
        return got
    return msgspec.structs.replace(got, apart_nats=abs(left - right))


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…")
