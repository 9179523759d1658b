"""Names that set nothing, so that deployments start unchanged: variables of the original, and removed settings."""

from __future__ import annotations

import msgspec


class Ineffective(msgspec.Struct, frozen=True):
    """A variable of the original without effect here; `reason` says why.

    A name that ends in `*` stands for every name that begins so. A `switch` that is off draws no warning.
    """

    variable: str
    reason: str
    switch: bool = False


_UNIX_SOCKET = "engine and manager talk over a Unix socket"

INEFFECTIVE: tuple[Ineffective, ...] = (
    Ineffective("DYN_KVBM_LEADER_ZMQ_HOST", _UNIX_SOCKET),
    Ineffective("DYN_KVBM_LEADER_ZMQ_ACK_PORT", _UNIX_SOCKET),
    Ineffective("DYN_KVBM_DISABLE_WRITE_COMBINED", "host memory is never write-combined", switch=True),
    Ineffective(
        "DYN_KVBM_ENABLE_NUMA",
        "host memory lies next to the GPU unless DYN_MEMORY_DISABLE_NUMA is set",
        switch=True,
    ),
    Ineffective("DYN_KVBM_NCCL_MLA_MODE", "KV that all ranks hold alike is kept once", switch=True),
    Ineffective("DYN_KVBM_NCCL_MAX_CTAS", "no NCCL broadcast is used"),
    Ineffective(
        "DYN_KVBM_ENABLE_RECORD", "`kvbm record FILE` records the requests to a running manager", switch=True
    ),
    Ineffective("DYN_FATBIN_PATH", "the copy kernel is compiled where it runs"),
    Ineffective("DYN_KVBM_TRANSFER_BATCH_SIZE", "set DYN_KVBM_MAX_TRANSFER_BATCH_SIZE instead"),
    Ineffective(
        "DYN_KVBM_NIXL_BACKEND_*",
        "a manager needs no NIXL; kvbm.BlockManager finds its own",
    ),
)
"""Variables of the original that are accepted without effect, with a warning."""

OTHER_VARIABLES = ("DYN_SDK_DISABLE_ANSI_LOGGING",)
"""Variables of the original that ask for something we always do (plain log text): accepted without a warning."""


class RemovedSetting(msgspec.Struct, frozen=True):
    """A setting of an earlier version: its variable, its key in a file and in an engine's configuration, and what to
    use `instead`, as the end of a sentence. Its flag has a row in `kvbm.cli.removed`.
    """

    variable: str
    field: str
    instead: str


REMOVED: tuple[RemovedSetting, ...] = (
    RemovedSetting("DYN_KVBM_DISK_IO_THREADS", "disk_io_threads", "eight threads read and write a disk tier"),
    RemovedSetting(
        "DYN_KVBM_ADMIN_TOKEN_FILE",
        "admin_token_file",
        "write the token to admin.token in the runtime directory",
    ),
    RemovedSetting("DYN_KVBM_FLEET_SHARE", "fleet_share", "readers hold at most a twentieth of host memory"),
    RemovedSetting(
        "DYN_KVBM_REMOTE_CODEC", "remote_codec", "what is written to the remote store is not compressed"
    ),
    RemovedSetting(
        "DYN_KVBM_DISK_WRITE",
        "disk_write",
        "a block is offered to disk once host memory has it; DYN_KVBM_DISK_ADMISSION and DYN_KVBM_DISK_WRITE_BUDGET "
        "bound what is written",
    ),
    RemovedSetting("DYN_KVBM_OFFLOAD_MODE", "offload_mode", "a block is stored after the step that fills it"),
)
"""Accepted and ignored, with a warning that names the substitute."""


def describe_removed_setting(name: str) -> str:
    """What a user of this variable or key reads, without the name; empty where no removed setting has this name."""
    for row in REMOVED:
        if name in (row.variable, row.field):
            return f"was removed and is ignored: {row.instead}"
    return ""
