"""A directory that is a list in the settings: `host:port,host:port`. All nodes may have the same list."""

from __future__ import annotations

from kvbm.errors import SettingsError
from kvbm.fleet.directory import PEERS_MAX, Peer, split_address


class StaticDirectory:
    """See the module. Raises SettingsError, which names `field`."""

    def __init__(self, text: str, field: str = "peers") -> None:
        addresses = [part.strip() for part in text.split(",") if part.strip()]
        for address in addresses:
            split_address(field, address)
        if not 0 < len(addresses) <= PEERS_MAX:
            raise SettingsError(field, text, f"1 to {PEERS_MAX} addresses, host:port,host:port")
        self._peers = tuple(Peer(address) for address in dict.fromkeys(addresses))
        self.place = f"a list of {len(self._peers)} addresses"
        self.fault = ""

    def peers(self) -> tuple[Peer, ...]:
        return self._peers

    def close(self) -> None:
        """Nothing to give back."""
