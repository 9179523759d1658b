"""Master keys from files and commands: what is accepted, and lines that say what is not, without showing it."""

from __future__ import annotations

import base64
import os
import sys
import tempfile
from collections.abc import Iterator
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
from rigs.other_user import needs_root, result, run_as

POD, STRANGERS = 1000, 12345
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
    path = key_file(tmp_path, mode)
    if os.geteuid() == 0:
        os.chown(path, -1, STRANGERS)  # root's own group may read what is root's
    with pytest.raises(SettingsError, match=rf"remote_keys=.*mode {mode:o}.*0600 or stricter"):
        keys_from_file(str(path), "remote_keys")


@pytest.fixture
def mounted() -> Iterator[Path]:
    """A file behind links, as Kubernetes mounts a Secret, in a directory that every user can enter."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        folder.chmod(0o755)
        (folder / "..2026").mkdir(mode=0o755)
        (folder / "..data").symlink_to("..2026")
        key_file(folder / "..2026")
        (folder / "keys").symlink_to("..data/keys")
        yield folder / "keys"


def read_by_a_pods_user(path: Path, owner: int, group: int, mode: int, groups: list[int]) -> str:
    """What user 1000 makes of the file with this owner, group and mode: the keys' names, or the error's line."""
    os.chown(path, owner, group)
    path.chmod(mode)
    return result(
        run_as(POD, lambda: [key.key_id for key in keys_from_file(str(path), "remote_keys")], groups)
    )


@needs_root
@pytest.mark.parametrize(("mode", "groups"), [(0o440, []), (0o640, []), (0o440, [7, 2000])])
def test_a_secret_that_kubernetes_mounts_is_read(mounted: Path, mode: int, groups: list[int]) -> None:
    """It is root's, and the pod's `fsGroup` may read it: the user's own group, or one of his others."""
    group = groups[-1] if groups else POD
    assert read_by_a_pods_user(mounted, 0, group, mode, groups) == "['one']"


@needs_root
@pytest.mark.parametrize(
    ("owner", "group", "mode"),
    [
        (0, POD, 0o444),  # everybody reads it
        (0, POD, 0o460),  # our group, others in it perhaps, writes to it
        (0, POD, 0o450),
        (0, POD, 0o642),
        (0, STRANGERS, 0o444),
        (STRANGERS, POD, 0o440),  # not root: who owns it writes to it
        (POD, POD, 0o440),  # ours: there is no need that others read it
    ],
)
def test_what_others_than_root_and_our_group_reach_is_refused(
    mounted: Path, owner: int, group: int, mode: int
) -> None:
    said = read_by_a_pods_user(mounted, owner, group, mode, [])
    assert f"user {owner} owns it, mode {mode:o}, group {group}" in said
    assert "as Kubernetes mounts a Secret" in said


@needs_root
def test_a_group_that_is_not_ours_does_not_count(tmp_path: Path) -> None:
    path = key_file(tmp_path, 0o640)
    os.chown(path, 0, STRANGERS)
    with pytest.raises(SettingsError, match=f"group {STRANGERS}"):
        keys_from_file(str(path), "remote_keys")
    os.chown(path, 0, os.getegid())
    assert len(keys_from_file(str(path), "remote_keys")) == 1


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
