"""Handlers of any exception notice it on every path: a test that runs into a defect behind one must fail."""

from __future__ import annotations

import ast

import pytest

from rigs.checkout import ROOT
from rigs.sources import Violations, assert_none, parse, python_files, violations

BROAD = {"Exception", "BaseException", "RuntimeError"}
"""Kinds that a defect of ours has too; torch raises RuntimeError for every error of a device."""
NOTICES = {
    "record_swallowed", "warning", "error", "exception", "critical", "log_failure", "log_refusal", "set_exception",
    "exit",
}  # fmt: skip
"""Calls by which an error is noticed: it is recorded, logged at warning or above, passed on to a future, or it ends the
process."""
RAISED_LATER = {"kvbm/library/layer_load.py": "the error is raised once all copies have ended"}
"""Files with a handler that keeps its error, and why."""


def swallowed_errors(path: str, source: str) -> Violations:
    """Handlers of any exception that a test would not notice (`kvbm.strict`)."""
    for node in ast.walk(parse(source)):
        broad = isinstance(node, ast.ExceptHandler) and is_broad(node.type) and path not in RAISED_LATER
        if broad and unnoticed_ends(node.body):
            yield f"{path}:{node.lineno}: raise, warn, call record_swallowed, or name the exceptions that are expected"
        suppresses = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "suppress"
        if suppresses and any(map(is_broad, node.args)):
            yield f"{path}:{node.lineno}: {ast.unparse(node)}; name the exceptions that are expected"


def is_broad(kind: ast.expr | None) -> bool:
    """Whether `except kind` catches any exception, a defect of ours too."""
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(each is None or ast.unparse(each) in BROAD for each in kinds)


def unnoticed_ends(body: list[ast.stmt]) -> set[str]:
    """How control can get out of a handler's statements with the error unnoticed: it `falls` through, or `leaves`."""
    ends: set[str] = set()
    for statement in body:
        here = unnoticed_ends_of(statement)
        ends |= here - {"falls"}
        if "falls" not in here:
            return ends
    return ends | {"falls"}


def unnoticed_ends_of(statement: ast.stmt) -> set[str]:
    """See `unnoticed_ends`. Errors that the handler tells apart as expected need no notice."""
    if isinstance(statement, ast.If):
        otherwise = set() if is_unexpected(statement.test) else unnoticed_ends(statement.orelse)
        return unnoticed_ends(statement.body) | otherwise
    if isinstance(statement, ast.With):
        return unnoticed_ends(statement.body)
    if isinstance(statement, ast.Try):
        handled = [unnoticed_ends(handler.body) for handler in statement.handlers]
        return unnoticed_ends(statement.finalbody) and unnoticed_ends(statement.body).union(*handled)
    if isinstance(statement, ast.For | ast.While):
        return {"falls"} | unnoticed_ends(statement.body)
    if isinstance(statement, ast.FunctionDef):
        return {"falls"}
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    if isinstance(statement, ast.Raise) or NOTICES & set(map(called_name, calls)):
        return set()
    return {"leaves"} if isinstance(statement, ast.Return | ast.Continue | ast.Break) else {"falls"}


def is_unexpected(test: ast.expr) -> bool:
    """Whether a test is `not isinstance(error, EXPECTED)`, or the same by a function `is_…`."""
    call = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else None
    if not isinstance(call, ast.Call):
        return False
    kinds = call.args[1:] if called_name(call) == "isinstance" else []
    return called_name(call).startswith(("is_", "isinstance")) and not any(map(is_broad, kinds))


def called_name(call: ast.Call) -> str:
    return ast.unparse(call.func).split(".")[-1].lstrip("_")


def test_the_library_swallows_no_error() -> None:
    assert_none(violations(swallowed_errors, python_files("src"), ROOT / "src"))


HANDLED = "def load():\n try: read()\n except Exception as error:\n  "


@pytest.mark.parametrize(
    "source",
    [
        "try: load()\nexcept Exception: log.debug('no')\n",
        "try: load()\nexcept (OSError, Exception): pass\n",
        "try: load()\nexcept (OSError, RuntimeError): pass\n",
        "try: load()\nexcept BaseException as error: keep(error)\n",
        "try: load()\nexcept: pass\n",
        "with contextlib.suppress(OSError, Exception): load()\n",
        HANDLED + "if x: raise\n",
        HANDLED + "if x: raise\n  else: end()\n",
        HANDLED + "if x: return\n  raise\n",
        HANDLED + "if not hasattr(error, 'text'): raise\n",
        HANDLED + "if not isinstance(error, RuntimeError): raise\n",
        HANDLED + "if isinstance(error, OSError): raise\n",
        HANDLED + "for x in y: log.warning('no')\n",
        HANDLED + "for x in y: return\n  raise\n",
        HANDLED + "try: end()\n  except OSError: return\n  raise\n",
    ],
)
def test_an_error_that_is_swallowed_is_found(source: str) -> None:
    assert list(swallowed_errors("kvbm/a.py", source))


@pytest.mark.parametrize(
    "source",
    [
        "try: load()\nexcept Exception as error: record_swallowed(error)\n",
        "try: load()\nexcept Exception: log.exception('no')\n",
        "try: load()\nexcept BaseException:\n    close()\n    raise\n",
        "try: load()\nexcept OSError: pass\n",
        "with contextlib.suppress(OSError): load()\n",
        HANDLED + "if x: raise\n  else: log.error('no')\n",
        HANDLED + "if x: end()\n  raise\n",
        HANDLED + "if not isinstance(error, OSError): raise\n",
        HANDLED + "with x: raise\n",
        HANDLED + "try: end()\n  finally: log.error('no')\n",
        HANDLED + "future.set_exception(error)\n",
    ],
)
def test_an_error_that_is_noticed_is_not_reported(source: str) -> None:
    assert list(swallowed_errors("kvbm/a.py", source)) == []
