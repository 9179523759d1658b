"""The options of `kvbm plan` that are about a shared store."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

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


class StoreOptions(NamedTuple):
    """What was given of them."""

    remote: Remote = None
    remote_ttl: Ttl = None
    remote_admission: RemoteAdmission = None
    nodes: Nodes = None
    router: Router = None
    price_remote: StorePrice = None
    price_put: PutPrice = None
    price_get: GetPrice = None
    price_egress: EgressPrice = None

    def require_none(self) -> None:
        """Raises SettingsError for an option of the store where there is none."""
        for name, value in self._asdict().items():
            if value is not None:
                raise SettingsError(f"--{name.replace('_', '-')}", value, "only with --remote")


def with_store_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command that has these options beside its own; it gets them together, as `store`."""
    own = [each for each in signature(command).parameters.values() if each.name != "store"]
    hints = get_type_hints(StoreOptions, include_extras=True)
    store = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=hints[name])
        for name in StoreOptions._fields
    ]

    def called(**given: Any) -> None:
        options = StoreOptions(**{name: given.pop(name) for name in StoreOptions._fields})
        command(store=options, **given)

    called.__doc__ = command.__doc__
    called.__name__ = command.__name__
    # The command line is made of the signature, and annotations are strings there.
    resolved = get_type_hints(command, include_extras=True)
    named = [each.replace(kind=Parameter.KEYWORD_ONLY, annotation=resolved[each.name]) for each in own]
    called.__annotations__ = {each.name: each.annotation for each in named + store}
    called.__signature__ = Signature(named + store)  # type: ignore[attr-defined]  # functions may have one
    return called


def store_question(question: Question, options: StoreOptions) -> StoreQuestion:
    """The question about the store. Raises SettingsError."""
    from kvbm.settings.parse import parse_size
    from kvbm.sim.plan.store_prices import StorePrices
    from kvbm.sim.plan.stores import StoreQuestion

    names = ("per_gb", "per_1000_puts", "per_1000_gets", "egress_per_gb")
    words = ("--price-remote", "--price-put", "--price-get", "--price-egress")
    asked = (options.price_remote, options.price_put, options.price_get, options.price_egress)
    for option, price in zip(words, asked, strict=True):
        if price is not None and not 0.0 <= price < float("inf"):
            raise SettingsError(option, price, "dollars, 0 or more")
    given = {name: price for name, price in zip(names, asked, strict=True) if price is not None}
    rules: dict[str, object] = {}
    remote, ttl_hours = options.remote, options.remote_ttl
    assert remote is not None
    if remote != UNBOUNDED:
        size = parse_size("--remote", remote)
        if size <= 0:
            raise SettingsError("--remote", remote, f"a size above 0, or {UNBOUNDED}")
        rules["size_bytes"] = size
    if ttl_hours is not None:
        if not 0.0 < ttl_hours < float("inf"):
            raise SettingsError("--remote-ttl", ttl_hours, "hours above 0")
        rules["ttl_s"] = ttl_hours * 3600.0
    if options.remote_admission is not None:
        rules["admission"] = options.remote_admission
    more = {} if options.router is None else {"route": options.router}
    return StoreQuestion(
        question=question,
        nodes=options.nodes or 1,
        prices=StorePrices(**given, assumed=None in asked[:3]),
        rules=rules,
        **more,
    )
