"""A manager's messages to its followers become a recording that the simulator reads back."""

from __future__ import annotations

import gzip
import io
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from kvbm.cli.record import follow
from kvbm.client.admin import Admin
from kvbm.clock import ManualClock
from kvbm.hashing import chain_keys, join_keys
from kvbm.protocol import PROTOCOL_VERSION, Asked, Ended, Finished, Follow, Hello, Welcome
from kvbm.sim.traces import recorder as recorder_module
from kvbm.sim.traces.formats import read_trace
from kvbm.sim.traces.recorder import Recorder
from kvbm.sim.traces.trace import Trace
from rigs import manager as manager_bench
from rigs.manager import ManagerBench

KEYS = chain_keys(bytes(32), range(64), 4)
OURS, THEIRS = b"\x01" * 32, b"\x02" * 32


def asked(count: int, at_s: float, fingerprint: bytes = OURS, start: int = 0) -> Asked:
    keys = join_keys(KEYS[start:count])
    return Asked(fingerprint=fingerprint, model="tiny", block_tokens=4, keys=keys, at_s=at_s)


def ended(count: int, at_s: float, output_tokens: int, fingerprint: bytes = OURS) -> Ended:
    return Ended(fingerprint=fingerprint, key=KEYS[count - 1], output_tokens=output_tokens, at_s=at_s)


def recorded(
    tmp_path: Path, *messages: Asked | Ended | Follow, namespace: str = ""
) -> tuple[Recorder, Trace]:
    file = io.BytesIO()
    recorder = Recorder(file, namespace)
    for message in messages:
        recorder.receive(message)
    recorder.close()
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(file.getvalue()))
    return recorder, read_trace(path)


def test_a_recording_has_chains_lengths_and_times(tmp_path: Path) -> None:
    recorder, trace = recorded(
        tmp_path, asked(3, 100.0), asked(5, 101.0), ended(5, 103.5, 7), ended(3, 104.0, 40), Follow()
    )
    assert (recorder.written, recorder.others, trace.block_tokens) == (2, 0, 4)
    first, second = trace.requests
    assert (first.arrived_s, first.seconds, first.output_tokens, first.prompt_tokens) == (0.0, 4.0, 40, 12)
    assert (second.arrived_s, second.seconds, second.output_tokens) == (1.0, 2.5, 7)
    assert list(second.blocks[:3]) == list(first.blocks)


def test_a_request_that_is_asked_for_twice_is_one(tmp_path: Path) -> None:
    recorder, trace = recorded(tmp_path, asked(3, 1.0), asked(3, 2.0), ended(3, 4.0, 5), asked(3, 9.0))
    assert recorder.written == 2
    assert [request.arrived_s for request in trace.requests] == [0.0, 8.0]


def test_another_namespace_is_left_out_and_counted(tmp_path: Path) -> None:
    recorder, trace = recorded(
        tmp_path, asked(2, 1.0, THEIRS), asked(3, 1.0), ended(2, 2.0, 1, THEIRS), namespace=OURS.hex()[:6]
    )
    assert (recorder.written, recorder.others) == (1, 1)
    assert len(trace.requests[0].blocks) == 3


def test_what_never_ends_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "RUNNING_MAX", 2)
    file = io.BytesIO()
    recorder = Recorder(file)
    for count in (1, 2, 3):
        recorder.receive(asked(count, float(count)))
    assert recorder.written == 1


def test_nothing_of_the_keys_is_in_the_file(tmp_path: Path) -> None:
    file = io.BytesIO()
    recorder = Recorder(file)
    recorder.receive(asked(3, 1.0))
    recorder.close()
    assert all(
        key[:6] not in file.getvalue() and key.hex()[:8].encode() not in file.getvalue() for key in KEYS
    )


def test_a_follower_hears_of_every_request_and_an_admin_who_does_not_follow_of_none(
    manager: ManagerBench,
) -> None:
    leader, _ = manager.engine()
    follower, bystander = manager.client(), manager.client()
    for client in (follower, bystander):
        client.send(Hello(version=PROTOCOL_VERSION, role="admin"))
        client.expect(Welcome)
    follower.send(Follow())
    manager.clock.advance(3.0)
    leader.lookup(1, manager_bench.KEYS[:3])
    leader.send(Finished(key=manager_bench.KEYS[2], output_tokens=9))
    asked_, ended_ = follower.take()
    fingerprint, now_s = manager_bench.NAMESPACE.fingerprint, manager.clock()
    assert asked_ == Asked(
        fingerprint=fingerprint,
        model=manager_bench.NAMESPACE.model,
        block_tokens=manager_bench.LAYOUT.block_tokens,
        keys=join_keys(manager_bench.KEYS[:3]),
        at_s=now_s,
    )
    assert ended_ == Ended(fingerprint=fingerprint, key=manager_bench.KEYS[2], output_tokens=9, at_s=now_s)
    assert bystander.take() == []
    follower.close()
    manager.step()
    assert leader.lookup(2, manager_bench.KEYS[:3]).slots == ()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_command_ends_its_file_when_it_is_told_to_stop(
    manager: ManagerBench, tmp_path: Path, number: signal.Signals
) -> None:
    leader, _ = manager.engine()
    file = tmp_path / "trace.jsonl.gz"
    words = ("record", str(file), "--manager", manager.path)
    with subprocess.Popen([sys.executable, "-m", "kvbm.cli.main", *words], stderr=subprocess.PIPE) as child:
        try:
            manager.until(lambda: manager.server._followers._numbers, "it never followed")
            leader.lookup(1, manager_bench.KEYS[:3])
            leader.send(Finished(key=manager_bench.KEYS[2], output_tokens=9))
            manager.step()
            child.send_signal(number)
            _, said = child.communicate(timeout=60.0)
        finally:
            child.kill()
    assert child.returncode == 0
    # A long path is broken over lines.
    assert f"1requestswrittento{file}" in "".join(said.decode().split())
    (request,) = read_trace(file).requests
    assert (len(request.blocks), request.output_tokens) == (3, 9)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_recording_that_is_killed_has_what_had_ended(
    manager: ManagerBench, tmp_path: Path, name: str
) -> None:
    leader, _ = manager.engine()
    file = tmp_path / name
    words = ("record", str(file), "--manager", manager.path)
    with subprocess.Popen(
        [sys.executable, "-m", "kvbm.cli.main", *words], stderr=subprocess.DEVNULL
    ) as child:
        try:
            manager.until(lambda: manager.server._followers._numbers, "it never followed")
            leader.lookup(1, manager_bench.KEYS[:3])
            leader.send(Finished(key=manager_bench.KEYS[2], output_tokens=9))
            # A compressed file has a header from the start.
            manager.until(lambda: file.exists() and file.stat().st_size > 100, "nothing is in the file")
        finally:
            child.kill()
    (request,) = read_trace(file).requests
    assert (len(request.blocks), request.output_tokens) == (3, 9)


class Written(io.BytesIO):
    """A file that notes how much of it has been flushed."""

    flushed = b""

    def flush(self) -> None:
        super().flush()
        self.flushed = self.getvalue()


class Messages:
    """A manager that sends so many messages, and lets a while pass before each."""

    def __init__(self, clock: ManualClock, step_s: float, *messages: Asked | Ended) -> None:
        self._clock, self._step_s, self._messages = clock, step_s, list(messages)

    def tell(self, message: Follow) -> None:
        """The recorder follows."""

    def hear(self, wait_s: float) -> list[Asked | Ended]:
        self._clock.advance(self._step_s)
        return [self._messages.pop(0)] if self._messages else []


def test_the_file_is_flushed_each_second_and_not_for_each_request() -> None:
    clock, file = ManualClock(100.0), Written()
    recorder, flushed = Recorder(file), list[int]()
    messages = [m for n in range(1, 9) for m in (asked(n, float(n)), ended(n, n + 0.5, 1))]
    source = cast(Admin, Messages(clock, 0.1, *messages))
    follow(
        source, recorder, lambda: clock() < 102.5, lambda: flushed.append(file.flushed.count(b"\n")), clock
    )
    assert sorted(set(flushed)) == [0, 6, 9], "a header, and five requests in the first second"


def test_a_full_disk_is_one_line(manager: ManagerBench) -> None:
    leader, _ = manager.engine()
    words = ("record", "/dev/full", "--manager", manager.path)
    with subprocess.Popen(
        [sys.executable, "-m", "kvbm.cli.main", *words], stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            manager.until(lambda: manager.server._followers._numbers, "it never followed")
            leader.lookup(1, manager_bench.KEYS[:3])
            leader.send(Finished(key=manager_bench.KEYS[2], output_tokens=9))
            manager.until(lambda: child.poll() is not None, "it goes on")
            assert child.stderr is not None
            said = child.stderr.read()
        finally:
            child.kill()
    assert child.returncode == 2
    assert said.splitlines()[-1] == (
        "kvbm: /dev/full: cannot be written (No space left on device): it ends before, and can be read up to there"
    )
    assert "Traceback" not in said


def test_a_manager_that_does_not_serve_it_leaves_no_file(tmp_path: Path) -> None:
    file, path = tmp_path / "trace.jsonl", tmp_path / "m.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        words = ("record", str(file), "--manager", str(path), "--seconds", "0.1")
        with subprocess.Popen(
            [sys.executable, "-m", "kvbm.cli.main", *words], stderr=subprocess.PIPE, text=True
        ) as child:
            try:
                connection, _ = listener.accept()
                connection.close()  # it has just ended, before it welcomed anybody
                _, said = child.communicate(timeout=60.0)
            finally:
                child.kill()
    assert (child.returncode, said.count("\n")) == (2, 1), said
    assert str(path) in said
    assert not file.exists(), "nothing half-done"
