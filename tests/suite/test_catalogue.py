"""The catalogue: ids that stay, one sentence each, and clauses that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import devipc
from devipc.conformance import Case, case, cases

PACKAGE = Path(devipc.__file__).parent


def test_there_are_enough_cases_and_each_is_documented() -> None:
    known = cases()
    assert len(known) >= 60
    assert len({one.id for one in known}) == len(known)
    assert len({one.demand for one in known}) == len(known)
    assert [one.id for one in known] == sorted(one.id for one in known)
    for one in known:
        file, _, subject = one.clause.partition(": ")
        assert (PACKAGE / file).is_file(), one
        names = [name.strip() for name in subject.replace(",", ".").split(".")]
        text = (PACKAGE / file).read_text()
        assert all(name in text for name in names), f"{one.id}: {one.clause}"


def test_every_test_of_the_package_is_a_case() -> None:
    found = set()
    for path in sorted((PACKAGE / "conformance").glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert any(isinstance(one, ast.Call) for one in node.decorator_list), f"{path.name}: {node.name}"
                found.add(node.name)
    assert len(found) == len(cases())


@pytest.mark.parametrize(
    ("identity", "demand", "clause"),
    [
        ("mem-1", "It is so.", "spi.py: close_fds"),
        ("MEM-0111", "It is so.", "spi.py: close_fds"),
        ("OWN-950", "no sentence", "spi.py: close_fds"),
        ("OWN-950", "It is so.", "somewhere"),
    ],
)
def test_malformed_cases_are_refused(identity: str, demand: str, clause: str) -> None:
    with pytest.raises(ValueError, match=identity):
        case(identity, demand, clause=clause)


def test_an_id_is_given_once() -> None:
    cases()
    with pytest.raises(ValueError, match="MEM-011 is both"):

        @case("MEM-011", "It is something else.", clause="spi.py: close_fds")
        def other(folder: Path) -> Case:
            raise AssertionError(folder)
