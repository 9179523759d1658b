"""`kvbm manager` on a disk whose writes do not end any more once a file is there.

The first arguments are that file and the disk's directory.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from collections.abc import Sequence

from kvbm.tiers.disk.syscalls import Syscalls


def main(stuck: str, disk: str, *arguments: str) -> None:
    """Serve."""
    genuine = Syscalls.pwritev

    def pwritev(self: Syscalls, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if os.path.exists(stuck) and os.readlink(f"/proc/self/fd/{fd}").startswith(disk):
            threading.Event().wait()
        return genuine(self, fd, buffers, offset)

    Syscalls.pwritev = pwritev  # type: ignore[method-assign]
    sys.argv = ["kvbm", *arguments]
    runpy.run_module("kvbm.cli.main", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
