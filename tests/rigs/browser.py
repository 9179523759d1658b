"""A real Chromium without a screen (Debian's packages `chromium` and `chromium-driver`), driven by selenium; tests that
need it are skipped where it is not installed."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from rigs.manager_probe import wait_for
from rigs.system_packages import require

SEEN_S = 30.0


class Browser:
    """One window. Its profile is in the given directory."""

    def __init__(self, directory: Path, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        driver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
        programs = [require("chromium"), require("chromedriver")]
        options = driver.ChromeOptions()
        options.binary_location = programs[0]
        words = ["headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars", "disable-gpu"]
        words += ["disable-background-networking", f"user-data-dir={directory / 'profile'}"]
        words += [f"window-size={width},{height}", *(["force-dark-mode"] if dark else [])]
        for word in words:
            options.add_argument(f"--{word}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = driver.ChromeService(programs[1])
        self.driver: Any = driver.Chrome(options=options, service=service)
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        if dark:
            features = [{"name": "prefers-color-scheme", "value": "dark"}]
            self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def open(self, url: str) -> None:
        self.driver.get(url)

    def text(self, css: str) -> str:
        """What a reader sees of the first element that this selects; empty when there is none, or it is hidden."""
        script = (
            "const e = document.querySelector(arguments[0]); return e?.checkVisibility() ? e.innerText : ''"
        )
        return str(self.run(script, css))

    def click(self, css: str) -> None:
        self.driver.find_element("css selector", css).click()

    def enter(self, css: str, text: str) -> None:
        """Type into a field, and press Enter."""
        field = self.driver.find_element("css selector", css)
        field.clear()
        field.send_keys(text + "\n")

    def run(self, script: str, *values: object) -> Any:
        """What a script on the page returns."""
        return self.driver.execute_script(script, *values)

    def wait_for_text(self, css: str, word: str) -> str:
        """The text of the element, once it has the word."""
        wait_for(
            lambda: word in self.text(css),
            SEEN_S,
            lambda: f"no {word!r} in {css}: {self.text('body')[:2000]}",
        )
        return self.text(css)

    def complaints(self) -> list[str]:
        """What the browser wrote to its console: scripts that failed, what the page's policy forbids."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def picture(self, path: Path) -> None:
        """What the window shows, all of the page's height."""
        height = self.run("return document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": self.run("return innerWidth"), "height": height, "scale": 1}
        found = self.driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip}
        )
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self.driver.quit()
