"""What an operator is told of a remote tier: the part of its own description that has a form."""

from __future__ import annotations

import re

import msgspec

_PART = re.compile(r"/[0-9a-f]{64}/?$")


class RemoteReport(msgspec.Struct, frozen=True, kw_only=True):
    """A remote tier, as it describes itself: what it leaves out of this is empty.

    It is called `name` and is at `place`, which has a peculiarity for each line of `notes`. `fault` is empty while
    blocks can be read, and `store_fault` while they can be written; `reading` and `writing` are the states of the
    breakers. This manager knows of `blocks` in `packs`, of at most `blocks_max`, and of all that lie there once it is
    `complete`. `requests` counts by kind since the start, as stores bill them. The store was told of `touched` packs
    that they are in use; `compressed_packs` were met and not read. So many blocks wait or are under way to it
    (`down_blocks`) and from it (`up_blocks`); where nothing is written, `writes` is false. `links` counts the nodes
    that are read from, by how the last block came from each: `tcp` or `nixl`.

    Other nodes' memory has the name of its `fleet`. Of its `nodes`, without this one, `nodes_reached` can be read from
    now, and for those that cannot there is a line in `troubles`. `directory_fault` says why nobody tells which nodes
    there are. `tls`: both ends show certificates.
    """

    name: str = ""
    place: str = ""
    notes: tuple[str, ...] = ()
    fault: str = ""
    store_fault: str = ""
    reading: str = ""
    writing: str = ""
    writes: bool = False
    blocks: int = 0
    blocks_max: int = 0
    packs: int = 0
    complete: bool = False
    up_blocks: int = 0
    down_blocks: int = 0
    requests: dict[str, int] = {}
    read_bytes: int = 0
    written_bytes: int = 0
    read_errors: int = 0
    write_errors: int = 0
    corrupt_blocks: int = 0
    touched: int = 0
    touch_errors: int = 0
    compressed_packs: int = 0
    latency_s: float = 0.0
    read_bytes_per_s: float = 0.0
    write_bytes_per_s: float = 0.0
    collect_error: str = ""
    links: dict[str, int] = {}
    fleet: str = ""
    nodes: int = 0
    nodes_reached: int = 0
    troubles: tuple[str, ...] = ()
    directory_fault: str = ""
    tls: bool = False

    @property
    def shown(self) -> str:
        """Where it is, for people: the place of a namespace's part ends in the whole fingerprint, which they know."""
        return _PART.sub("", self.place) or self.name

    @property
    def fleet_fault(self) -> str:
        """Why a fleet as a whole does not work, one line; empty while some node is read from, and for a store."""
        parts = [self.directory_fault]
        if self.nodes and not self.nodes_reached:
            parts.append(f"none of {self.nodes} nodes is reached: {', '.join(self.troubles[:1])}")
        return "; ".join(filter(None, parts))
