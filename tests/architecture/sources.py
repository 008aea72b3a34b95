"""The Python and C sources of the project, parsed once; what the rules of this folder look at.

Knows where sources live, and no rule.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = ("devipc", "backends", "tests", "benchmarks", "docs")

_SKIPPED = {"__pycache__", "_build", ".cache", ".mypy_cache", "build", "dist"}


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        """Dotted name as an import would spell it, for files of the core and of a vendor package."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        if parts[0] == "backends":
            parts = parts[2:]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """What a relative import starts from."""
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]


def files(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in suffixes and not _SKIPPED.intersection(path.relative_to(ROOT).parts):
                yield path


@cache
def python(*folders: str) -> tuple[Source, ...]:
    return tuple(_parse(path) for path in files(*folders))


@cache
def _parse(path: Path) -> Source:
    text = path.read_text()
    return Source(path, text, ast.parse(text, filename=str(path)))


def vendor_sources() -> tuple[Source, ...]:
    """The importable part of every vendor package, tests excluded."""
    return tuple(
        source for source in python("backends") if source.path.relative_to(ROOT).parts[2].startswith("devipc_")
    )


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """Yield ``(line, dotted name)`` for every import, at any depth; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = source.package.split(".")
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
