"""How a client of the library finds its manager: one that is named, or an engine's private one, which it may start."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvbm.client.finder import ManagerAddress
from kvbm.settings import Settings, parse_socket_path


@dataclass(frozen=True)
class Attachment:
    """`engine` is the client's own name among those of the manager: it joins the two sessions of one client.

    A private manager is started with `settings` and `environment`. `data_parallel_rank` is the client's among those
    that serve one model. A private manager is to serve so many `namespaces`, each with an equal share. `kind` is
    as in `protocol.Hello`.
    """

    address: ManagerAddress
    settings: Settings
    engine: str
    environment: Mapping[str, str] = field(default_factory=dict)
    data_parallel_rank: int = 0
    namespaces: int = 1
    kind: str = ""

    @classmethod
    def at(cls, socket: str, peer_uids: Iterable[int] = ()) -> Attachment:
        """A program's, at the manager that listens at `socket`. Raises SettingsError for a path that none can have."""
        path = parse_socket_path("socket", socket)
        return cls(
            ManagerAddress(socket_path=path, private=False),
            Settings(manager=path, peer_uids=tuple(peer_uids)),
            engine=f"library-{os.getpid()}-{os.urandom(4).hex()}",
        )

    @classmethod
    def of_engine(
        cls,
        settings: Settings,
        environment: Mapping[str, str],
        deployment: str,
        engine: str,
        data_parallel_rank: int = 0,
        namespaces: int = 1,
        kind: str = "",
    ) -> Attachment:
        """One rank's, at the manager that the settings name, or at the private one that all ranks of a `deployment`
        share: its name must be the same in each of them, and no other's."""
        address = ManagerAddress.of(settings, deployment)
        return cls(address, settings, engine, dict(environment), data_parallel_rank, namespaces, kind)
