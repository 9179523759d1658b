"""`kvbm web`: the page of a running manager in a browser, and the admin API, on this machine alone."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from kvbm.cli.managers import ManagerOption
from kvbm.client.admin_http import DEFAULT_ADDRESS

app = typer.Typer(rich_markup_mode=None)

_EXAMPLES = """\b
Examples:
  kvbm web
  kvbm web --listen 127.0.0.1:9000 --manager /run/kvbm/manager.sock
  kvbm web --listen unix:/run/kvbm/admin.sock
From another machine: ssh -L 6881:127.0.0.1:6881 HOST kvbm web
"""


@app.command(epilog=_EXAMPLES)
def web(
    manager: ManagerOption = "",
    listen: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help=f"127.0.0.1:PORT or unix:PATH; {DEFAULT_ADDRESS}, or the next free port, if left out.",
        ),
    ] = "",
) -> None:
    """Serve a live page of a running manager, and the admin API, until Ctrl-C. Prints the address to open.

    It shows what kvbm top shows. A manager started with DYN_KVBM_ADMIN_HTTP serves both itself.
    """
    # Imported late: `--help` does not need it.
    importlib.import_module("kvbm.cli.web.process").serve_alone(manager, listen)
