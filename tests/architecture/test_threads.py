"""A thread that cannot be had is an error that says what to do, or somebody else does its work."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.sources import python

_PROGRAMS = ("devipc/cli/", "devipc/bench/", "devipc/conformance/")
_KNOWN = {
    "devipc/channel/liveness.py:_held_page",  # its caller says that the platform lacks it
    "devipc/hicache/engineproc/process.py:_on_stop",  # the supervisor ends what does not answer
    "devipc/session/borrowing.py:give_back",
}
"""Where nothing else can be done, or nothing better is known yet."""


def test_whoever_starts_a_thread_knows_that_there_may_be_none() -> None:
    found = {
        f"{source.name}:{name}"
        for source in python("devipc", "backends")
        if not source.name.startswith(_PROGRAMS) and "/tests/" not in source.name and "testing/" not in source.name
        for name in _unguarded(source.tree, _threads(source.tree), "")
    }
    assert found == _KNOWN


def _makes_thread(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("threading.Thread", "threading.Timer")


def _threads(tree: ast.Module) -> set[str]:
    """Return what threads are assigned to, as it is spelled."""
    return {
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _makes_thread(node.value)
        for target in node.targets
    }


def _unguarded(node: ast.AST, threads: set[str], name: str) -> Iterator[str]:
    """Yield the names of functions that start one of these, and no RuntimeError is caught."""
    if isinstance(node, ast.FunctionDef):
        name = node.name
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "start":
        started = node.func.value
        if _makes_thread(started) or ast.unparse(started) in threads:
            yield name
    guarded = isinstance(node, ast.Try | ast.With) and any(
        "RuntimeError" in ast.unparse(one)
        for one in ([each.type for each in node.handlers if each.type] if isinstance(node, ast.Try) else node.items)
    )
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not (guarded and field == "body"):
                yield from _unguarded(child, threads, name)
