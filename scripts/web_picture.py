"""Make `docs/images/web.png`: the web page of a real manager under a test's load, in a Chromium without a screen.

    python scripts/web_picture.py [--dark] [--width 390] [--seconds 150] docs/images/web.png

Needs the packages `chromium` and `chromium-driver`, and selenium (`pip install -e '.[test]'`).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from kvbm.layout import Namespace
from rigs.admin import Node
from rigs.browser import Browser
from rigs.busy_engine import BusyEngine

NAMESPACE = Namespace(
    model="meta-llama/Llama-3.1-8B-Instruct", fields=(("weights", "5f1c"), ("dtype", "bfloat16"))
)
BLOCK_BYTES = 64 << 10


def main() -> None:
    """Load a manager for a while, and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--seconds", type=float, default=150.0)
    given = parser.parse_args()
    with contextlib.ExitStack() as ends:
        directory = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="kvbm-")))
        node = Node(
            directory,
            host_blocks=1100,
            disk_blocks=6000,
            disk_dir=directory / "disk",
            admin_http="127.0.0.1:6899",
        )
        ends.callback(node.close)
        socket_path = node.manage()
        for i in range(2):
            engine = BusyEngine(socket_path, f"vllm-{i}", NAMESPACE, BLOCK_BYTES, per_s=12.0, seed=i)
            ends.callback(engine.close)
        browser = Browser(directory, given.width, 800, given.dark)
        ends.callback(browser.close)
        token = (node.runtime_dir / "admin.token").read_text().strip()
        browser.open(f"http://127.0.0.1:6899/#token={token}")
        browser.wait_for_text("#pill", "live")
        time.sleep(given.seconds)  # the curves grow by a point every two seconds
        browser.picture(given.picture.resolve())


if __name__ == "__main__":
    main()
