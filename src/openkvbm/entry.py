"""The entry points: the `kvbm` command and the engines' plug-ins. All first check that the files of `kvbm` are ours."""

from __future__ import annotations

import logging
import sys
from importlib.machinery import ModuleSpec

from openkvbm.installation import MixedInstallation, other_copy, problem, shadow, site_of_this

log = logging.getLogger("openkvbm")
_logged: set[str] = set()

ERROR_EXIT_CODE = 2


def main() -> None:
    """The `kvbm` command. Exits with 2 and one line if the files are not ours."""
    line = _line()
    if line:
        print(f"kvbm: {line}", file=sys.stderr)
        sys.exit(ERROR_EXIT_CODE)
    remark = other_copy(site_of_this())
    if remark:
        print(f"kvbm: {remark}", file=sys.stderr)
    from kvbm.cli.main import main as run

    run()


def register() -> None:
    """The entry point `vllm.general_plugins`, called in every process of vLLM, with or without KVBM.

    So a mixed installation must not end vLLM: the line is logged, and only the import of `kvbm` fails with it, which
    ends an engine that asks for a connector of `kvbm`.
    """
    if _sound():
        from kvbm.vllm_integration.plugin import register as register_connectors

        register_connectors()


def register_sglang() -> None:
    """The entry point `sglang.srt.plugins`, called in every process of SGLang, with or without KVBM."""
    if _sound():
        from kvbm.sglang_integration.plugin import register as watch_weights

        watch_weights()


def _sound() -> bool:
    """Whether the files are ours; if not, the line is logged, once, and no module of `kvbm` can be imported."""
    if any(isinstance(finder, _Refusal) for finder in sys.meta_path):
        return False  # plug-ins may be loaded several times
    line = _line()
    if line:
        log.error("%s", line)
        sys.meta_path.insert(0, _Refusal(line))
        return False
    remark = other_copy(site_of_this())
    if remark and remark not in _logged:
        _logged.add(remark)
        log.warning("%s", remark)
    return True


def _line() -> str:
    site = site_of_this()
    return problem(site) or shadow(site)


class _Refusal:
    """A finder of modules that raises an error for every module in `kvbm`."""

    def __init__(self, line: str) -> None:
        self._line = line

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Raises MixedInstallation, or leaves the name to the next finder."""
        if name.partition(".")[0] == "kvbm":
            raise MixedInstallation(self._line)
        return None
