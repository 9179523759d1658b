"""Sizes of a tier as a user writes them: bytes, blocks, or a share of all blocks of a trace."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvbm.errors import SettingsError
from kvbm.settings.parse import parse_size, reject
from kvbm.sim.serving.hybrid import Slots
from kvbm.sim.traces.trace import Trace

_SHARE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%")
_BLOCKS = re.compile(r"([0-9]+)\s*blocks?")
_BYTES_OF_A_TOKEN = "--bytes-per-token"


@dataclass(frozen=True, slots=True)
class TierSize:
    """One of `5%`, `20000blocks`, `100GB`. `field` is the option it stands in, for errors."""

    field: str
    text: str
    share: float | None = None
    blocks: int | None = None
    size_bytes: int | None = None

    def blocks_of(self, trace: Trace, bytes_per_token: int | None, slots: Slots | None = None) -> int:
        """How many of the trace's blocks fit; of a model with several groups, how many of their blocks.

        `SettingsError` where that is none, or a block's bytes are not known.
        """
        if self.share is not None:
            everything = trace.unique_blocks
            if slots is not None:
                everything = everything * slots.everything_bytes // slots.slot_bytes
            count, one = int(everything * self.share), f"1 of {everything:,}"
        elif self.blocks is not None:
            count, one = self.blocks, "1"
        else:
            if bytes_per_token is None and slots is None:
                accepted = f"sizes in bytes need {_BYTES_OF_A_TOKEN} or --model; or write 5% or 20000blocks"
                raise SettingsError(self.field, self.text, accepted)
            assert self.size_bytes is not None
            block_bytes = (
                slots.slot_bytes if slots is not None else (bytes_per_token or 0) * trace.block_tokens
            )
            count, one = self.size_bytes // block_bytes, f"{block_bytes:,} bytes"
        if count < 1:
            raise SettingsError(self.field, self.text, f"at least one block ({one} in {trace.name})")
        return count


def parse_sizes(field: str, text: str) -> list[TierSize]:
    """The sizes in a comma-separated list, in its order. `SettingsError` names the one that is none."""
    return [_parse(field, word.strip()) for word in text.split(",")]


def _parse(field: str, word: str) -> TierSize:
    if match := _SHARE.fullmatch(word):
        return TierSize(field, word, share=float(match[1]) / 100.0)
    if match := _BLOCKS.fullmatch(word):
        return TierSize(field, word, blocks=int(match[1]))
    try:
        return TierSize(field, word, size_bytes=parse_size(field, word))
    except SettingsError:
        raise reject(
            field, word, "a share of all blocks (5%), blocks (20000blocks) or bytes (100GB)"
        ) from None
