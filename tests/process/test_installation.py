"""NVIDIA's `kvbm` beside ours: one folder, two owners. What runs then is refused, from whichever side it is entered."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from openkvbm.installation import REPAIR, MixedInstallation, other_copy, problem, shadow, site_of_this
from rigs.checkout import CONFIGURATION, PROJECT, ROOT

Files = dict[str, bytes]

COMMAND = "from openkvbm.entry import main; main()"
PLUGIN = "from openkvbm.entry import register; register(); register(); "
IMPORT = "import kvbm; print(kvbm.__version__); import kvbm.hashing"
ENGINE = PLUGIN + "import kvbm.vllm_integration.connector"

THEIRS: Files = {
    "kvbm/__init__.py": b"print('this is NVIDIA')\n__version__ = '1.6.1'\n",
    "kvbm/_core.abi3.so": b"\x7fELF",
    "kvbm/utils.py": b"",
    "kvbm/vllm_integration/__init__.py": b"",
    "kvbm/vllm_integration/connector_leader.py": b"",
    "kvbm/vllm_integration/connector/__init__.py": b"print('this is NVIDIA')",
    "kvbm/vllm_integration/connector/dynamo_connector.py": b"",
    "kvbm/vllm_integration/connector/pd_connector.py": b"",
}
"""As in the wheel of kvbm 1.6.1: all of these paths but one are ours too."""


def ours() -> Files:
    """The content of our wheel: the folders that pyproject.toml names."""
    build = CONFIGURATION["tool"]["hatch"]["build"]["targets"]["wheel"]
    return {
        path.relative_to(ROOT / "src").as_posix(): path.read_bytes()
        for folder in build["packages"]
        for path in (ROOT / folder).rglob("*.py*")
        if path.suffix in (".py", ".pyi") and "__pycache__" not in path.parts
    }


def install(site: Path, distribution: str, files: Files) -> None:
    """As pip does: files that are there are overwritten, and who installed what stands in RECORD."""
    rows = []
    for name, content in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(content)}")
        if path.suffix == ".py":
            rows.append(f"{name.rpartition('/')[0]}/__pycache__/{path.stem}.cpython-311.pyc,,")
    info = site / f"{distribution}-1.6.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.6.1\n")
    (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,", ""]))


def uninstall(site: Path, distribution: str) -> None:
    """As pip does: every file in RECORD goes, whosever it is by now."""
    info = site / f"{distribution}-1.6.1.dist-info"
    for row in (info / "RECORD").read_text().splitlines():
        (site / row.split(",")[0]).unlink(missing_ok=True)
    shutil.rmtree(info)


def run(site: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A Python that sees this folder before every other one."""
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"},
        cwd=site,
        capture_output=True,
        text=True,
        timeout=60,
    )


def assert_refused(site: Path, *programs: str, repair: str = REPAIR) -> None:
    """Each says what to do, in one line of its own, and runs nothing of NVIDIA's."""
    for program in programs:
        answer = run(site, program, "--version")
        assert answer.returncode != 0, (program, answer.stdout)
        assert "this is NVIDIA" not in answer.stdout
        assert repair in answer.stderr.splitlines()[-1], answer.stderr
        if program == COMMAND:
            assert answer.returncode == 2
            assert answer.stderr.count("\n") == 1


@pytest.fixture
def site(tmp_path: Path) -> Path:
    path = tmp_path / "site-packages"
    path.mkdir()
    return path


def test_ours_alone_works(site: Path) -> None:
    install(site, "openkvbm", ours())
    assert problem(str(site)) == ""
    answer = run(site, COMMAND, "--version")
    assert (answer.returncode, answer.stdout) == (0, "kvbm 1.6.1\n"), answer.stderr
    answer = run(site, IMPORT)
    assert answer.returncode == 0, answer.stderr


def test_theirs_installed_after_ours(site: Path) -> None:
    """`pip install kvbm`, and `import kvbm` is NVIDIA's: command and plug-in notice."""
    install(site, "openkvbm", ours())
    install(site, "kvbm", THEIRS)
    assert "have 7 files (kvbm/__init__.py, …) in common" in problem(str(site))
    assert problem(str(site), read_files=False) == problem(str(site))
    assert_refused(site, COMMAND, ENGINE)


def test_ours_installed_after_theirs(site: Path) -> None:
    """`import kvbm` is ours, among files of NVIDIA's: it notices too."""
    install(site, "kvbm", THEIRS)
    install(site, "openkvbm", ours())
    assert_refused(site, COMMAND, ENGINE, IMPORT)


def test_theirs_removed_again(site: Path) -> None:
    """It took the files that both had with it."""
    install(site, "openkvbm", ours())
    install(site, "kvbm", THEIRS)
    uninstall(site, "kvbm")
    assert f"(kvbm/__init__.py, …) of openkvbm in {site} are missing or were changed" in problem(str(site))
    assert_refused(site, COMMAND, ENGINE)
    install_again = {name: content for name, content in ours().items() if name == "kvbm/__init__.py"}
    (site / "kvbm/__init__.py").write_bytes(install_again["kvbm/__init__.py"])
    assert_refused(site, IMPORT)


def test_theirs_without_its_record(site: Path) -> None:
    """Then a file's content is all that tells."""
    install(site, "openkvbm", ours())
    install(site, "kvbm", THEIRS)
    shutil.rmtree(site / "kvbm-1.6.1.dist-info")
    assert problem(str(site), read_files=False) == ""
    assert "7 files (kvbm/__init__.py, …) of openkvbm" in problem(str(site))
    assert_refused(site, COMMAND, ENGINE)


def test_what_it_says_mends_it(site: Path) -> None:
    install(site, "openkvbm", ours())
    install(site, "kvbm", THEIRS)
    assert "pip uninstall -y kvbm openkvbm, then install openkvbm again" in REPAIR
    assert "pip install openkvbm" not in REPAIR, "where it is on no index, that finds nothing"
    for distribution in ("kvbm", "openkvbm"):
        uninstall(site, distribution)
    install(site, "openkvbm", ours())
    assert problem(str(site)) == ""
    assert run(site, IMPORT).returncode == 0


def test_a_vllm_that_does_not_use_us_goes_on(site: Path) -> None:
    """The plug-in runs in every vLLM of the environment."""
    install(site, "openkvbm", ours())
    install(site, "kvbm", THEIRS)
    answer = run(site, PLUGIN + "import json, html; print('serves')")
    assert answer.returncode == 0
    assert answer.stdout == "serves\n"
    assert answer.stderr.count(REPAIR) == 1


def test_distributions_that_share_no_file_are_fine(site: Path) -> None:
    install(site, "openkvbm", ours())
    install(site, "kvbm", {"kvbm/only_theirs.py": b"", "kvbm_extra/__init__.py": b""})
    assert problem(str(site)) == ""


def test_an_editable_installation_is_fine(site: Path) -> None:
    """Its RECORD names the command and a path file; so did the one that was called kvbm."""
    for distribution in ("openkvbm", "kvbm"):
        install(site, distribution, {f"_editable_impl_{distribution}.pth": b"", "../bin/kvbm": b"#!"})
    assert problem(str(site)) == ""


def test_this_checkout_is_fine() -> None:
    assert site_of_this() == str(ROOT / "src")
    assert problem(site_of_this()) == ""
    assert shadow(site_of_this()) == ""
    assert other_copy(site_of_this()) == ""


def test_a_package_of_a_linux_distribution_is_fine(site: Path) -> None:
    """It has no RECORD."""
    install(site, "openkvbm", ours())
    (site / "openkvbm-1.6.1.dist-info" / "RECORD").unlink()
    (site / "kvbm" / "hashing.py").unlink()
    assert problem(str(site)) == ""
    assert problem(str(site / "absent")) == ""


def test_modules_without_their_source_are_fine(site: Path) -> None:
    install(site, "openkvbm", ours())
    hashing = site / "kvbm" / "hashing.py"
    hashing.rename(hashing.with_suffix(".pyc"))
    assert problem(str(site)) == ""
    hashing.with_suffix(".pyc").unlink()
    assert f"1 file (kvbm/hashing.py) of openkvbm in {site} is missing or was changed" in problem(str(site))


def test_theirs_found_before_an_editable_one(site: Path) -> None:
    """Nothing is mixed, and yet `import kvbm` is NVIDIA's."""
    install(site, "kvbm", THEIRS)
    shutil.copytree(ROOT / "src" / "openkvbm", site.parent / "src" / "openkvbm")
    shutil.copytree(ROOT / "src" / "kvbm", site.parent / "src" / "kvbm")
    later = f"import sys; sys.path.append({str(site.parent / 'src')!r}); "
    for program in (COMMAND, ENGINE):
        answer = run(site, later + program, "--version")
        assert answer.returncode != 0
        assert "this is NVIDIA" not in answer.stdout
        assert f"`import kvbm` finds {site}/kvbm/__init__.py" in answer.stderr.splitlines()[-1]
        assert answer.stderr.splitlines()[-1].endswith("Repair it with: pip uninstall -y kvbm")


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A folder that PYTHONPATH puts before the one that ours is installed in."""
    path = tmp_path / "first"
    path.mkdir()
    return path


def run_after(first: Path, site: Path, program: str) -> subprocess.CompletedProcess[str]:
    """With `openkvbm` from the second folder and `kvbm` from the first, where it has one."""
    return run(
        site, f"import openkvbm.entry, sys; sys.path.insert(0, {str(first)!r}); {program}", "--version"
    )


@pytest.mark.slow
def test_a_checkout_that_is_found_first_is_used_and_said_once(site: Path, first: Path) -> None:
    install(site, "openkvbm", ours())
    shutil.copytree(ROOT / "src" / "kvbm", first / "kvbm")
    expected = f"PYTHONPATH (sys.path) puts {first} first: `kvbm` is taken from there, not from {site}"
    answer = run_after(first, site, COMMAND)
    assert (answer.returncode, answer.stderr) == (0, f"kvbm: {expected}\n")
    answer = run_after(first, site, PLUGIN + "import kvbm; print(kvbm.__file__)")
    assert (answer.returncode, answer.stdout) == (0, f"{first}/kvbm/__init__.py\n"), answer.stderr
    assert answer.stderr.count(expected) == 1
    answer = run(site, COMMAND, "--version")
    assert (answer.returncode, answer.stderr) == (0, "")


def test_a_mixture_that_is_found_first_is_refused(site: Path, first: Path) -> None:
    install(site, "openkvbm", ours())
    install(first, "kvbm", THEIRS)
    install(first, "openkvbm", {name: content for name, content in ours().items() if name[:5] == "kvbm/"})
    answer = run_after(first, site, COMMAND)
    assert answer.returncode == 2
    assert answer.stderr.startswith(f"kvbm: openkvbm and NVIDIA's kvbm are both installed in {first} ")
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["kvbm.py", "kvbm/__init__.py"])
def test_what_nobody_installed_is_not_to_be_uninstalled(site: Path, first: Path, name: str) -> None:
    """Something of that name that no distribution put there: it is in the way, and pip knows nothing of it."""
    install(site, "openkvbm", ours())
    (first / name).parent.mkdir(exist_ok=True)
    (first / name).write_text("print('this is NVIDIA')")
    for program in (COMMAND, ENGINE):
        answer = run_after(first, site, program)
        assert answer.returncode != 0
        assert "this is NVIDIA" not in answer.stdout
        last = answer.stderr.splitlines()[-1]
        assert f"`import kvbm` finds {first / name}, which is not openkvbm's" in last
        assert last.endswith(f"Take {first} from PYTHONPATH (sys.path), or give what lies there another name")


def test_the_error_is_one_of_importing() -> None:
    assert issubclass(MixedInstallation, ImportError)


def test_nobody_is_told_to_install_theirs() -> None:
    """The name `kvbm` on PyPI is NVIDIA's."""
    assert PROJECT["name"] == "openkvbm"
    texts = [
        path
        for folder in ("src", "docs", "scripts", "examples", "tests")
        for path in (ROOT / folder).rglob("*")
    ]
    words = ("pip install kvbm", "pip install 'kvbm", 'pip install "kvbm', "`kvbm[", "'kvbm[", '"kvbm[')
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in [*texts, ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
        if path.suffix in (".py", ".md", ".toml") and path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if any(word in line for word in words) and "not `pip install kvbm`" not in line
    ]
    assert wrong == []
