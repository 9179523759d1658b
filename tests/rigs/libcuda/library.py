"""The stand-in for `libcuda.so.1` as a test uses it: settings, injected errors, and what it has recorded."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import byref, c_char_p, c_double, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch

_VIOLATION_BYTES = 256


class _Settings(ctypes.Structure):
    """`Settings` of `standin.h`."""

    _fields_ = (
        ("version", c_int),
        ("can_use_host_pointers", c_int),
        ("max_pitch", c_int),
        ("copies_are_held", c_int),
        ("page_bytes", c_uint64),
        ("delay_min_s", c_double),
        ("delay_max_s", c_double),
    )


class Libcuda:
    """One driver in this process, in its first state after each `reset`.

    `cuda` is the library itself, for calls of CUDA.
    """

    def __init__(self, path: Path) -> None:
        self.cuda = ctypes.CDLL(str(path))
        for name in ("standin_registered_bytes", "standin_call_count", "standin_violation"):
            getattr(self.cuda, name).restype = c_uint64
        self.reset()

    def reset(self, seed: int = 0) -> None:
        """As in a process that has just begun. Work under way is dropped, and handles from before are refused."""
        self.cuda.standin_reset(c_uint64(seed))
        self._settings = _Settings()
        self._set(version=13000, can_use_host_pointers=1, max_pitch=0x7FFFFFFF, page_bytes=4096)

    # ---- what a test sets

    def set_version(self, version: int) -> None:
        """The driver's version, as 12080."""
        self._set(version=version)

    def set_host_pointer_use(self, can_use: bool) -> None:
        """CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM."""
        self._set(can_use_host_pointers=can_use)

    def set_page_bytes(self, page_bytes: int) -> None:
        """The size of the pages that registrations are rounded to."""
        self._set(page_bytes=page_bytes)

    def set_delay(self, min_s: float, max_s: float) -> None:
        """How long each copy call's pieces take, all together, chosen anew for each."""
        self._set(delay_min_s=min_s, delay_max_s=max_s)

    def hold_copies(self, held: bool = True) -> None:
        """No copy gets further than half of its pieces, until they are let go."""
        self._set(copies_are_held=held)

    def fail(
        self, name: str, result: int = 1, *, nth: int = 1, times: int = 1, loses_device: bool = False
    ) -> None:
        """`times` calls of that name, from the `nth` from now on, fail with that result.

        Names are those of `cuda.h`, without `_v2`. `piece` is the copying of one piece by a stream, after which the
        device is lost in any case; `batch` is a `cuMemcpyBatchAsync` that has begun a part of its pieces.
        """
        self.cuda.standin_fail(name.encode(), c_uint64(nth), c_uint64(times), c_int(result), loses_device)

    def fail_by_chance(self, name: str, chance: float, result: int = 1) -> None:
        """Each call of that name fails with that probability."""
        self.cuda.standin_fail_by_chance(name.encode(), c_double(chance), c_int(result))

    def spare_this_thread(self, spared: bool = True) -> None:
        """No call of the calling thread is made to fail. For the engine's, whose errors KVBM does not handle."""
        self.cuda.standin_spare_thread(c_int(spared))

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the tensors' storages be device memory, an allocation each."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.cuda.standin_add_device_memory(c_uint64(storage.data_ptr()), c_size_t(storage.nbytes()))

    # ---- what a test reads

    def call_count(self, name: str) -> int:
        """How many calls of that name there were; `piece` counts pieces that were copied."""
        return int(self.cuda.standin_call_count(name.encode()))

    @property
    def registered_bytes(self) -> int:
        """Host memory that is registered now."""
        return int(self.cuda.standin_registered_bytes())

    @property
    def violations(self) -> list[str]:
        """Uses that fail or corrupt memory on a real device: copies beyond an allocation, from pageable memory, …"""
        text = ctypes.create_string_buffer(_VIOLATION_BYTES)
        found, index = [], 0
        while index < self.cuda.standin_violation(c_uint64(index), text, c_size_t(_VIOLATION_BYTES)):
            found.append(text.value.decode())
            index += 1
        return found

    # ---- calls of the runtime that torch makes

    def call_runtime(self, name: str, *arguments: Any) -> None:
        """A call with the context made current, as any call of the CUDA runtime does. Raises RuntimeError as torch."""
        context = c_void_p()
        if not self.cuda.cuCtxGetCurrent(byref(context)) and context.value is None:
            self.cuda.cuDevicePrimaryCtxRetain(byref(context), c_int(0))
            self.cuda.cuCtxSetCurrent(context)
        result = getattr(self.cuda, name)(*arguments)
        if result:
            raise RuntimeError(
                f"CUDA error: {self.error_name(result)}\nCUDA kernel errors might be reported later"
            )

    def error_name(self, result: int) -> str:
        name = c_char_p()
        self.cuda.cuGetErrorName(c_int(result), byref(name))
        return name.value.decode() if name.value else str(result)

    def _set(self, **settings: float) -> None:
        for name, value in settings.items():
            setattr(self._settings, name, value)
        self.cuda.standin_configure(byref(self._settings))
