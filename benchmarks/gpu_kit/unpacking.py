"""Bring the parts together again, on a machine that has Python and nothing else. Standard library only."""

from __future__ import annotations

import json
import lzma
import sys
import tarfile
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.building import MANIFEST, Refused, read_manifest

READ_BYTES = 1 << 20


class Site:
    """The unpacked parts below the kit's folder: `site` with the modules, `parts` with what is there."""

    def __init__(self, folder: Path) -> None:
        self.modules = folder / "site"
        self._parts = folder / "parts"

    def parts(self) -> list[dict[str, Any]]:
        """The manifests of the parts that are there, whole."""
        return [json.loads(path.read_text()) for path in sorted(self._parts.glob("*.json"))]

    def missing(self) -> list[str]:
        """The names of the parts that are not there. Of a kit without any part: `any`."""
        there = self.parts()
        if not there:
            return ["any"]
        names = {manifest["part"] for manifest in there}
        return [name for name in there[0]["parts"] if name not in names]

    def mode(self) -> str:
        """`cuda`, or `cpu` for a rehearsal; empty while nothing is unpacked."""
        there = self.parts()
        return str(there[0]["mode"]) if there else ""

    def unpack(self, part: Path) -> str:
        """Unpack one part, unless it is there already; returns a line that says so.

        Raises Refused for something that is no part, is damaged, or is of another kit or another Python.
        """
        manifest = read_manifest(part)
        if manifest is None:
            raise Refused(
                f"{part}: no part of a kit, or cut short (make gpu-kit writes build/gpu-kit/part-*.tar.xz)"
            )
        if tuple(manifest["python"]) != sys.version_info[:2]:
            wanted, here = ".".join(map(str, manifest["python"])), ".".join(map(str, sys.version_info[:2]))
            raise Refused(f"{part.name}: its modules are for Python {wanted}; this is {here}")
        for other in self.parts():
            if other["kit"] != manifest["kit"]:
                raise Refused(
                    f"{part.name} is of kit {manifest['kit']}, and {self.modules.parent} holds kit {other['kit']}:"
                    " remove that folder"
                )
        marker = self._parts / f"{manifest['part']}.json"
        if marker.exists():
            return f"{part.name}: was there"
        count = self._extract(part)
        # Written last: a part counts when it is whole.
        self._parts.mkdir(parents=True, exist_ok=True)
        marker.write_text(json.dumps(manifest))
        return f"{part.name}: {count} files"

    def _extract(self, part: Path) -> int:
        self.modules.mkdir(parents=True, exist_ok=True)
        count = 0
        try:
            with lzma.open(part) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
                for member in archive:
                    if member.name != MANIFEST:
                        archive.extract(member, self.modules, filter="data")
                        count += 1
                # To the very end, where the last checksum is.
                while stream.read(READ_BYTES):
                    pass
        except (EOFError, tarfile.TarError, lzma.LZMAError) as error:
            raise Refused(f"{part}: damaged ({type(error).__name__}: {error}): carry it again") from error
        return count
