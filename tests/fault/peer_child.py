"""A lender in its own process: `peer_child.py HOST PORT FILE [nixl]`. FILE gets the port once blocks can be had."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from kvbm.layout import BlockLayout
from rigs.movers import nixl_mover
from rigs.peers import LendingNode, keys_of


def main() -> None:
    host, port, told = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    layout = BlockLayout(block_tokens=4, shard_bytes=4 << 20)
    mover = nixl_mover() if "nixl" in sys.argv[4:] else None
    node = LendingNode(layout=layout, slots=16, listen=f"{host}:{port}", mover=mover)
    node.store(keys_of(8))
    beside = told.with_suffix(".tmp")
    beside.write_text(str(node.server.port))
    os.replace(beside, told)
    threading.Event().wait()


if __name__ == "__main__":
    main()
