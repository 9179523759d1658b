"""A lender in a process of its own: `peer_child.py HOST PORT FILE`, which gets the port when blocks can be read."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from kvbm.layout import BlockLayout
from rigs.peers import LendingNode, keys_of


def main() -> None:
    host, port, told = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    layout = BlockLayout(block_tokens=4, shard_bytes=4 << 20)
    node = LendingNode(layout=layout, slots=16, listen=f"{host}:{port}")
    node.store(keys_of(8))
    beside = told.with_suffix(".tmp")
    beside.write_text(str(node.server.port))
    os.replace(beside, told)
    threading.Event().wait()


if __name__ == "__main__":
    main()
