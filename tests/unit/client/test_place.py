"""The name of a manager's place: one for all that find it, another for every other."""

from __future__ import annotations

from pathlib import Path

from kvbm.client import place
from kvbm.client.place import name_of_place


def test_paths_that_lead_to_one_socket_are_one_place(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "mounted").symlink_to(tmp_path / "run")
    name = name_of_place(str(tmp_path / "run" / "manager.sock"))
    assert name_of_place(str(tmp_path / "mounted" / "manager.sock")) == name
    (tmp_path / "run" / "manager.sock").touch()
    assert name_of_place(str(tmp_path / "run" / "manager.sock")) == name, "also once it is there"


def test_other_sockets_directories_and_machines_are_other_places(tmp_path: Path) -> None:
    for name in ("run", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "boot").write_text("another machine")
    paths = [
        tmp_path / "run" / "a",
        tmp_path / "run" / "b",
        tmp_path / "other" / "a",
        tmp_path / "none" / "a",
    ]
    names = [name_of_place(str(path)) for path in paths]
    before, place._BOOT_ID = place._BOOT_ID, tmp_path / "boot"
    try:
        names.append(name_of_place(str(paths[0])))
    finally:
        place._BOOT_ID = before
    assert len({*names}) == len(names)
