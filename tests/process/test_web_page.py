"""The page in a real Chromium, with a real manager under load behind it; and the API under a fuzzer."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbm.layout import Namespace
from rigs.admin import Node
from rigs.browser import Browser
from rigs.busy_engine import BusyEngine
from rigs.manager_probe import free_port, wait_for

NAMESPACE = Namespace(model="page/model-8b", fields=(("weights", "aa"), ("dtype", "bfloat16")))
SEEN_S = 30.0
FUZZ_S = 100.0


class Loaded:
    """A manager with the page, and an engine that keeps it busy."""

    def __init__(self, make_node: Callable[..., Node], tmp_path: Path) -> None:
        self.port = free_port()
        self.node = make_node(
            host_blocks=600,
            disk_blocks=2000,
            disk_dir=tmp_path / "disk",
            disk_admission="all",
            admin_http=f"127.0.0.1:{self.port}",
        )
        self.engine = BusyEngine(self.node.manage(), "vllm-busy", NAMESPACE, prefixes=12)
        self.token = (self.node.runtime_dir / "admin.token").read_text().strip()
        self.url = f"http://127.0.0.1:{self.port}/"


@pytest.fixture
def loaded(make_node: Callable[..., Node], tmp_path: Path) -> Iterator[Loaded]:
    loaded = Loaded(make_node, tmp_path)
    yield loaded
    loaded.engine.close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path)
    yield browser
    browser.close()


def number(text: str) -> int:
    """The first number in a text, thousands and all."""
    found = re.search(r"\d[\d,]*", text)
    return int(found[0].replace(",", "")) if found else 0


def test_the_page_lives(browser: Browser, loaded: Loaded) -> None:
    """It asks for the token, shows what the manager does while it does it, and says when the manager has gone."""
    browser.open(loaded.url)
    assert "needs the token" in browser.text("body")
    browser.run("document.querySelector('input[name=token]').value = arguments[0]", loaded.token)
    browser.click("form button")
    browser.wait_for_text("#pill", "live")
    assert [line for line in browser.complaints() if "401 (Unauthorized)" not in line] == []
    assert "token" not in str(browser.run("return location.href"))
    assert browser.run("return document.cookie") == ""
    browser.wait_for_text("#verdict", "Hit rate")
    assert f"manager {loaded.node.managers[0].pid}" in browser.text("#manager")
    assert "vllm-busy" in browser.wait_for_text("#engines", NAMESPACE.model)
    for css, words in {
        "#tiers": ("host", "disk", "of what is asked is found here", "evicted/s"),
        "#flows": ("host → device", "disk → host", "GB/s"),
        "#prefixes": ("prefix", "requests"),
        "#why": ("never seen", "no block like it was ever stored", "cmpl-"),
        "#queues": ("blocks up", "leases"),
    }.items():
        for word in words:
            browser.wait_for_text(css, word)
    asked = number(browser.text("#whyWindow"))
    assert asked > 0
    wait_for(lambda: number(browser.text("#whyWindow")) > asked, SEEN_S, "the numbers stand still")
    browser.wait_for_text("#flows", "at most")
    curves = "return document.querySelectorAll('#flows polyline').length"
    wait_for(lambda: browser.run(curves) == 4, SEEN_S, "no curves")
    browser.click("#window")
    browser.wait_for_text("#manager", "since its start")
    assert browser.complaints() == []
    loaded.node.managers[0].terminate()
    pill = browser.wait_for_text("#pill", "does not answer")
    assert re.search(r"since \d\d:\d\d:\d\d$", pill)
    assert "was when it was last seen" in browser.text("#verdict")
    assert "vllm-busy" in browser.text("#engines")
    loaded.node.managers.clear()
    loaded.node.manage()
    browser.wait_for_text("#pill", "live")
    browser.wait_for_text("#engines", "No engine is connected")


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(tmp_path: Path, loaded: Loaded, width: int) -> None:
    browser = Browser(tmp_path, width)
    try:
        for path in (f"?token={loaded.token}", "docs"):
            browser.open(loaded.url + path)
            if path != "docs":
                browser.wait_for_text("#pill", "live")
                browser.wait_for_text("#why", "cmpl-")
            assert browser.run("return innerWidth") == width
            assert browser.run("return document.documentElement.scrollWidth") <= width, path
        assert "POST /api/pin" in browser.text("body")
        assert browser.complaints() == []
    finally:
        browser.close()


def test_nothing_comes_from_elsewhere() -> None:
    """The page works without a network: it names no other host, and no part of it is built."""
    import kvbm.cli.web as web

    for part in (Path(web.__file__).parent / "static").iterdir():
        hosts = set(re.findall(r"(?:https?:)?//([\w.-]+)", part.read_text())) - {"www.w3.org"}
        words = {host for host in hosts if "." in host}
        assert words == set(), part.name


def test_the_api_under_a_fuzzer(loaded: Loaded, tmp_path: Path) -> None:
    """No request makes it fail, and every answer is what the OpenAPI document says."""
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    program = shutil.which("schemathesis") or str(Path(sys.executable).with_name("schemathesis"))
    command = [program, "run", f"{loaded.url}openapi.json", "-H", f"Authorization: Bearer {loaded.token}"]
    command += ["--max-examples", "10", "--seed", "1", "--rate-limit", "18/s", "--workers", "1", "--no-color"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=FUZZ_S, check=False)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
