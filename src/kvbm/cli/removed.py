"""Commands and options of earlier versions: calls of them end with one line that names the substitute."""

from __future__ import annotations

import re

_TOKENS = "--prompt-file takes a JSON list of token ids, as the server's /tokenize returns them"
_STORE = "`kvbm scale --remote shared` simulates a store that nodes share"
_STORE_OPTIONS = (
    "--remote",
    "--remote-ttl",
    "--remote-admission",
    "--nodes",
    "--router",
    "--price-remote",
    "--price-put",
    "--price-get",
    "--price-egress",
)
_DISK_WRITE = (
    "a block is offered to disk once host memory has it; DYN_KVBM_DISK_ADMISSION bounds what is written"
)
_ROUTER = "`kvbm scale --router kv` has Dynamo's defaults: weight 1, temperature 0"

REMOVED: dict[str, str] = {
    "kvbm fleet": "make certificates with openssl or cert-manager (docs/operating/fleet.md#certificates)",
    "kvbm inspect events --tokens": "`kvbm inspect events` prints the events; `kvbm why --prompt-file` says how far "
    "a prompt matches",
    **{f"kvbm {command} --tokenizer": _TOKENS for command in ("pin", "unpin", "prefetch", "why")},
    **{f"kvbm plan {option}": _STORE for option in _STORE_OPTIONS},
    "kvbm manager --disk-io-threads": "eight threads read and write a disk tier",
    "kvbm manager --admin-token-file": "write the token to admin.token in the runtime directory",
    "kvbm manager --fleet-share": "readers hold at most a twentieth of host memory",
    "kvbm manager --remote-codec": "what is written to the remote store is not compressed",
    "kvbm scale --weight": _ROUTER,
    "kvbm scale --temperature": _ROUTER,
    "kvbm manager --disk-write": _DISK_WRITE,
    **{
        f"kvbm {command} --write": "disk is simulated as the manager writes it"
        for command in ("simulate", "plan")
    },
    "kvbm resize": "set DYN_KVBM_CPU_CACHE_GB and restart the manager; tiers below and other nodes keep their blocks",
}
"""The call from `kvbm` on, up to the removed word, without arguments; and what to use instead, to end a sentence."""

_UNKNOWN_COMMAND = re.compile(r"No such command '([^']+)'")


def describe_removed_call(error: Exception) -> str:
    """The line for the parser's error about an unknown command or option; empty where it was never there."""
    name = getattr(error, "option_name", None)
    if name is None and (found := _UNKNOWN_COMMAND.match(str(error))):
        name = found[1]
    call = f"{getattr(getattr(error, 'ctx', None), 'command_path', 'kvbm')} {name}"
    return f"{call} was removed: {REMOVED[call]}" if call in REMOVED else ""
