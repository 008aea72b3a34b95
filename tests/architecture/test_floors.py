"""Who may import whom, who may be named where, and what may not be used at all."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT, Source, files, imports, python, vendor_sources

# For the short names a letter on either side makes another word ("chip", "intelligent"); a digit or "_" does not.
VENDOR = re.compile(r"cuda|rocm|level.?zero|nvidia|amdhip|(?<![a-z])(lib)?(hip|amd|intel)(?![a-z])", re.IGNORECASE)
VENDOR_ALLOWED = ("devipc/integrations/", "devipc/cli/", "devipc/hicache/reference/")

FORBIDDEN_IMPORTS = re.compile(
    r"(pickle|cPickle|_pickle|dill|cloudpickle|marshal|shelve)(\..*)?|multiprocessing\.shared_memory(\..*)?|"
    r"socket\.(recv_fds|send_fds)"
)
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {"recv_fds", "send_fds", "shared_memory", "load_setuptools_entrypoints"}


def test_import_linter_contracts_hold() -> None:
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", command, "--no-cache", "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def leaves_the_spi(source: Source) -> list[str]:
    own = source.module.split(".")[0] if source.module.startswith("devipc_") else ".".join(source.module.split(".")[:2])
    found = []
    for line, name in imports(source):
        top = name.split(".")[0]
        ours = top == "devipc" or top.startswith("devipc_")
        if ours and not re.match(rf"({re.escape(own)}|devipc\.spi)(\.|$)", name):
            found.append(f"{source.name}:{line} imports {name}")
    return found


def test_the_built_in_backend_imports_only_the_spi() -> None:
    sources = python("devipc/host")
    assert sources
    assert not [problem for source in sources for problem in leaves_the_spi(source)]


def test_vendor_packages_import_only_the_spi() -> None:
    sources = vendor_sources()
    assert bool(sources) == any((ROOT / "backends").glob("*/pyproject.toml"))
    assert not [problem for source in sources for problem in leaves_the_spi(source)]


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("from devipc.spi import Backend", False),
        ("from devipc import spi", False),
        ("import devipc.spi as spi", False),
        ("from devipc_x.driver import call", False),
        ("from .driver import call", False),
        ("import devipc", True),
        ("from devipc import errors", True),
        ("def f():\n    from devipc.errors import UsageError", True),
        ("import devipc.spies", True),
        ("from devipc_y import plugin", True),
    ],
)
def test_the_spi_rule_sees(code: str, *, wrong: bool) -> None:
    path = ROOT / "backends" / "x" / "devipc_x" / "memory.py"
    assert bool(leaves_the_spi(Source(path, code, ast.parse(code)))) is wrong


def test_core_names_no_vendor() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files("devipc", suffixes=(".py", ".pyi", ".json", ".toml", ".md", ".txt"))
        if not path.relative_to(ROOT).as_posix().startswith(VENDOR_ALLOWED)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if VENDOR.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("cuda", True),
        ("libcuda.so", True),
        ("devipc_hip", True),
        ("CUDA12", True),
        ("Level Zero", True),
        ("levelzero", True),
        ("chip, ship, whip", False),
        ("intelligent", False),
    ],
)
def test_the_vendor_rule_sees(text: str, *, named: bool) -> None:
    assert bool(VENDOR.search(text)) is named


def test_nothing_unsafe_is_used() -> None:
    found = []
    for source in (*python("devipc"), *vendor_sources()):
        found += [f"{source.name}:{line} {name}" for line, name in imports(source) if FORBIDDEN_IMPORTS.fullmatch(name)]
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_ATTRIBUTES:
                found.append(f"{source.name}:{node.lineno} .{node.attr}")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                found.append(f"{source.name}:{node.lineno} {node.func.id}()")
    assert not found, "\n".join(found)
