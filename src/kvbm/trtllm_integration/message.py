"""What rank 0 tells all ranks in each step. The engine broadcasts it; it travels as bytes of ours."""

from __future__ import annotations

import msgspec

from kvbm.step_plan import StepPlan


class StepMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The step's plan. Its loads are over before the forward pass begins, its stores begin when that has ended."""

    plan: StepPlan = StepPlan()

    def encode(self) -> bytes:
        """As bytes."""
        return msgspec.msgpack.encode(self)


_decoder = msgspec.msgpack.Decoder(StepMessage)


def decode(metadata: object) -> StepMessage:
    """The message; one without tasks where the engine bound none. Raises msgspec.ValidationError for other bytes."""
    if metadata is None:
        return StepMessage()
    assert isinstance(metadata, bytes), "metadata of another connector"
    return _decoder.decode(metadata)
