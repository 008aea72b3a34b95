"""Documents say what the code and the committed results say: nobody edits the generated parts by hand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from devipc.conformance import cases
from docs import generate

ROOT = Path(__file__).resolve().parents[2]


def test_documents_have_generated_parts() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in generate.documents()}
    assert {"README.md", "docs/certifying.md", "docs/verified.md"} <= found


@pytest.mark.parametrize("path", generate.documents(), ids=lambda path: path.name)
def test_generated_parts_are_fresh(path: Path) -> None:
    text = path.read_text()
    assert generate.renewed(text, path.parent) == text, "run `python docs/generate.py`, and commit what it writes"


def test_every_case_is_in_the_table() -> None:
    text = (ROOT / "docs/certifying.md").read_text()
    for case in cases():
        assert text.count(f"| `{case.id}` | {case.demand}") == 1, case.id


def test_the_options_are_those_of_the_command() -> None:
    shown = (ROOT / "docs/certifying.md").read_text()
    command = [str(Path(sys.executable).with_name("devipc")), "conformance", "run", "--help"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stdout
    assert printed.strip() in shown


def test_committed_results_are_good() -> None:
    found = generate.runs()
    assert len(found) >= 2, "no backend was found"
    runs = [run for each in found.values() for run in each]
    assert runs
    for run in runs:
        assert run.good, run.troubles()
        assert run.driver, run.path
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", run.date)
        assert all(run.skips().values()), "a skip without a reason"
