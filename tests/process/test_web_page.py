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
from rigs.web import token_of

pytestmark = pytest.mark.slow

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
    browser.wait_for_text("body", "needs the token")
    assert str(loaded.node.runtime_dir / "admin.token") in browser.text("#enter")
    pages = browser.run("return history.length")
    for wrong in ("wrong", "w\u00f6rse"):
        browser.enter("#token", wrong)
        browser.wait_for_text("#enter", "This is not the token.")
        assert (browser.text("#main"), browser.text("#pause")) == ("", "")
    browser.enter("#token", loaded.token)
    browser.wait_for_text("#pill", "live")
    assert (browser.text("#enter"), browser.text("#pause")) == ("", "Pause")
    assert [line for line in browser.complaints() if "401 (Unauthorized)" not in line] == []
    assert (browser.run("return location.href"), browser.run("return history.length")) == (loaded.url, pages)
    assert browser.run("return [document.cookie, localStorage.length]") == ["", 0]
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
    (loaded.node.runtime_dir / "admin.token").unlink()
    loaded.node.managers.pop().terminate()
    browser.wait_for_text("#pill", "does not answer")
    loaded.node.manage()
    browser.wait_for_text("#enter", "The token has changed")
    browser.enter("#token", token_of(loaded.node))
    browser.wait_for_text("#pill", "live")


FAKE = """
const [status, text] = arguments;
window.trueFetch ||= window.fetch;
window.fetch = status === 0 ? window.trueFetch : async () => new Response(JSON.stringify({error: text}), {status});
"""


def test_the_page_says_in_which_state_it_is(browser: Browser, loaded: Loaded) -> None:
    browser.open(f"{loaded.url}#token={loaded.token}")
    browser.wait_for_text("#pill", "live")
    for status, text in ((429, "too many calls; wait a second"), (500, "a defect of KVBM; the log has it")):
        browser.run(FAKE, status, text)
        browser.wait_for_text("#verdict", f"{status}: {text}")
        assert "no numbers since" in browser.text("#pill")
        assert "was when it was last seen" in browser.text("#verdict")
    browser.run(FAKE, 503, "no manager at X")
    browser.wait_for_text("#verdict", "503: no manager at X")
    assert "manager does not answer since" in browser.text("#pill")
    browser.run(FAKE, 0, "")
    browser.wait_for_text("#pill", "live")
    browser.click("#pause")
    browser.wait_for_text("#pill", "paused")
    assert re.search(r"the numbers are those of \d\d:\d\d:\d\d", browser.text("#notice"))
    browser.click("#window")  # looks once, and stays paused
    browser.wait_for_text("#manager", "since its start")
    assert (browser.text("#pill"), "Paused" in browser.text("#notice")) == ("paused", True)
    browser.click("#pause")
    browser.wait_for_text("#pill", "live")
    assert browser.text("#notice") == ""
    browser.run(FAKE, 401, "")
    browser.wait_for_text("#enter", "The token has changed")
    assert (browser.text("#pill"), browser.text("#main")) == ("token needed", "")


CURVES = """
const draw = (points) => {
  curves = {"device → host": points};
  drawFlows({flows: [{source: "device", target: "host", bytes_per_s: 1e9, mean_s: null}]});
  return [...document.querySelectorAll("#flows polyline")].map((line) => line.getAttribute("points"));
};
paused = true;
return draw(arguments[0]);
"""


def test_a_curve_has_the_time_of_each_look(browser: Browser, loaded: Loaded) -> None:
    """And no line over a time in which nobody looked."""
    browser.open(f"{loaded.url}#token={loaded.token}")
    browser.wait_for_text("#pill", "live")
    points = [[100.0, 0.0], [102.0, 5e8], [190.0, 0.0], [191.0, 1e9], [199.0, 5e8]]
    assert browser.run(CURVES, points) == [
        "45.00,32.00 46.11,18.00",
        "95.00,32.00 95.56,4.00 100.00,18.00",
    ]


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(tmp_path: Path, loaded: Loaded, width: int) -> None:
    browser = Browser(tmp_path, width)
    try:
        for path in (f"?token={loaded.token}", f"#token={loaded.token}", "docs"):
            browser.open(loaded.url + path)
            if path != "docs":
                browser.wait_for_text("#pill", "live")
                assert browser.run("return location.href") == loaded.url
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
    command += ["--max-examples", "6", "--seed", "1", "--rate-limit", "18/s", "--workers", "1", "--no-color"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=FUZZ_S, check=False)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
