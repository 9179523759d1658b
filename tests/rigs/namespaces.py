"""Network namespaces of this machine: a store that is really slow, or really cut off. Needs root; skips without.

A namespace is joined to ours by a pair of veths. Its name has this process's number, so that what a killed test left
behind is known, and removed by the next.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import pytest

_NAME = re.compile(r"kvbm-(\d+)-\d+")
_numbers = itertools.count()


class Apart(NamedTuple):
    """A namespace, the veth that leads to it, and the addresses at both ends."""

    name: str
    veth: str
    here: str
    there: str

    @property
    def inside(self) -> list[str]:
        """Words before a program that shall run there."""
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        """Nothing passes, and nobody is told.

        It is the other end that goes down: with ours its route would go too, and a machine's default route may lead to
        somebody who answers.
        """
        _run(*self.inside, "ip", "link", "set", "inner", "down")

    def join(self) -> None:
        """What is sent passes again."""
        _run(*self.inside, "ip", "link", "set", "inner", "up")

    def slow(self, kilobits: int) -> None:
        """What comes from there comes at this rate, kbit/s; a few packets' worth comes at once."""
        bucket = ("rate", f"{kilobits}kbit", "burst", "4kb", "limit", "64kb")
        _run(*self.inside, "tc", "qdisc", "replace", "dev", "inner", "root", "tbf", *bucket)

    def fast(self) -> None:
        """At any rate again."""
        _run(*self.inside, "tc", "qdisc", "del", "dev", "inner", "root")


@contextlib.contextmanager
def namespace() -> Iterator[Apart]:
    """A namespace of our own. It ends with all that runs in it."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not there (Debian's iproute2)")
    remove_leftovers()
    number, pid = next(_numbers), os.getpid()
    name = f"kvbm-{pid}-{number}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    net = f"10.{64 + (pid >> 8) % 64}.{pid % 256}"
    apart = Apart(name, f"kv{pid}a{number % 64}", *(f"{net}.{number % 64 * 4 + end}" for end in (1, 2)))
    try:
        _run("ip", "link", "add", apart.veth, "type", "veth", "peer", "name", "inner", "netns", name)
        _run("ip", "addr", "add", f"{apart.here}/30", "dev", apart.veth)
        _run("ip", "link", "set", apart.veth, "up")
        _run(*apart.inside, "ip", "addr", "add", f"{apart.there}/30", "dev", "inner")
        for link in ("inner", "lo"):
            _run(*apart.inside, "ip", "link", "set", link, "up")
        yield apart
    finally:
        _remove(name)


def remove_leftovers() -> None:
    """Remove the namespaces of test processes that are no more."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for found in _NAME.finditer(listed):
        if not os.path.exists(f"/proc/{found[1]}"):
            _remove(found[0])


def _remove(name: str) -> None:
    """With what runs there: its processes would keep it, and its end of the veths is ours with it."""
    pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
    for pid in pids.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
