"""The options of `kvbm plan` that are about a shared store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvbm.errors import SettingsError

if TYPE_CHECKING:
    from kvbm.sim.plan.planning import Question
    from kvbm.sim.plan.stores import StoreQuestion

UNBOUNDED = "unbounded"

Remote = Annotated[
    str | None,
    typer.Option(
        "--remote",
        metavar="SIZE",
        help=f"Does a store for all nodes pay, so large (1TB) or `{UNBOUNDED}`? With --target-hit-rate.",
    ),
]
Ttl = Annotated[
    float | None,
    typer.Option("--remote-ttl", metavar="HOURS", help="The store drops what nobody used for so long."),
]
RemoteAdmission = Annotated[
    str | None,
    typer.Option(
        "--remote-admission", metavar="NAME", help="Which blocks are written there: all, filter, ghost."
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option("--nodes", metavar="N", min=1, max=1024, help="Nodes that share the store, and the trace."),
]
Router = Annotated[
    str | None,
    typer.Option(
        "--router", metavar="NAME", help="How requests come to nodes: round-robin, session, random."
    ),
]
StorePrice = Annotated[
    float | None,
    typer.Option(
        "--price-remote", metavar="$", help="The store, for a GB in a month. Without it 0.02 is assumed."
    ),
]
PutPrice = Annotated[
    float | None,
    typer.Option("--price-put", metavar="$", help="1,000 writes or listings. Without it 0.005 is assumed."),
]
GetPrice = Annotated[
    float | None, typer.Option("--price-get", metavar="$", help="1,000 reads. Without it 0.0004 is assumed.")
]
EgressPrice = Annotated[
    float | None, typer.Option("--price-egress", metavar="$", help="A GB that is read, 0 if not given.")
]


def require_remote(**given: object) -> None:
    """Raises SettingsError for an option of the store where there is none."""
    for name, value in given.items():
        if value is not None:
            raise SettingsError(f"--{name.replace('_', '-')}", value, "only with --remote")


def store_question(
    question: Question,
    remote: str,
    ttl_hours: float | None,
    admission: str | None,
    nodes: int | None,
    router: str | None,
    asked: tuple[float | None, float | None, float | None, float | None],
) -> StoreQuestion:
    """The question about the store. Raises SettingsError."""
    from kvbm.settings.parse import parse_size
    from kvbm.sim.plan.store_prices import StorePrices
    from kvbm.sim.plan.stores import StoreQuestion

    names = ("per_gb", "per_1000_puts", "per_1000_gets", "egress_per_gb")
    options = ("--price-remote", "--price-put", "--price-get", "--price-egress")
    for option, price in zip(options, asked, strict=True):
        if price is not None and not 0.0 <= price < float("inf"):
            raise SettingsError(option, price, "dollars, 0 or more")
    given = {name: price for name, price in zip(names, asked, strict=True) if price is not None}
    rules: dict[str, object] = {}
    if remote != UNBOUNDED:
        size = parse_size("--remote", remote)
        if size <= 0:
            raise SettingsError("--remote", remote, f"a size above 0, or {UNBOUNDED}")
        rules["size_bytes"] = size
    if ttl_hours is not None:
        if not 0.0 < ttl_hours < float("inf"):
            raise SettingsError("--remote-ttl", ttl_hours, "hours above 0")
        rules["ttl_s"] = ttl_hours * 3600.0
    if admission is not None:
        rules["admission"] = admission
    more = {} if router is None else {"route": router}
    return StoreQuestion(
        question=question,
        nodes=nodes or 1,
        prices=StorePrices(**given, assumed=None in asked[:3]),
        rules=rules,
        **more,
    )
