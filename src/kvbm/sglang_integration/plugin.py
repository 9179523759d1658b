"""SGLang's plug-in: sees every change of the weights from the start, also where KVBM is attached only later.

Called by `openkvbm.entry`, the `sglang.srt.plugins` entry point, in every process of SGLang.
"""

from __future__ import annotations

import logging
import sys

from kvbm.errors import KvbmError

log = logging.getLogger("kvbm.sglang")

SCHEDULER = "sglang.srt.managers.scheduler"
"""Only processes that have imported it by now have weights."""


def register() -> None:
    """Watch this process's weights. A SGLang that is not as we know it serves without KVBM: one line, and no error."""
    if SCHEDULER not in sys.modules:
        return
    from kvbm.sglang_integration.weights import watch_weights

    try:
        watch_weights()
    except KvbmError as error:
        log.info("%s", error)
