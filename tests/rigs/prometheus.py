"""A real Prometheus on loopback, from the distribution's package; tests that need it are skipped where it is not."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from rigs.manager_probe import free_port, wait_for
from rigs.system_packages import require

START_S = 30.0
SCRAPE_S = 1


class Prometheus:
    """Scrapes the managers at these ports every second, and evaluates the rules of that file."""

    def __init__(self, directory: Path, *ports: int, rules: Path | None = None) -> None:
        self._port = free_port()
        configuration = {
            "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
            "rule_files": [str(rules)] if rules else [],
            "scrape_configs": [
                {"job_name": "kvbm", "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
            ],
        }
        file = directory / "prometheus.json"  # JSON is YAML
        file.write_text(json.dumps(configuration))
        self._log = directory / "prometheus.log"
        command = [
            require("prometheus"),
            f"--config.file={file}",
            f"--storage.tsdb.path={directory / 'tsdb'}",
        ]
        command += [f"--web.listen-address=127.0.0.1:{self._port}"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_for(
                self._ready, START_S, lambda: f"Prometheus does not answer: {self._log.read_text()[-2000:]}"
            )
        except AssertionError:
            self._process.kill()
            raise

    def query(self, expression: str) -> list[float]:
        """The values of an instant query. Raises for an expression that cannot be evaluated."""
        return [float(row["value"][1]) for row in self._ask("query", query=expression)["result"]]

    def targets(self) -> list[dict[str, Any]]:
        """What it scrapes: `health` and `lastError` of each."""
        found: list[dict[str, Any]] = self._ask("targets")["activeTargets"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """The alerts that it evaluates: `name`, `health`, `state` and `lastError` of each."""
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(START_S)

    def _ask(self, what: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{self._port}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10.0) as reply:
            return json.load(reply)["data"]

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5.0) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False
