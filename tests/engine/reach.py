"""The work of tests inside the engine's process, beyond asking for answers: faults, gates, inspection.

Each function is called as `function(child, …)`. They know names inside kvbm; nothing else below tests/engine does.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from engine.engine_child import Answers, Child, Engine
from engine.workload import Request
from rigs import manager_probe

_Hook = Callable[[Any], None]
_gate = threading.Event()
_audit: list[bool] = []
_failing = {"every": 0}


def _engine(child: Child) -> Engine:
    assert child.engine is not None, "no engine was started"
    return child.engine


def _leader(engine: Engine) -> Any:
    assert engine.leader is not None, "the engine runs without KVBM"
    return engine.leader


def _mover(engine: Engine) -> Any:
    return engine.worker_half._worker.mover


def _mapping(mover: Any) -> Any:
    """The host memory that the rank's copies go to and come from."""
    return mover.mark().mapping


def model_runners(child: Child) -> tuple[str, str]:
    """Which model runner the engine has, by its class, and which we say that it has."""
    from kvbm.vllm_integration.runner import model_runner

    engine = _engine(child)
    modules = {
        base.__module__ for base in type(engine.core.model_executor.driver_worker.worker.model_runner).__mro__
    }
    runs = "V2" if "vllm.v1.worker.gpu.model_runner" in modules else "V1"
    return runs, model_runner(engine.core.vllm_config)


def wait_until_ready(child: Child, timeout_s: float = 30.0) -> None:
    """Until the leader has heard from the manager that all ranks are attached; an engine without us is ready."""
    leader = _engine(child).leader
    if leader is None:
        return

    def ready() -> bool:
        leader.receive()
        return bool(leader.ready)

    manager_probe.wait_for(ready, timeout_s, "the leader has no manager")


def open_business(child: Child) -> dict[str, int]:
    """The records that the leader still keeps: none of them may be left when no request is."""
    engine = _engine(child)
    engine.wait_for_stores()
    leader = _leader(engine)
    return {
        "requests": len(leader.requests),
        "lookups": len(leader.lookups),
        "stores": len(leader.stores),
    }


def step_idle(child: Child, count: int) -> None:
    """Engine steps with nothing to do."""
    for _ in range(count):
        _engine(child).core.step()


def run_and_kill(
    child: Child, requests: Sequence[Request], finished_counts: Sequence[int], timeout_s: float = 80.0
) -> tuple[Answers, list[int]]:
    """Answer the requests and kill -9 the private manager at each of the counts, if possible while a load is open.

    Returns the pids that were killed as well.
    """
    engine = _engine(child)
    killed: list[int] = []
    counts = list(finished_counts)

    def kill(engine: Engine, finished: int) -> None:
        if not counts or finished < counts[0] or not _leader(engine).ready:
            return
        if finished < counts[0] + 10 and not _leader(engine).lookups.loading:
            return
        pids = manager_probe.private_managers(os.environ["DYN_KVBM_RUNTIME_DIR"])
        if pids:
            os.kill(pids[0], signal.SIGKILL)
            killed.append(pids[0])
            counts.pop(0)

    return engine.run(requests, timeout_s=timeout_s, between=kill), killed


def run_one_by_one(child: Child, requests: Sequence[Request]) -> None:
    """Answer one request after the other; each finds nothing on the device, and all blocks of those before stored."""
    engine = _engine(child)
    for request in requests:
        assert engine.scheduler.reset_prefix_cache()
        engine.run([request])


def run_alone(child: Child, requests: Sequence[Request], timeout_s: float) -> Answers:
    """Answer one request after the other: no step computes two of them."""
    return _engine(child).run(requests, concurrency=1, timeout_s=timeout_s)


def run_and_signal(
    child: Child, requests: Sequence[Request], finished: int, path: str, timeout_s: float = 80.0
) -> Answers:
    """Answer the requests; make the file `path` when `finished` of them are."""

    def tell(engine: Engine, count: int) -> None:
        if count >= finished and not os.path.exists(path):
            with open(path, "w"):
                pass

    return _engine(child).run(requests, timeout_s=timeout_s, between=tell)


# ---- around the copier


class _Copier:
    """A copier with `before` each load and after each store, called with (device block, slot) pairs; `after` each load,
    or each layer of one, is called with the layer's name too (None: all layers)."""

    def __init__(self, inner: Any, before: _Hook, after: Callable[..., None], stored: _Hook) -> None:
        self._inner = inner
        self._before = before
        self._after = after
        self._stored = stored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin_store(self, pairs: Any, after: Any) -> Any:
        copying = self._inner.begin_store(pairs, after)
        self._stored(pairs)
        return copying

    def begin_load(self, pairs: Any, after: Any, layer: Any = None) -> Any:
        self._before(pairs)
        copying = self._inner.begin_load(pairs, after, layer)
        copying.wait()
        self._after(pairs, layer)
        return copying


def _nothing(pairs: Any, layer: Any = None) -> None:
    pass


def _wrap_copier(
    mover: Any, before: _Hook = _nothing, after: Callable[..., None] = _nothing, stored: _Hook = _nothing
) -> None:
    make = mover._make_mapping

    def wrapped(*arguments: Any) -> Any:
        mapping = make(*arguments)
        mapping.copier = _Copier(mapping.copier, before, after, stored)
        return mapping

    mover._make_mapping = wrapped
    mapping = _mapping(mover)
    mapping.copier = _Copier(mapping.copier, before, after, stored)


def audit_copies(child: Child) -> None:
    """Note the bytes of every device block that is stored, and look for those of every block that is loaded."""
    import torch

    engine = _engine(child)
    worker = engine.core.model_executor.driver_worker.worker
    caches = worker.model_runner.kv_caches
    seen: set[bytes] = set()
    layers_there: Counter[Any] = Counter()
    _audit.clear()

    def digest(block: int) -> bytes:
        # As plain bytes: numpy has no bfloat16.
        rows = (cache[block].contiguous().flatten().view(torch.uint8) for cache in caches)
        return hashlib.sha256(b"".join(row.numpy().tobytes() for row in rows)).digest()

    def note(pairs: Any) -> None:
        seen.update(digest(block) for block, _ in pairs)

    def compare(pairs: Any, layer: str | None) -> None:
        blocks = tuple(block for block, _ in pairs)
        layers_there[blocks] += 1
        if layer is None or layers_there[blocks] == len(caches):
            del layers_there[blocks]
            _audit.extend(digest(block) in seen for block in blocks)

    _wrap_copier(_mover(engine), after=compare, stored=note)


def audit_result(child: Child) -> tuple[int, int]:
    """How many loaded blocks were compared, and how many of them were never stored like that."""
    return len(_audit), _audit.count(False)


def fail_loads(child: Child, every: int) -> None:
    """Every n-th copy to the device fails; with 0 none does any more."""
    _fail_every(_mover(_engine(child)), every)


def fail_loads_of_rank(child: Child, rank: int, every: int) -> None:
    """Every n-th copy to the device fails in one of several ranks, which live in processes of their own."""
    _engine(child).llm.collective_rpc(_fail_in_rank, args=(rank, every))


def _fail_in_rank(worker: Any, rank: int, every: int) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if worker.rank == rank:
        _fail_every(get_kv_transfer_group()._worker.mover, every)


def _fail_every(mover: Any, every: int) -> None:
    count = 0
    _failing["every"] = every

    def strike(pairs: Any) -> None:
        nonlocal count
        count += 1
        if _failing["every"] and count % _failing["every"] == 0:
            raise RuntimeError("injected: this copy fails")

    if every:
        _wrap_copier(mover, before=strike)


def after_loads(child: Child, spoil: Callable[..., None]) -> None:
    """`spoil(pairs, layer)` is called after each load's copies, before the load counts as done."""
    _wrap_copier(_mover(_engine(child)), after=spoil)


def scribble_over_slots(child: Child) -> None:
    """Whatever is loaded is overwritten in host memory before, behind everybody's back."""
    _scribble(_mover(_engine(child)))


def scribble_in_rank(child: Child, rank: int) -> None:
    """The same in one of several ranks."""
    _engine(child).llm.collective_rpc(_scribble_in_rank, args=(rank,))


def _scribble_in_rank(worker: Any, rank: int) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if worker.rank == rank:
        _scribble(get_kv_transfer_group()._worker.mover)


def _scribble(mover: Any) -> None:
    def scribble(pairs: Any) -> None:
        mapping = _mapping(mover)
        slot_bytes = mapping.slot_bytes
        for _, slot in pairs:
            mapping.region[slot * slot_bytes : (slot + 1) * slot_bytes] = bytes(slot_bytes)

    _wrap_copier(mover, before=scribble)


def gate_loads(child: Child) -> None:
    """No load ends until `open_gate`."""
    _gate.clear()
    _wrap_copier(_mover(_engine(child)), before=lambda pairs: _gate.wait(60.0) and None)


def open_gate(child: Child) -> None:
    """Let the loads through that `gate_loads` holds."""
    _gate.set()


def abort_while_loading(child: Child, requests: Sequence[Request], kill_manager: bool = False) -> int:
    """Add the requests, step until loads are open and held at the gate, abort all; the number of open loads."""
    from vllm import SamplingParams

    engine = _engine(child)
    for request in requests:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
        engine.core.add_request(request.name, {"prompt_token_ids": list(request.tokens)}, params)
    leader = _leader(engine)
    lookups = leader.lookups

    def answered() -> bool:
        leader.receive()
        return not lookups.unanswered

    # A request whose answer is late is computed, and its store waits behind the gate, and the engine for the store.
    manager_probe.wait_for(answered, 20.0, "the manager does not answer")
    deadline_s = time.monotonic() + 10.0
    while time.monotonic() < deadline_s and not lookups.loading:
        engine.core.step()
    for _ in range(5):
        engine.core.step()
    loading = lookups.loading
    if kill_manager:
        for pid in manager_probe.private_managers(os.environ["DYN_KVBM_RUNTIME_DIR"]):
            os.kill(pid, signal.SIGKILL)
    engine.core.abort_request([request.name for request in requests])
    for _ in range(20):
        engine.core.step()
    return loading


# ---- the engine's own words


def reset(child: Child, connector: bool) -> bool:
    """vLLM's reset of its prefix cache, and with `connector` of ours."""
    return bool(_engine(child).core.reset_prefix_cache(False, connector))


def engine_metrics(child: Child) -> dict[str, float]:
    """vLLM's own counters and gauges, summed over labels but for `source`; its log line must not fail either."""
    engine = _engine(child)
    engine.core.do_log_stats()
    values: dict[str, float] = {}
    for metric in engine.llm.get_metrics():
        value = getattr(metric, "value", None)
        if value is None:
            continue
        source = metric.labels.get("source")
        name = f"{metric.name}/{source}" if source else metric.name
        values[name] = values.get(name, 0.0) + value
    return values


# ---- modes of copying

_counts = {"whole": 0, "layer": 0, "held": 0}


def count_layers(child: Child) -> None:
    """Count loads of all layers at once, and of single ones."""
    _counts.update(whole=0, layer=0)
    copier = _mapping(_mover(_engine(child))).copier
    begin_load = copier.begin_load

    def counted(pairs: Any, after: Any = None, layer: Any = None) -> Any:
        _counts["whole" if layer is None else "layer"] += 1
        return begin_load(pairs, after, layer)

    copier.begin_load = counted


def layers_counted(child: Child) -> tuple[int, int]:
    """(loads of all layers, loads of one layer)."""
    return _counts["whole"], _counts["layer"]


def store_beside(child: Child, seconds: float) -> None:
    """The engine does not wait for its stores but where the plan says so, and each store takes so long at least."""
    side = _engine(child).worker_half._worker
    side.worker._copies_beside = True
    copier = _mapping(side.mover).copier
    begin_store, hold = copier.begin_store, copier.hold
    _counts["held"] = 0

    def slow(pairs: Any, after: Any = None) -> Any:
        # Wide enough for whatever would overwrite the blocks too early.
        time.sleep(seconds)
        return begin_store(pairs, after)

    def noted(copying: Any) -> None:
        _counts["held"] += 1
        hold(copying)

    copier.begin_store, copier.hold = slow, noted


def stores_waited_for(child: Child) -> int:
    """How many stores the engine waited for."""
    return _counts["held"]


def asked_of_vllm(child: Child, variable: str, value: str) -> tuple[bool, str | None]:
    """Whether CUDA graphs must be piecewise, and which layout is wished for, with one variable set."""
    from kvbm.vllm_integration.connector import DynamoConnector

    # Engines that ran in this process have left their settings behind.
    before = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("DYN_KVBM_")}
    os.environ[variable] = value
    try:
        config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=None))
        piecewise = DynamoConnector.requires_piecewise_for_cudagraph({})
        return piecewise, DynamoConnector.get_required_kvcache_layout(config)
    finally:
        del os.environ[variable]
        os.environ.update(before)


def knows_layouts() -> bool:
    """Whether this vLLM can be asked for a block-outermost layout (0.29)."""
    return importlib.util.find_spec("vllm.v1.kv_cache_layout") is not None
