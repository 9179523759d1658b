"""Numbers for the keys of blocks."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

import numpy as np

from kvbm.block import KEY_BYTES


def names_of(keys: Sequence[Hashable]) -> array[int]:
    """Numbers for keys: a number stays as it is, a `BlockKey` gives its first 8 bytes."""
    if keys and isinstance(keys[0], bytes):
        assert len(keys[0]) == KEY_BYTES
        joined = b"".join(keys)  # type: ignore[arg-type]  # where one key is bytes, all are
        return array("q", np.frombuffer(joined, np.int64)[:: KEY_BYTES // 8].tobytes())
    return array("q", keys)  # type: ignore[arg-type]  # and else all are numbers
