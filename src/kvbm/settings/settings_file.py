"""The settings file: which one is read without being named, and its content."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

from kvbm.errors import SettingsError
from kvbm.peers import is_trusted
from kvbm.settings.schema import FILE_VARIABLE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_NAME = "kvbm.toml"
"""A file of this name in the working directory is read when no other one is named."""


def found_in(directory: Path, warnings: list[str]) -> Path | None:
    """`kvbm.toml` in this directory; None when there is none, or when another user could have written it.

    Nobody named this file, and an engine may be started in a directory where others write, such as /tmp: settings
    name directories and sockets, so they are taken from the user himself or from root alone.
    """
    path = directory / FILE_NAME
    try:
        link, file = path.lstat(), path.stat()
    except OSError:
        return None
    trusted = (
        stat.S_ISREG(file.st_mode)
        and not stat.S_IMODE(file.st_mode) & 0o022
        and all(is_trusted(status.st_uid, ()) for status in (link, file))
    )
    if not trusted:
        warnings.append(
            f"{os.path.abspath(path)} is ignored: user {file.st_uid} owns it, mode {stat.S_IMODE(file.st_mode):o}, and "
            f"others could have written it; name it with {FILE_VARIABLE} if it is meant"
        )
        return None
    return path.absolute()


def read_table(path: Path) -> dict[str, Any]:
    """The content of a settings file. Raises SettingsError, in one line, for one that is not TOML."""
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError("settings file", str(path), f"a readable file ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        text = " ".join(str(error).split())
        raise SettingsError("settings file", str(path), f"TOML in UTF-8 ({text})") from None
    return table
