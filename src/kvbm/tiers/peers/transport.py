"""How the bytes of blocks travel between nodes: over their connections, or by NIXL."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

from kvbm.tiers.nixl.package import cuda_of_torch, install_hint, is_installed
from kvbm.tiers.peers.mover import Mover, rdma_devices

log = logging.getLogger("kvbm.tiers")

Transport = Literal["auto", "tcp", "nixl"]


def open_mover(
    transport: Transport,
    certified: bool,
    setting: str,
    installed: Callable[[], bool] = is_installed,
    devices: Callable[[], Sequence[str]] = rdma_devices,
    make: Callable[[], Mover] = Mover,
) -> Mover | None:
    """A mover where the setting and this machine want one; `certified`: connections are encrypted.

    What NIXL moves is not, so with certificates it has to be asked for. Where it was, and cannot be had, a line says
    why.
    """
    if transport == "auto":
        wanted = not certified and bool(devices()) and installed()
        return make() if wanted else None
    if transport == "tcp":
        return None
    if not installed():
        hint = install_hint(cuda_of_torch())
        log.warning("%s=nixl: NIXL is not installed, blocks between nodes travel over TCP; %s", setting, hint)
        return None
    return make()
