"""The one error of KVBM that is meant for the engine."""

from __future__ import annotations

from kvbm.errors import KvbmError


class PromiseBroken(KvbmError):
    """KV that the engine was promised is not on the device, and TensorRT-LLM has no way to be told so: it would compute
    from whatever lies there. Ending the engine is what is left. It takes a device that fails, or a manager that was
    replaced between a promise and its load, within one iteration."""
