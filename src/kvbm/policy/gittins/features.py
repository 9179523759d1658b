"""The features of a run when a request uses it: few values per feature, packed into one number.

Some features are the request's, and the same for all its runs; others are the run's own.
"""

from __future__ import annotations

from enum import IntEnum
from math import log2


class Position(IntEnum):
    """The position of a run in the chain of the request that used it last."""

    LAST = 0
    """The last block of a prompt, seldom asked for again: most requests part from it."""
    NEW = 1
    FIRST_NEW = 2
    """The first blocks behind those known before; they survive when a client drops the rest of a turn."""
    ROOT = 3
    OLD = 4
    OUTPUT = 5
    """Generated, or stored without having been asked for."""


class Said(IntEnum):
    """What the client of the request that used a run last said of its conversation."""

    NOTHING = 0
    RETURNS = 1
    """It goes on at a time that was said."""
    ENDS = 2
    """It does not go on."""


FIRST_NEW_BLOCKS = 2
OUTPUT_UNKNOWN = 13

# Sizes of the features, in the order of packing. See `request_code` and `run_code` for what each means.
_GAP_MEAN, _OUTPUT, _NEW, _LENGTH = 13, 14, 11, 7
_USES, _POSITIONS, _DROPS, _SUPERSEDED = 12, len(Position), 6, 2
RUN_CODES = _USES * _POSITIONS * _DROPS * _SUPERSEDED
_CODES = _GAP_MEAN * _OUTPUT * _NEW * _LENGTH * RUN_CODES
_SIZES = (_USES, _POSITIONS * _DROPS, _GAP_MEAN, _OUTPUT, _NEW, _LENGTH, _SUPERSEDED)
SIZES = tuple(len(Said) * size for size in _SIZES)
BY_AGE = (0, 2, 3, 5, 6)
"""The features whose effect differs by age: all but the position and the number of new blocks."""


def request_code(gap_mean: float, output_tokens: int, new_blocks: int, blocks: int) -> int:
    """The request's part, all as logarithms: the moving mean of the gaps between the turns of its conversation
    (`log2_seconds`; negative in a first turn), tokens generated (-1: not known yet), blocks that no request asked for
    before, and all blocks.
    """
    code = 0 if gap_mean < 0 else 1 + min(_GAP_MEAN - 2, int(gap_mean))
    output = OUTPUT_UNKNOWN if output_tokens < 0 else _log(output_tokens, OUTPUT_UNKNOWN - 1)
    code = code * _OUTPUT + output
    code = code * _NEW + _log(new_blocks + 1, _NEW - 2)
    return code * _LENGTH + _log(blocks, 2 * (_LENGTH - 2)) // 2


def run_code(uses: int, position: int, drops: int) -> int:
    """The run's part: how often it was used, its position, and how much of each turn its conversation drops."""
    few = uses if uses < 5 else 3 + min(_USES - 4, uses.bit_length() - 1)
    return ((few * _POSITIONS + position) * _DROPS + drops) * _SUPERSEDED


def drop_level(share: float) -> int:
    """`drops` for `run_code` from the second turn on: 1 to 4, by the moving share of turns that lost blocks."""
    return 1 + int(share * 3.99)


def superseded(code: int) -> int:
    """The same code for a run that its conversation no longer continues."""
    return code | 1


def with_word(code: int, said: int) -> int:
    """The same code for a run of whose conversation this was said."""
    return said * _CODES + code % _CODES


def said_of(code: int) -> int:
    """The `Said` in a code."""
    return code // _CODES


def plain(code: int) -> int:
    """The code with no more than the position, the uses, the output and what was said: used once there are too many
    codes."""
    said = said_of(code)
    uses, position_drops, _, output, _, _, left_behind = _values_of(code % _CODES)
    request = (output * _NEW + _NEW - 1) * _LENGTH + _LENGTH - 1
    run = (uses * _POSITIONS + position_drops // _DROPS) * _DROPS + _DROPS - 1
    return with_word((request * _USES * _POSITIONS * _DROPS + run) * _SUPERSEDED + left_behind, said)


def position_of(code: int) -> int:
    """The `Position` in a code."""
    return code // (_SUPERSEDED * _DROPS) % _POSITIONS


def values_of(code: int) -> tuple[int, ...]:
    """The feature values of a code, in the order of `SIZES`.

    Every feature has values of its own for each `Said`: what is learned of runs with one word says nothing of others.
    """
    said = said_of(code)
    return tuple(said * size + value for size, value in zip(_SIZES, _values_of(code % _CODES), strict=True))


def _values_of(code: int) -> tuple[int, ...]:
    code, left_behind = divmod(code, _SUPERSEDED)
    code, drops = divmod(code, _DROPS)
    code, position = divmod(code, _POSITIONS)
    code, uses = divmod(code, _USES)
    code, length = divmod(code, _LENGTH)
    code, new = divmod(code, _NEW)
    gap_mean, output = divmod(code, _OUTPUT)
    return (uses, position * _DROPS + drops, gap_mean, output, new, length, left_behind)


def log2_seconds(gap_s: float) -> float:
    """A gap as the features count it."""
    return log2(gap_s + 1)


def _log(count: int, most: int) -> int:
    return min(most, max(count, 1).bit_length() - 1)
