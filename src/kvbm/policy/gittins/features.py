"""The features of a run when a request uses it: few values per feature, packed into one number.

Some features are the request's, and the same for all its runs; others are the run's own.
"""

from __future__ import annotations

from enum import IntEnum


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
_TURNS, _OUTPUT, _NEW, _LENGTH = 11, 14, 11, 7
_USES, _POSITIONS, _SUPERSEDED = 12, len(Position), 2
RUN_CODES = _USES * _POSITIONS * _SUPERSEDED
_CODES = _TURNS * _OUTPUT * _NEW * _LENGTH * RUN_CODES
_SIZES = (_USES * _TURNS, _POSITIONS, _OUTPUT, _NEW, _LENGTH, _SUPERSEDED)
SIZES = tuple(len(Said) * size for size in _SIZES)
BY_AGE = (0, 2, 3, 4, 5)
"""The features whose effect differs by age: all but the position."""


def request_code(turn: int, output_tokens: int, new_blocks: int, blocks: int) -> int:
    """The request's part: which turn of its conversation it is (from 1 on), and as logarithms the tokens generated (-1:
    not known yet), the blocks that no request asked for before, and all blocks.
    """
    code = turn - 1 if turn <= 5 else min(_TURNS - 2, 2 + turn.bit_length())
    output = OUTPUT_UNKNOWN if output_tokens < 0 else _log(output_tokens, OUTPUT_UNKNOWN - 1)
    code = code * _OUTPUT + output
    code = code * _NEW + _log(new_blocks + 1, _NEW - 2)
    return code * _LENGTH + _log(blocks, 2 * (_LENGTH - 2)) // 2


def run_code(uses: int, position: int) -> int:
    """The run's part: how often it was used, and its position."""
    few = uses if uses < 5 else 3 + min(_USES - 4, uses.bit_length() - 1)
    return (few * _POSITIONS + position) * _SUPERSEDED


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
    said, code = said_of(code), code % _CODES
    output = code // (_LENGTH * _NEW * RUN_CODES) % _OUTPUT
    request = (((_TURNS - 1) * _OUTPUT + output) * _NEW + _NEW - 1) * _LENGTH + _LENGTH - 1
    return with_word(request * RUN_CODES + code % RUN_CODES, said)


def position_of(code: int) -> int:
    """The `Position` in a code."""
    return code // _SUPERSEDED % _POSITIONS


def values_of(code: int) -> tuple[int, ...]:
    """The feature values of a code, in the order of `SIZES`.

    Every feature has values of its own for each `Said`: what is learned of runs with one word says nothing of others.
    """
    said = said_of(code)
    return tuple(said * size + value for size, value in zip(_SIZES, _values_of(code % _CODES), strict=True))


def _values_of(code: int) -> tuple[int, ...]:
    code, left_behind = divmod(code, _SUPERSEDED)
    code, position = divmod(code, _POSITIONS)
    code, uses = divmod(code, _USES)
    code, length = divmod(code, _LENGTH)
    code, new = divmod(code, _NEW)
    turn, output = divmod(code, _OUTPUT)
    return (uses * _TURNS + turn, position, output, new, length, left_behind)


def _log(count: int, most: int) -> int:
    return min(most, max(count, 1).bit_length() - 1)
