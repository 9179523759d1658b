"""Strict mode of the tests: an error that a handler swallows fails the test that ran the handler.

Every handler of `Exception`, `BaseException` or `RuntimeError` that neither raises nor logs at warning or above calls
`record_swallowed`, and so does every border behind which a defect is survived (`Guard`, the loops of threads). Where
`KVBM_TESTS_SWALLOWED` names a directory, the error is recorded there, for `tests/rigs/swallowed.py`. Children inherit
the variable. Without it nothing is done.
"""

from __future__ import annotations

import json
import os
import secrets
import traceback

from kvbm.settings import process_environment

VARIABLE = "KVBM_TESTS_SWALLOWED"


def record_swallowed(error: BaseException) -> None:
    """Record an error that goes no further than the calling handler. Raises nothing, in any thread or process."""
    directory = process_environment().get(VARIABLE)
    if not directory:
        return
    record = {
        "error": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
    }
    path = os.path.join(directory, f"{os.getpid()}-{secrets.token_hex(8)}")
    try:
        with open(path + ".part", "w") as file:
            json.dump(record, file)
        os.rename(path + ".part", path + ".json")
    except OSError:
        pass  # the directory went with the test session that this process outlives
