"""Master keys from files and commands: what is accepted, and lines that say what is not, without showing it."""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.errors import SettingsError
from kvbm.tiers.remote.sealing_keys import (
    KEYS_MAX,
    TEXT_BYTES_MAX,
    keys_from_command,
    keys_from_file,
    keys_in,
)

SECRET = bytes(range(100, 132))
CODED = base64.b64encode(SECRET)
GOOD = b"one:" + CODED + b"\n"


def in_text(text: bytes) -> list[tuple[str, bytes]]:
    return [(key.key_id, key.secret) for key in keys_in(text, "remote_keys", "somewhere")]


def test_lines_are_keys_in_order() -> None:
    other = base64.b64encode(bytes(32))
    text = b"# ours\n\n new-2 : " + CODED + b" \r\n#x:y\nold_1:" + other
    assert in_text(text) == [("new-2", SECRET), ("old_1", bytes(32))]
    assert in_text(GOOD) == [("one", SECRET)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "has 0 keys"),
        (b"# nothing\n\n", "has 0 keys"),
        (b"".join(b"k%d:%s\n" % (number, CODED) for number in range(KEYS_MAX + 1)), "has 17 keys"),
        (GOOD + CODED, "line 2 has no colon"),
        (b"\n:" + CODED, "line 2 has no id"),
        (b"a.b:" + CODED, "line 1 has no id"),
        (b"\xff:" + CODED, "line 1 has no id"),
        (b"a" * 17 + b":" + CODED, "line 1 has no id"),
        (CODED + b":one", "line 1 has no id"),
        (b"one:" + CODED[:-1], "no base64"),
        (b"one:" + CODED.replace(b"Z", b"*"), "no base64"),
        (b"one:" + CODED + b" " + CODED, "no base64"),
        (b"one:", "a key of 0 bytes"),
        (b"one:" + base64.b64encode(SECRET[:16]), "a key of 16 bytes"),
        (b"one:" + base64.b64encode(SECRET * 2), "a key of 64 bytes"),
        (GOOD + GOOD, "line 2 has the id of a line before"),
        (GOOD + b"#" * TEXT_BYTES_MAX, f"more than {TEXT_BYTES_MAX} bytes"),
    ],
)
def test_a_line_that_is_no_key_is_named_and_not_shown(text: bytes, said: str) -> None:
    with pytest.raises(SettingsError) as raised:
        in_text(text)
    line = str(raised.value)
    assert line.startswith("remote_keys='somewhere' cannot be used: ") and said in line
    assert "\n" not in line and CODED[:8].decode() not in line
    assert raised.value.__cause__ is None


@given(st.binary(max_size=300))
def test_foreign_text_is_an_error_of_the_setting(text: bytes) -> None:
    with pytest.raises(SettingsError):
        in_text(text + b"\nno key")


def key_file(folder: Path, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_bytes(GOOD)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_that_only_we_read(tmp_path: Path, mode: int) -> None:
    assert [key.secret for key in keys_from_file(str(key_file(tmp_path, mode)), "remote_keys")] == [SECRET]


def test_a_link_leads_to_the_file_that_is_looked_at(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(key_file(tmp_path))
    assert len(keys_from_file(str(link), "remote_keys")) == 1
    key_file(tmp_path, 0o644)
    with pytest.raises(SettingsError, match="mode 644"):
        keys_from_file(str(link), "remote_keys")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o666])
def test_a_file_that_others_could_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(SettingsError, match=rf"remote_keys=.*mode {mode:o}.*0600 or stricter"):
        keys_from_file(str(key_file(tmp_path, mode)), "remote_keys")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = key_file(tmp_path)
    os.chown(path, 12345, 12345)
    with pytest.raises(SettingsError, match="user 12345 owns it"):
        keys_from_file(str(path), "remote_keys")


@pytest.mark.parametrize("name", ["absent", ".", "pipe", "nul\0"])
def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(SettingsError, match="remote_keys="):
        keys_from_file(f"{tmp_path}/{name}", "remote_keys")


def command(program: str) -> list[str]:
    return [sys.executable, "-c", "import os, sys, signal, time\n" + program]


def printing(text: bytes) -> str:
    return f"sys.stdout.buffer.write({text!r}); sys.stdout.flush()\n"


def test_a_command_prints_its_keys() -> None:
    program = "assert not sys.stdin.read(); print('a secret', file=sys.stderr)\n" + printing(GOOD)
    keys = keys_from_command(command(program), 30, "remote_key_command")
    assert [key.secret for key in keys] == [SECRET]


def test_no_shell_reads_a_command(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        keys_from_command([f"touch {tmp_path}/made; true"], 30, "remote_key_command")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (printing(GOOD) + "sys.exit(3)", "ended with status 3"),
        (printing(GOOD) + "os.kill(os.getpid(), signal.SIGTERM)", "ended with status -15"),
        (printing(CODED), "line 1 has no colon"),
        ("", "has 0 keys"),
        ("while True: " + printing(GOOD), f"more than {TEXT_BYTES_MAX} bytes"),
    ],
)
def test_a_command_that_fails_is_told_of_without_what_it_printed(program: str, said: str) -> None:
    with pytest.raises(SettingsError) as raised:
        keys_from_command(command(program), 30, "remote_key_command")
    line = str(raised.value)
    assert line.startswith("remote_key_command=") and said in line
    assert CODED[:8].decode() not in line and printing(b"")[:10] not in line


@pytest.mark.parametrize(
    "program",
    [
        "time.sleep(600)",
        printing(GOOD) + "time.sleep(600)",
        "sys.stdout.close(); os.close(1); time.sleep(600)",
        # It has ended, and a child of it holds on to its output.
        printing(GOOD) + "if os.fork() == 0: time.sleep(600)",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)",
    ],
)
def test_a_command_that_takes_too_long_is_ended_with_its_children(tmp_path: Path, program: str) -> None:
    os.mkfifo(tmp_path / "held")
    # Whoever of them lives holds the pipe open: its end comes when the last one has gone.
    holding = f"held = os.open({str(tmp_path / 'held')!r}, os.O_RDWR)\n"
    reader = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(SettingsError, match=r"not ended within 0\.5 s"):
            keys_from_command(command(holding + program), 0.5, "remote_key_command")
        os.set_blocking(reader, True)
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)
