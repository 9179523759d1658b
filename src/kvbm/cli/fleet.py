"""`kvbm fleet cert`: certificates for the nodes of a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbm.fleet.certificates import make_node

app = typer.Typer(
    help="Look after a fleet: nodes that read blocks out of each other's memory.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def fleet() -> None:
    """Look after a fleet: nodes that read blocks out of each other's memory."""


@app.command("cert", epilog="Example: kvbm fleet cert ./certificates --node node-1 --days 365")
def cert_command(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Where the authority's and the nodes' files are, or shall be."),
    ],
    node: Annotated[
        str, typer.Option("--node", metavar="NAME", help="The node's id, as its manager says it.")
    ],
    days: Annotated[int, typer.Option("--days", help="How long the certificate is good.")] = 365,
    name: Annotated[
        str | None,
        typer.Option("--fleet", metavar="NAME", help="The fleet's name, for a new authority [kvbm]."),
    ] = None,
    renew: Annotated[bool, typer.Option("--renew", help="Replace the node's certificate and key.")] = False,
) -> None:
    """Make a certificate for a node, and the fleet's authority where DIR has none.

    Give each node ca.pem and its own two files. Keep ca.key: who has it can make nodes.
    """
    files, identity, is_new = make_node(directory, node, days, name, renew)
    made = "a new authority" if is_new else "the authority that is there"
    print(f"Node {identity.node} of the fleet {identity.fleet}, signed by {made}, good for {days} days:")
    for meaning, path in zip(("authority", "certificate", "key"), files, strict=True):
        print(f"  {meaning:12} {path}")
