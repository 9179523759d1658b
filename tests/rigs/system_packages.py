"""Programs and libraries that tests run against and pip does not bring: where they are, and how they are installed.

`python tests/rigs/system_packages.py` installs what is missing, as root and with apt-get; `make test` and
`make test-all` begin with it. Elsewhere it prints the command, and a test that needs a missing package is skipped with
the same command as its reason. The standard library is enough to run it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = {
    "cc": "gcc",
    "/usr/include/stdio.h": "libc6-dev",
    "redis-server": "redis-server",
    "etcd": "etcd-server",
    "ip": "iproute2",
    "faketime": "faketime",
    "openssl": "openssl",
    "libibverbs.so.1": "libibverbs1",  # Mooncake's programs are linked with it and the next two
    "libcurl.so.4": "libcurl4",
    "libnuma.so.1": "libnuma1",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
    "shellcheck": "shellcheck",
}
"""Debian's package of each program, shared library or file."""
VENV_MODULE = "python3-venv"
"""What Debian keeps apart from Python; `make setup` installs it."""
APT_GET_S_MAX = 300.0


def find_program(name: str) -> str | None:
    """The path of a program: beside this Python, where pip puts it, or on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def is_installed(name: str) -> bool:
    """Whether this machine has a program, a shared library or a file."""
    if name.startswith("/"):
        return Path(name).exists()
    if ".so" not in name:
        return find_program(name) is not None
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def find_missing(*names: str) -> str:
    """The first of these that is not installed, with the command that installs it; empty where all are."""
    for name in names:
        if not is_installed(name):
            command = f"apt-get install {PACKAGES[name]}" if name in PACKAGES else "make setup"
            return f"{name} is not installed ({command})"
    return ""


def require(name: str) -> str:
    """The path of a program; of a library or a file, its name. Skips the test where it is not installed."""
    import pytest  # not where packages are installed

    if reason := find_missing(name):
        pytest.skip(reason)
    return find_program(name) or name


def install(*packages: str) -> dict[str, str]:
    """Install Debian packages, where this user may. Returns the reason of each that was not installed."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return dict.fromkeys(packages, "that takes root and apt-get")
    if reason := _run_apt_get("update"):
        return dict.fromkeys(packages, reason)
    if not _run_apt_get("install", *packages):
        return {}
    reasons = {package: _run_apt_get("install", package) for package in packages}  # one of them cannot be had
    return {package: reason for package, reason in reasons.items() if reason}


def _run_apt_get(verb: str, *packages: str) -> str:
    """The reason why it failed, else an empty text."""
    options = ("-y", "--no-install-recommends") if packages else ()
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "-qq", verb, *options, *packages]
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=APT_GET_S_MAX
        )
    except subprocess.TimeoutExpired:
        return f"apt-get {verb} took longer than {APT_GET_S_MAX} s"
    return (ended.stderr.strip()[-300:] or f"apt-get {verb} failed") if ended.returncode else ""


def install_missing() -> None:
    """Install what is missing, or print the command. Never fails: a test skips what it cannot have."""
    packages = sorted({package for name, package in PACKAGES.items() if not is_installed(name)})
    if not packages:
        return
    _log(f"installing Debian packages for the tests: {' '.join(packages)}")
    reasons = install(*packages)
    if reasons:
        _log("tests that need these packages are skipped:")
    for package, reason in reasons.items():
        _log(f"  apt-get install {package}: {reason}")


def _log(line: str) -> None:
    sys.stderr.write(f"[setup] {line}\n")


if __name__ == "__main__":
    install_missing()
