"""`kvbm why`: why a request computed blocks that it could have loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvbm.admin_protocol import WhyQuery, WhyReply
from kvbm.cli.managers import NamespaceOption, settings_for
from kvbm.cli.prompt_commands import ModelOption
from kvbm.cli.why_prompt import ask_prompt, prefix_line
from kvbm.client.admin import Admin, choose_manager
from kvbm.errors import SettingsError
from kvbm.present.tables import console, json_text, plain_table
from kvbm.settings import variable

_LOST = {
    "filter": "the filter refused it",
    "budget": "the write budget was spent",
    "queue_full": "the queue to disk was full",
    "full": "the disk had no slot for it",
    "tier_off": "the disk was off",
    "io": "the write failed",
    "too_late": "host memory evicted it before its turn",
    "no_tenant": "nobody knew whose it is, and each tenant's blocks are encrypted with a key of their own",
}
_LOST_REMOTE = {
    **_LOST,
    "budget": "the hour's budget of bytes or requests was spent",
    "queue_full": "the queue to the store was full",
    "tier_off": "the store was off",
}

MEANINGS = {
    "never_seen": "no block like it was ever stored",
    "evicted": "it was here, and the policy evicted it",
    "expired": "it was here, and its client wanted it kept for no longer",
    "reset": "somebody reset the tier",
    "refused_by_filter": "the filter kept it from disk or the store, and host memory evicted it",
    "no_state_at_boundary": "it is held, but not what the model's other layers need to go on from there",
    "not_written": "it did not reach the disk or the store before host memory evicted it",
    "not_stored": "it was computed, but never got into host memory",
    "failed_checksum": "its bytes on disk or in the store were damaged; it was dropped",
    "model_changed": "the same tokens came under another namespace",
    "adapter_changed": "the same tokens came with another adapter",
    "salt_changed": "the same tokens came with another cache_salt",
    "weights_changed": "the weights changed, or the cache was reset",
    "extras_changed": "the same tokens came with another adapter, salt or media",
    "unavailable": "a rank of its engine was not attached yet",
    "store_off": "it lies in the remote store, which is off",
    "recompute_cheaper": "computing was measured to be faster than loading",
    "promotion_too_late": "the answer or the bytes came too late",
    "no_room": "host memory had no room to bring it up from a tier below",
    "stale": "its lease or session had ended, or the device had dropped the blocks before it",
    "refused": "the tier below did not give it, or gave it damaged",
    "copy_failed": "a rank could not copy it to the device",
    "unused": "the engine went on without it",
}

LATEST = 20
"""So many of the latest requests are shown."""

app = typer.Typer(rich_markup_mode=None)

_EXAMPLES = """\b
Examples:
  kvbm why                              the latest requests, and a table of reasons
  kvbm why cmpl-6f0c0e9d2b3a4c5d        the id of the API's response, or its first characters
  kvbm why cmpl-6f0c0e9d2b3a4c5d --json
  kvbm why --prompt-file system-prompt.json     how far a prompt would match now
"""


@app.command(epilog=_EXAMPLES)
def why(
    request: Annotated[
        str,
        typer.Argument(metavar="REQUEST_ID", help="Id of the API's response; the latest when left out."),
    ] = "",
    manager: Annotated[
        str,
        typer.Option(help="Socket of the manager; the only one that runs when left out.", metavar="SOCKET"),
    ] = "",
    limit: Annotated[
        int | None,
        typer.Option("-n", "--limit", min=1, max=256, help="Show so many of the latest requests (20)."),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Ask about a prompt instead: a JSON list of token ids.",
        ),
    ] = None,
    model: ModelOption = "",
    namespace: NamespaceOption = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how far a prompt matched in each tier, and why no further.

    The manager remembers its latest requests only, and starts anew when it is restarted.
    """
    if limit is not None and (request or prompt_file is not None):
        raise SettingsError("--limit", limit, "a value only for the latest requests")
    if prompt_file is not None:
        if request:
            raise SettingsError("REQUEST_ID", request, "no value together with --prompt-file")
        _tell_prompt(ask_prompt(prompt_file, model, namespace, manager), as_json)
        return
    for option, value in (("--model", model), ("--namespace", namespace)):
        if value:
            raise SettingsError(option, value, "a value only together with --prompt-file")
    reply = ask(manager, WhyQuery(request=request, limit=limit or LATEST))
    if request and reply.matching != 1:
        raise SettingsError("REQUEST_ID", request, not_one(reply))
    if as_json:
        print(json_text(document(reply)))
    elif request:
        print("\n".join(explain(reply.requests[0])))
    else:
        _print_overview(reply)


def _tell_prompt(reply: WhyReply, as_json: bool) -> None:
    if as_json:
        (found,) = document(reply)["requests"]
        print(json_text(found))
    else:
        print("\n".join(explain(reply.requests[0])))


def ask(manager: str, query: WhyQuery) -> WhyReply:
    """The answer of the manager at this socket, or of the only one. Raises as `Admin` and `choose_manager`."""
    settings = settings_for(manager)
    with Admin(choose_manager(settings), settings) as admin:
        return admin.ask(query, WhyReply)


def not_one(reply: WhyReply) -> str:
    """What to answer to an id that no request has, or several."""
    if reply.matching:
        names = ", ".join(str(found["request"]) for found in reply.requests)
        more = ", …" if reply.matching > len(reply.requests) else ""
        return f"the id of one request, not of {reply.matching}: {names}{more}"
    return (
        f"the id of one of the last {reply.kept} requests since the manager started {_ago(reply.seconds)}; a request "
        "shorter than a block, or whose blocks were all on the device, or that came while the manager was away, is "
        "not known to it"
    )


def explain(found: dict[str, Any]) -> list[str]:
    """What is known of one request, in lines for people."""
    size = found["block_tokens"]
    name = f"{found['model']}, namespace {found['namespace']}, " if found["model"] else ""
    lines = [f"{found['request']} ({name}{_ago(found['seconds_ago'])})"]
    cut = f", {found['no_room']} found without room for them" if found["no_room"] else ""
    of = f" of {size} tokens" if size else ""
    tiers = ", ".join(f"{tier} {found[tier]}" for tier in ("device", "host", "disk", *_remote(found)))
    now = "prefix" in found
    lines.append(
        prefix_line(found) if now else f"{found['blocks']} blocks{of}: {tiers}{cut}; {found['loaded']} loaded"
    )
    first = found["first_missing"]
    if first is not None:
        tokens = f" (tokens {first * size + 1}-{(first + 1) * size})" if size else ""
        lines.append(f"block {first + 1}{tokens}: {_first_missing(found)}")
        lines += [f"  {line}" for line in found["differs"]]
    for what, counts in (
        ("in no tier" if now else "computed, in no tier", found["missing"]),
        ("found, and computed", found["unloaded"]),
    ):
        lines += [f"{_blocks(count)} {what}: {_named(reason)}" for reason, count in counts.items()]
    if found["unneeded"]:
        lines.append(
            f"{_blocks(found['unneeded'])} found, and not needed: they were on the device by then (another request had "
            "them loaded), or the request ended"
        )
    if not found["missing"] and not found["unloaded"]:
        lines.append("nothing was missing")
    lines += [f"its client says: {part}" for part in found["hint"]]
    lines += [f"to change that: {advice}" for advice in _advice(found)]
    return lines


def main_reason(found: dict[str, Any]) -> str:
    """The reason that cost the most blocks; empty where all that was asked for was loaded."""
    counts: dict[str, int] = {**found["missing"], **found["unloaded"]}
    return max(counts, key=lambda reason: counts[reason]) if counts else ""


def _first_missing(found: dict[str, Any]) -> str:
    left, reason = found["left"], next(iter(found["missing"]), "")
    host, disk, remote = left.get("host"), left.get("disk"), left.get("remote")
    if reason in ("never_seen", "") and not found["history_complete"]:
        return "never seen, or gone for so long that the manager has forgotten it"
    if host is None and disk is None and remote is None:
        return MEANINGS.get(reason, reason)
    parts = []
    if host is not None and host["what"] == "evicted":
        parts.append(f"evicted from host {_ago(host['seconds_ago'])} by {found['eviction_policy']}")
    elif host is not None:
        why_not = {
            "reset": "dropped from host by a reset",
            "no_slot": "refused by host memory: no slot was free",
        }
        parts.append(
            f"{why_not.get(host['what'], 'never complete in host memory')} {_ago(host['seconds_ago'])}"
        )
    if disk is not None and disk["what"] in ("corrupt", "reset"):
        how = (
            "dropped from disk: wrong checksum"
            if disk["what"] == "corrupt"
            else "dropped from disk by a reset"
        )
        parts.append(f"{how} {_ago(disk['seconds_ago'])}")
    elif disk is not None and reason == "evicted":
        parts.append(f"evicted from disk {_ago(disk['seconds_ago'])} by {found['eviction_policy']}")
    elif disk is not None:
        parts.append(
            f"not written to disk {_ago(disk['seconds_ago'])}: {_LOST.get(disk['what'], disk['what'])}"
        )
    elif "disk" in found["tiers"]:
        parts.append("not on disk")
    if remote is not None:
        parts.append(_left_store(remote))
    elif "remote" in found["tiers"]:
        parts.append("not in the store, as far as this manager knows")
    return ", and ".join(parts)


def _left_store(remote: dict[str, Any]) -> str:
    ago = _ago(remote["seconds_ago"])
    if remote["what"] == "corrupt":
        return f"dropped from the store {ago}: wrong checksum"
    if remote["what"] == "gone":
        return f"no longer in the store when it was asked for {ago}"
    return f"not written to the store {ago}: {_LOST_REMOTE.get(remote['what'], remote['what'])}"


def _remote(found: dict[str, Any]) -> list[str]:
    """The remote tier, where there is one."""
    return ["remote"] if found["remote"] or "remote" in found["tiers"] else []


def _advice(found: dict[str, Any]) -> list[str]:
    """What a person can change, for the reason that cost most."""
    has_disk, has_host = "disk" in found["tiers"], "host" in found["tiers"]
    larger = f"{'a larger' if has_host else 'a'} host tier ({variable('host_bytes')})"
    room = larger if has_host else f"a larger staging area ({variable('staging_bytes')}), or {larger}"
    disk = f"{'a larger' if has_disk else 'a'} disk tier ({variable('disk_bytes')})"
    advice = {
        "evicted": f"{larger}, or {disk}",
        "refused_by_filter": f"{larger}, or another admission to disk ({variable('disk_admission')})",
        "not_written": f"{larger}, a faster disk, or a larger write budget ({variable('disk_write_budget_bytes')})",
        "store_off": "look at the store; `kvbm doctor` tries it out",
        "not_stored": room,
        "no_state_at_boundary": "with recurrent layers, vLLM's prefix_cache_retention_interval"
        " (docs/guides/hybrid-models.md)",
        "no_room": room,
        "failed_checksum": "look at the disk; `kvbm disk verify` reads every block",
        "promotion_too_late": f"{larger}, or a faster disk",
        "recompute_cheaper": "nothing: loading would have been slower",
    }
    if "remote" in found.get("left", {}):
        advice |= {
            "refused_by_filter": f"another admission to the store ({variable('remote_admission')})",
            "not_written": _advice_store(found["left"]["remote"]["what"], larger),
            "evicted": f"in the store a longer life ({variable('remote_ttl_hours')}) or more room "
            f"({variable('remote_bytes')})",
            "failed_checksum": "look at the store, and at who else writes there",
        }
    chosen = advice.get(main_reason(found))
    return [chosen] if chosen else []


def _advice_store(what: str, larger: str) -> str:
    """What helps where a block was not written to the store for this reason."""
    return {
        "budget": f"a larger budget ({variable('remote_write_bytes')}, {variable('remote_requests')})",
        "tier_off": "look at the store; `kvbm doctor` tries it out",
        "io": "look at the store; `kvbm doctor` tries it out",
        "no_tenant": f"no encryption, or no tier that forgets whose blocks are ({variable('remote_key_file')})",
    }.get(what, f"{larger}, or less time between ({variable('remote_linger_s')})")


def _print_overview(reply: WhyReply) -> None:
    screen = console()
    screen.print(
        f"in the last {_ago(reply.seconds).removesuffix(' ago')}: {reply.asked_blocks} blocks asked for"
    )
    if not reply.requests:
        screen.print("no request was looked up yet")
        return
    reasons = plain_table(("blocks", "reason", "which means"), words=("reason", "which means"))
    for reason, blocks in reply.reasons.items():
        reasons.add_row(str(blocks), reason, MEANINGS.get(reason, ""))
    if reply.reasons:
        screen.print(reasons)
    else:
        screen.print("nothing that was asked for was missing")
    remote = ["remote"] if any(map(_remote, reply.requests)) else []
    tiers = ("device", "host", "disk", *remote)
    headings = ("request", "ago", "blocks", *tiers, "loaded", "computed", "why")
    table = plain_table(headings, words=("why",), folded=("request",))
    for found in reply.requests:
        row: dict[str, Any] = found
        numbers = (row[name] for name in ("blocks", *tiers, "loaded"))
        ago = _ago(row["seconds_ago"]).removesuffix(" ago")
        computed = sum(row["missing"].values()) + sum(row["unloaded"].values())
        table.add_row(str(row["request"]), ago, *map(str, numbers), str(computed), main_reason(row) or "hit")
    screen.print(table)


def document(reply: WhyReply) -> dict[str, Any]:
    """The reply as `--json` prints it, with what costs most and what would help."""
    requests = [
        {**found, "reason": main_reason(found) or "hit", "advice": _advice(found)} for found in reply.requests
    ]
    return {
        "seconds": reply.seconds,
        "requests_kept": reply.kept,
        "asked_blocks": reply.asked_blocks,
        "reasons": reply.reasons,
        "requests": requests,
    }


def _blocks(count: int) -> str:
    return f"{count} block" if count == 1 else f"{count} blocks"


def _named(reason: str) -> str:
    meaning = MEANINGS.get(reason)
    return f"{reason} ({meaning})" if meaning else reason


def _ago(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago" if seconds >= 10 else f"{seconds:.1f} s ago"
