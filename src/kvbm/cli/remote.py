"""`kvbm remote show|collect|clear`: look after the store that managers share."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import msgspec
import typer

from kvbm.clock import monotonic
from kvbm.errors import SettingsError
from kvbm.present import tables
from kvbm.present.numbers import column_bytes, format_bytes
from kvbm.present.tables import json_text, plain_table
from kvbm.settings import Settings, load_settings, parse_size, process_environment
from kvbm.tiers.remote.blobs import BlobStore
from kvbm.tiers.remote.collector import Collected, Collector
from kvbm.tiers.remote.named_store import open_named_store, store_field
from kvbm.tiers.remote.survey import INDEXES_READ_MAX, NamespaceSurvey, StoreSurvey, remove, survey

REQUEST_S = 30.0
TTL_HOURS_MAX = 10_000_000
_NAMED = 10

app = typer.Typer(
    help="Look after the store that managers share: show what lies there, collect, clear.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL", help="The store, as DYN_KVBM_REMOTE has it; that of the settings if left out."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(epilog="\b\nExamples:\n  kvbm remote show\n  kvbm remote show file:///mnt/kv --json")
def show(
    url: Url = "",
    every: Annotated[
        bool,
        typer.Option(
            "--blocks", help=f"Count blocks in more than {INDEXES_READ_MAX} packs too: one request for each."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what lies in the store: namespaces, packs, blocks, bytes, and when they were used."""
    with _store(url) as (store, _):
        found = survey(store, sys.maxsize if every else INDEXES_READ_MAX)
    if as_json:
        print(json_text({**msgspec.structs.asdict(found), "pack_bytes": found.pack_bytes}))
        return
    if not found.namespaces:
        print(f"{found.place}: nothing of ours lies there{_foreign(found.foreign)}")
        return
    headings = ("namespace", "packs", "blocks", "size", "last used", "first of all used")
    table = plain_table(headings, words={"namespace"}, title=found.place)
    for each in found.namespaces:
        blocks = "-" if each.blocks is None else f"{each.blocks:,}"
        size = column_bytes(each.pack_bytes)
        table.add_row(each.short, f"{each.packs:,}", blocks, size, _ago(each.newest_s), _ago(each.oldest_s))
    tables.console().print(table)
    print(f"{format_bytes(found.pack_bytes)} in all{_foreign(found.foreign)}")
    if any(each.blocks is None for each in found.namespaces):
        print(
            f"Blocks were not counted, as there are more than {INDEXES_READ_MAX:,} packs: --blocks counts them"
        )


@app.command(
    epilog="\b\nExamples:\n  kvbm remote collect --dry-run\n  kvbm remote collect --ttl-hours 24 --max 500GB --json"
)
def collect(
    url: Url = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    ttl_hours: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=TTL_HOURS_MAX,
            help="Remove what nobody used for so long; DYN_KVBM_REMOTE_TTL_HOURS if left out.",
        ),
    ] = None,
    most: Annotated[
        str,
        typer.Option("--max", metavar="SIZE", help="All may take so much; DYN_KVBM_REMOTE_GB if left out."),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Remove what is too old or too much, once and now. Managers do the same by themselves, now and then."""
    bound = parse_size("--max", most) if most else None
    with _store(url) as (store, settings):
        hours = settings.remote_ttl_hours if ttl_hours is None else ttl_hours
        collector = Collector(
            store,
            ttl_s=hours * 3600.0,
            capacity_bytes=bound if most else settings.remote_bytes or None,
            period_s=1.0,  # of no matter: it is not done in turn
        )
        done = collector.run(dry_run=dry_run, in_turn=False)
        place = store.place
    if as_json:
        print(json_text({"place": place, **msgspec.structs.asdict(done)}))
    else:
        _tell_collected(place, done)


@app.command(
    epilog="\b\nExamples:\n  kvbm remote clear --namespace 3f2a91c0\n  kvbm remote clear --all --yes --json"
)
def clear(
    url: Url = "",
    namespace: Annotated[
        str, typer.Option(metavar="DIGITS", help="The first digits of the namespace to remove.")
    ] = "",
    all_of_them: Annotated[bool, typer.Option("--all", help="Remove all namespaces.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a namespace from the store, or all. Managers that use it find nothing there, and no wrong block."""
    if bool(namespace) == all_of_them:
        raise SettingsError("--namespace", namespace, "either the first digits of a namespace, or --all")
    with _store(url) as (store, _):
        found = survey(store, 0)
        chosen = _chosen(found, namespace)
        if chosen and not yes:
            what = f"{sum(each.packs for each in chosen):,} packs ({format_bytes(_bytes(chosen))})"
            names = ", ".join(each.short for each in chosen[:_NAMED]) + (
                ", …" if len(chosen) > _NAMED else ""
            )
            typer.confirm(f"Remove {what} of {names} from {found.place}?", abort=True, err=True)
        removed = remove(store, [each.fingerprint for each in chosen])
    if as_json:
        gone = [each.fingerprint for each in chosen]
        print(json_text({"place": found.place, "namespaces": gone, "removed_blobs": removed}))
    else:
        print(f"{found.place}: {removed:,} blobs of {len(chosen)} namespaces were removed")


@contextmanager
def _store(url: str) -> Iterator[tuple[BlobStore, Settings]]:
    """The store that is meant, and the settings. Raises SettingsError."""
    settings = load_settings(process_environment()).settings
    if not url and not settings.remote_on:
        raise SettingsError("URL", "", f"a store's URL, or one that {store_field(settings)} names")
    store = open_named_store(settings, monotonic, REQUEST_S, url)
    try:
        yield store, settings
    finally:
        store.close()


def _chosen(found: StoreSurvey, digits: str) -> list[NamespaceSurvey]:
    """All namespaces without digits, or the one that they begin. Raises SettingsError."""
    if not digits:
        return list(found.namespaces)
    meant = [each for each in found.namespaces if each.fingerprint.startswith(digits.lower())]
    if len(meant) != 1:
        there = ", ".join(each.short for each in (meant or found.namespaces)[:_NAMED]) or "none"
        raise SettingsError(
            "--namespace", digits, f"the first digits of one namespace in the store; there: {there}"
        )
    return meant


def _bytes(chosen: Sequence[NamespaceSurvey]) -> int:
    return sum(each.pack_bytes for each in chosen)


def _tell_collected(place: str, done: Collected) -> None:
    would = "would be removed" if done.dry_run else "were removed"
    print(
        f"{place}: of {done.packs:,} packs ({format_bytes(done.pack_bytes)}), {done.removed_packs:,} "
        f"({format_bytes(done.removed_bytes)}) {would}, and {done.removed_leftovers:,} leftovers of writers"
        + (f"; {done.spared:,} stay because they were used meanwhile" if done.spared else "")
        + _foreign(done.foreign)
    )
    for name in done.named[:_NAMED] if done.dry_run else ():
        print(f"  {name}")
    if done.dry_run and len(done.named) > _NAMED:
        print("  … (--json names up to a thousand)")


def _foreign(count: int) -> str:
    return f"; {count:,} blobs there are not ours, and are left alone" if count else ""


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
