"""Prefill and decode apart: `vllm serve` processes joined by NIXL over loopback, and the part of a proxy before them.

The proxy speaks the protocol of vLLM's own example: the prefill worker is asked for one token and answers where the
prompt's KV lies; that goes with the same request to the decode worker, which fetches it.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvbm.client.finder import PRIVATE_MANAGER
from kvbm.demo.server import VllmServer, free_port

MODEL = "tiny"
BLOCK_TOKENS, MODEL_TOKENS, DEVICE_BLOCKS = 32, 512, 48
ANSWER_TOKENS = 12
PATIENCE_S = 60.0
RECOMPUTE = {"kv_load_failure_policy": "recompute"}
KVBM = {
    "kv_connector": "DynamoConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "kvbm.vllm_integration.connector",
}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")


def both(connector: str = "PdConnector") -> dict[str, Any]:
    """A cache and NIXL in one engine: the original's `PdConnector`, or vLLM's `MultiConnector`."""
    named = (
        {"kv_connector_module_path": "kvbm.vllm_integration.connector"} if connector == "PdConnector" else {}
    )
    return {
        "kv_connector": connector,
        "kv_role": "kv_both",
        **named,
        **RECOMPUTE,
        "kv_connector_extra_config": {"connectors": [KVBM, NIXL]},
    }


class Worker(VllmServer):
    """One engine of a pair. It can be killed, as a machine kills, and started again."""

    _numbers = itertools.count()

    def __init__(
        self,
        model: Path,
        directory: Path,
        transfer: Mapping[str, Any],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DYN_KVBM_")}
        own = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "DYN_KVBM_CPU_CACHE_GB": "0.05",
            # A hit is loaded even where computing is cheaper, so that it is seen.
            "DYN_KVBM_ONBOARD": "always",
            **(variables or {}),
        }
        arguments = [
            *("--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", str(MODEL_TOKENS), "--block-size", str(BLOCK_TOKENS)),
            *("--num-gpu-blocks-override", str(DEVICE_BLOCKS), "--max-num-seqs", "4"),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]
        super().__init__(
            str(model),
            arguments,
            {**inherited, **own},
            directory / f"worker-{next(self._numbers)}.log",
            start_timeout_s=180,
            request_timeout_s=PATIENCE_S,
        )

    def kill(self) -> None:
        """End it and all it started as a crash does: nobody is told."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.stop()

    def kill_manager(self) -> None:
        """End its private manager as a crash does."""
        assert self._process is not None
        of_ours = [
            process
            for process in psutil.Process(self._process.pid).children(recursive=True)
            if PRIVATE_MANAGER in process.cmdline()
        ]
        assert len(of_ours) == 1
        of_ours[0].kill()

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer of the HTTP server. Raises OSError."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body or {}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            text = response.read()
        return json.loads(text) if text else None

    def complete(self, tokens: Sequence[int], **more: Any) -> Any:
        """vLLM's answer to a greedy completion of these tokens."""
        body = {"model": MODEL, "prompt": list(tokens), "max_tokens": ANSWER_TOKENS, "temperature": 0}
        return self.post("/v1/completions", body | {"ignore_eos": True} | more)

    def forget(self) -> None:
        """Drop the device's cache; the tiers below keep theirs."""
        self.post("/reset_prefix_cache")


def prefill(worker: Worker, tokens: Sequence[int]) -> dict[str, Any]:
    """Compute a prompt; where its KV lies."""
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    answer = worker.complete(tokens, max_tokens=1, min_tokens=1, kv_transfer_params=asked)
    where = answer["kv_transfer_params"]
    assert where["do_remote_prefill"], f"the prefill worker hands nothing over: {where}"
    return dict(where)


def decode(worker: Worker, tokens: Sequence[int], where: Mapping[str, Any]) -> str:
    """The text after a prompt whose KV lies there."""
    return str(worker.complete(tokens, kv_transfer_params=dict(where))["choices"][0]["text"])


def answered(prefiller: Worker, decoder: Worker, tokens: Sequence[int]) -> str:
    """What a client behind the proxy gets."""
    return decode(decoder, tokens, prefill(prefiller, tokens))


def alone(worker: Worker, tokens: Sequence[int]) -> str:
    """What the same worker answers without the other: all of it computed here."""
    worker.forget()
    return str(worker.complete(tokens)["choices"][0]["text"])
