"""Runs the examples of the documents, and looks for dead links and for traces of the machine they were written on."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)]
)

BLOCK = re.compile(r"^```(?P<language>python|console)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)(?P<target>[^)#\s]+)")
TEST = re.compile(r"`(?P<file>[\w/]+\.py)::(?P<name>test_\w+)`")
MACHINE_PATH = re.compile(r"(?<![\w.~])/(?:work|root|home|tmp)/")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".c", ".h", ".json", ".yml", ".yaml", ""}


@dataclass(frozen=True, slots=True)
class Example:
    """One code block and where it stands."""

    where: str
    language: str
    text: str


def _examples() -> Iterator[Example]:
    for path in DOCUMENTS:
        text = path.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield Example(f"{path.relative_to(ROOT)}:{line}", match["language"], match["text"])


EXAMPLES = list(_examples())


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.language == "python"], ids=lambda example: example.where)
def test_python_blocks_run(example: Example, tmp_path: Path) -> None:
    """Each block is a whole program: it is written to a file, since it may spawn itself."""
    if re.search(r"^import torch$", example.text, re.MULTILINE):
        pytest.importorskip("torch", reason="this example needs torch")
    program = tmp_path / "example.py"
    program.write_text(example.text)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stdout + done.stderr


DEVIPC_COMMANDS = [
    (example.where, line.removeprefix("$ ").strip())
    for example in EXAMPLES
    if example.language == "console"
    for line in example.text.splitlines()
    if line.startswith("$ devipc ")
]


@pytest.mark.parametrize(("where", "command"), DEVIPC_COMMANDS)
def test_commands_run(where: str, command: str, tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("devipc")
    done = subprocess.run(
        [str(script), *shlex.split(command)[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, f"{where}: {done.stdout}{done.stderr}"


def test_tests_named_in_documents_exist() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), match["file"], match["name"])
        for path in DOCUMENTS
        for match in TEST.finditer(path.read_text())
    }
    assert len(named) > 20
    missing = [
        f"{document}: {file}::{name}"
        for document, file, name in sorted(named)
        if not (ROOT / file).is_file() or not re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
    ]
    assert not missing, "\n".join(missing)


def test_make_targets_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {target for path in DOCUMENTS for target in re.findall(r"(?:`|\$ )make ([a-z]+)", path.read_text())}
    assert used
    assert used <= targets


def test_links_lead_somewhere() -> None:
    dead = [
        f"{path.relative_to(ROOT)}: {match['target']}"
        for path in DOCUMENTS
        for match in LINK.finditer(path.read_text())
        if not (path.parent / match["target"]).exists()
    ]
    assert not dead


def test_no_file_speaks_of_one_machine() -> None:
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    ).stdout.split("\0")
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in names
        if name and (ROOT / name).is_file() and (ROOT / name).suffix in TEXT_SUFFIXES
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert len(names) > 20
    assert not found, "\n".join(found)
