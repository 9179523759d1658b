"""A process with a block manager and a store of its own; it does one thing, closes, and prints a number.

`URL store SEED [WEIGHTS]` offloads a prompt; `URL load SEED [WEIGHTS]` brings it back, each block as it was computed.
"""

from __future__ import annotations

import sys

import kvbm
from process.library_child import answer, load, store
from rigs.library import layout


def main() -> None:
    """As the module says."""
    url, command, seed, *weights = sys.argv[1:]
    namespace = kvbm.Namespace(model="test", fields=(("weights", *(weights or ["1"])),))
    with kvbm.BlockManager(layout(), host="1MB", namespace=namespace, remote=url) as manager:
        answer({"store": store, "load": load}[command](manager, int(seed)))


if __name__ == "__main__":
    main()
