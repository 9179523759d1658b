"""The settings of a fleet: nodes that read blocks out of each other's host memory."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvbm.settings.setting import Kind, Setting


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The part of `Settings` that is about other nodes' managers."""

    fleet: Annotated[
        str | None,
        Setting("DYN_KVBM_FLEET", "--fleet", Kind.NAME, metavar="NAME", ours=True, reader="both"),
        "name of the fleet: managers that read blocks out of each other's host memory. Unset is off",
    ] = None
    fleet_node: Annotated[
        str | None,
        Setting(
            "DYN_KVBM_FLEET_NODE",
            "--fleet-node",
            Kind.NAME,
            metavar="NAME",
            default_text="the host's name",
            ours=True,
            reader="both",
        ),
        "this node's name, which no other node of the fleet has",
    ] = None
    fleet_listen: Annotated[
        str | None,
        Setting(
            "DYN_KVBM_FLEET_LISTEN",
            "--fleet-listen",
            Kind.ADDRESS,
            metavar="ADDRESS",
            ours=True,
            needs="fleet",
        ),
        "address where other nodes read from this one: 10.0.0.7:7400. Unset, this node reads and lends nothing",
    ] = None
    fleet_address: Annotated[
        str | None,
        Setting(
            "DYN_KVBM_FLEET_ADDRESS",
            "--fleet-address",
            Kind.ADDRESS,
            metavar="ADDRESS",
            default_text="where it listens",
            ours=True,
            needs="fleet",
        ),
        "address by which other nodes reach that, where it is another one",
    ] = None
    fleet_peers: Annotated[
        str | None,
        Setting(
            "DYN_KVBM_FLEET_PEERS",
            "--fleet-peers",
            Kind.ADDRESSES,
            metavar="ADDRESSES",
            ours=True,
            needs="fleet",
        ),
        "the other nodes, separated by commas: 10.0.0.7:7400,10.0.0.8:7400. All nodes may have the same list",
    ] = None
    fleet_etcd: Annotated[
        str | None,
        Setting("DYN_KVBM_FLEET_ETCD", "--fleet-etcd", Kind.URLS, metavar="URLS", ours=True, needs="fleet"),
        "etcd that keeps that list instead: http://host:2379, several separated by commas; an entry lasts as long "
        "as its node",
    ] = None
    fleet_certs: Annotated[
        str | None,
        Setting("DYN_KVBM_FLEET_CERTS", "--fleet-certs", Kind.PATH, metavar="DIR", ours=True, reader="both"),
        "directory with `ca.pem`, `NODE.pem` and `NODE.key`: the authority, and this node's certificate and key. Both "
        "ends show one. Unset, blocks cross the network unencrypted, on private addresses only",
    ] = None
    fleet_plain: Annotated[
        bool,
        Setting("DYN_KVBM_FLEET_PLAIN", "--fleet-plain", ours=True, reader="both"),
        "without certificates, listen on any address: whoever reaches it reads all blocks",
    ] = False
    fleet_transport: Annotated[
        Literal["auto", "tcp", "nixl"],
        Setting("DYN_KVBM_FLEET_TRANSPORT", "--fleet-transport", ours=True, needs="fleet"),
        "how blocks come from other nodes: `tcp`, over the connection, or `nixl`, by NIXL (RDMA), which does not "
        "encrypt. `auto` is `nixl` where NIXL is installed, there is an RDMA device, and `fleet_certs` is not set",
    ] = "auto"
