"""Size and documentation of files, functions and public names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.architecture.sources import CODE_FOLDERS, ROOT, Source, files, python, vendor_sources

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def test_no_file_is_long() -> None:
    sizes = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in files(*CODE_FOLDERS, suffixes=(".py", ".c", ".h"))
    }
    assert len(sizes) > 10
    assert not {name: lines for name, lines in sizes.items() if lines > MAX_FILE_LINES}


def test_no_function_is_long() -> None:
    found = [
        f"{source.name}:{node.lineno} {node.name}: {lines} lines"
        for source in python(*CODE_FOLDERS)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := _code_lines(node)) > MAX_FUNCTION_LINES
    ]
    assert not found, "\n".join(found)


def _code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end; a long docstring is no long function."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def test_every_file_opens_with_a_paragraph() -> None:
    missing = [s.name for s in python(*CODE_FOLDERS) if s.tree.body and not ast.get_docstring(s.tree)]
    assert not missing


def exported(source: Source) -> list[str]:
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def undocumented(source: Source) -> Iterator[str]:
    """Yield what is in ``__all__``, defined in this file, and explained nowhere."""
    names = set(exported(source))
    body = source.tree.body
    for node, following in pairwise([*body, ast.Pass()]):
        if isinstance(node, Definition) and node.name in names and not ast.get_docstring(node):
            yield node.name
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and target.id in names - {"__all__"} and not _is_text(following):
                yield target.id


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_public_names_are_documented() -> None:
    sources = (*python("devipc"), *vendor_sources())
    missing = [f"{source.name}: {name}" for source in sources for name in undocumented(source)]
    assert not missing, "\n".join(missing)


def test_public_modules_say_what_is_public() -> None:
    """A file without ``__all__`` would escape the rule above."""
    missing = [
        source.name
        for source in (*python("devipc"), *vendor_sources())
        # Cases of the conformance suite are explained where they are declared; tests/suite checks that.
        if not source.path.name.startswith("test_")
        and not exported(source)
        and any(_public(node) for node in source.tree.body)
    ]
    assert not missing


def _public(node: ast.stmt) -> bool:
    return isinstance(node, Definition) and not node.name.startswith("_")


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ('__all__ = ["f"]\ndef f(): "Text."', []),
        ('__all__ = ["f"]\ndef f(): ...', ["f"]),
        ('__all__ = ["A"]\nA = 1\n"""Text."""', []),
        ('__all__ = ["A"]\nA: int = 1\nB = 2', ["A"]),
        ('__all__ = ["A"]\nfrom x import A', []),
        ("def f(): ...", []),
    ],
)
def test_the_documentation_rule_sees(code: str, missing: list[str]) -> None:
    assert list(undocumented(Source(ROOT / "devipc" / "x.py", code, ast.parse(code)))) == missing
