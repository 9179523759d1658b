"""SGLang on a machine without CUDA: what its wheel cannot have here. Python imports this file by its name.

Its folder is on `PYTHONPATH` of an engine's processes, and of no other. The kernel package and optional packages
become modules that import and whose functions raise; streams, events and pinned memory of a GPU become those of a CPU,
which has none; the copies between the two pools, which are CUDA kernels, become those of `page_copies`. So an engine
shows which calls are made and which bytes arrive, and nothing about the order of CUDA streams.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

ABSENT = ("sgl_kernel", "torchvision", "torchaudio", "torchcodec", "decord", "IPython")
"""Packages that are imported at start and not needed: the kernels, media, a notebook's display."""
VISIBLE = ("sgl_kernel",)
"""Those that SGLang must believe to be installed; the others say that they are not to whoever asks first."""
KERNEL_VERSION = "0.4.10"
POOLS = ("sglang.srt.mem_cache.pool_host.mha", "sglang.srt.mem_cache.pool_host.mla")


class _Placeholder(type):
    """A class whose attributes are words, for enumerations of the kernel package."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _attribute(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name[:1].isupper() or name == "scalar_types":
        return _Placeholder(name, (), {})

    def missing(*arguments: Any, **keywords: Any) -> Any:
        raise RuntimeError(f"{module}.{name} was called, and this machine has no {module}")

    missing.__name__ = name
    return missing


class AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the packages in `ABSENT`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """A package without files, or None for a module that is not ours."""
        if name.split(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        """A module whose attributes are made as they are asked for."""
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__version__ = KERNEL_VERSION  # type: ignore[attr-defined]
        module.__getattr__ = lambda name: _attribute(spec.name, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing runs."""


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module when its import has begun (`before`) or ended."""

    def __init__(
        self, before: dict[str, Callable[[], None]], after: dict[str, Callable[[types.ModuleType], None]]
    ):
        self._before, self._after, self._finding = before, after, set[str]()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        """The module's own spec, with the calls around its execution."""
        if name in self._finding or (name not in self._before and name not in self._after):
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def around(module: types.ModuleType) -> None:
            self._before.get(name, lambda: None)()
            execute(module)
            self._after.get(name, lambda module: None)(module)

        spec.loader.exec_module = around  # type: ignore[method-assign]
        return spec


class NoEvent:
    """An event on a device that has ended everything it was given."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None: ...

    def record(self, *arguments: Any) -> None: ...

    def wait(self, *arguments: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        """Always over."""
        return True

    def elapsed_time(self, other: NoEvent) -> float:
        """No time passes between two of these."""
        return 0.0


class NoStream:
    """The one stream of a CPU: what is called has run when the call returns."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None: ...

    def wait_stream(self, *arguments: Any) -> None: ...

    def wait_event(self, *arguments: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *arguments: Any) -> NoEvent:
        """An event that is over."""
        return NoEvent()

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *arguments: Any) -> None: ...


def cpu_has_no_streams() -> None:
    """torch's CPU with streams and events that have nothing to wait for, and memory that cannot be pinned."""
    import torch

    torch.cpu.Event, torch.cpu.Stream = NoEvent, NoStream
    torch.cpu.stream = lambda stream: contextlib.nullcontext()
    torch.cpu.current_stream = lambda *arguments: NoStream()
    torch.Tensor.pin_memory = lambda self, *arguments, **keywords: self
    for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like", "randn"):
        setattr(torch, name, _unpinned(getattr(torch, name)))


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*arguments: Any, **keywords: Any) -> Any:
        keywords.pop("pin_memory", None)
        return make(*arguments, **keywords)

    return made


def host_memory_stays_unregistered(module: types.ModuleType) -> None:
    """There is no device to tell of host memory."""
    module._cuda_host_register = lambda *arguments: None  # type: ignore[attr-defined]
    module._cuda_host_unregister = lambda *arguments: None  # type: ignore[attr-defined]


def copies_on_the_cpu(module: types.ModuleType) -> None:
    """The `direct` copies of a host pool."""
    import page_copies

    for copy in page_copies.COPIES:
        setattr(module, copy.__name__, copy)


def latent_attention(module: types.ModuleType) -> None:
    """torch's own attention reads latent KV from the pool as it lies there, in every step.

    Left alone SGLang would compute a prompt from keys and values at full width, which this backend looks for in a pool
    that has none.
    """
    method = module.AttnForwardMethod.MLA
    module.AttentionBackendRegistry.register("torch_native", lambda attention, batch: method)


def _hidden(find: Callable[..., Any]) -> Callable[..., Any]:
    def found(name: str, package: str | None = None) -> Any:
        root = name.split(".")[0]
        return None if root in ABSENT and root not in VISIBLE else find(name, package)

    return found


importlib.util.find_spec = _hidden(importlib.util.find_spec)
sys.meta_path.insert(0, AbsentPackages())
sys.meta_path.insert(
    0,
    AfterImport(
        {"sglang": cpu_has_no_streams},
        {
            "sglang.srt.mem_cache.pool_host.common": host_memory_stays_unregistered,
            "sglang.srt.models.deepseek_common.attention_backend_handler": latent_attention,
            **dict.fromkeys(POOLS, copies_on_the_cpu),
        },
    ),
)
