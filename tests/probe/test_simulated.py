"""What the probe says of simulated drivers and their faults: the tables of ``docs/cli/faults.md`` are expected."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.probe.tool import ROOT, environment, probe, verdicts
from tests.simulator import build, control
from tests.simulator.needs import need

pytestmark = pytest.mark.simulator
PAGE = (ROOT / "docs" / "cli" / "faults.md").read_text()
SWITCHES = re.findall(r"^SWITCH\((\w+),", (build.HERE / "core" / "switches.def").read_text(), re.MULTILINE)
FINDS_ITS_DRIVER_BY = {"cuda": "LD_LIBRARY_PATH", "hip": "ROCM_PATH", "levelzero": "LD_LIBRARY_PATH"}
HIP_RUNTIME = "71500000"
TIMEOUT_S = 5


@dataclass(frozen=True, slots=True)
class Case:
    """One setting of one row of a table."""

    front: str
    setting: str
    found: dict[str, str]
    code: int

    def __str__(self) -> str:
        return f"{self.front}-{self.setting}"


def cases() -> Iterator[Case]:
    for section in PAGE.split("\n## ")[1:]:
        front = section.split()[0].strip("`")
        for settings, found, code in re.findall(r"^\| (`.*?`) \| (.*?) \| (\d) \|$", section, re.MULTILINE):
            for setting in re.findall(r"`([^`]+)`", settings):
                yield Case(front, setting, dict(differences(found)), int(code))


def differences(text: str) -> Iterator[tuple[str, str]]:
    for part in text.split("; "):
        for check in re.findall(r"`([\w.*]+)`", part):
            yield check, part.split()[-1]


def expected(case: Case, document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what the table says of each check, ``area.*`` being all of an area."""
    for pattern, verdict in case.found.items():
        matching = [row["check"] for row in document["checks"] if fnmatch.fnmatchcase(row["check"], pattern)]
        assert matching, pattern
        yield from ((check, verdict) for check in matching)


CASES = list(cases())
QUICK = {"cuda-memops=0", "hip-devices=1", "levelzero-ipc=0"}


def check(case: Case) -> None:
    need(case.front)
    settings = dict(setting.partition("=")[::2] for setting in case.setting.split())
    env = environment(only=case.front, DEVSIM_ROOM=control.new_room(), CUDA_PYTHON_DISABLE_VERSION_CHECK="1")
    env |= {"DEVSIM_DRIVER_VERSION": HIP_RUNTIME} if case.front == "hip" else {}
    env |= {f"DEVSIM_{name.upper()}": value for name, value in settings.items()}
    variable = FINDS_ITS_DRIVER_BY[case.front]
    env[variable] = os.pathsep.join(filter(None, (str(build.build(case.front)), os.environ.get(variable))))
    arguments = ("--backend", case.front, "--device", "0", "--timeout", str(TIMEOUT_S))
    document = probe(*arguments, env=env, code=case.code)
    listed = next(row for row in document["backends"] if row["backend"] == case.front)
    if listed["verdict"] != "yes":
        assert {"backend": listed["verdict"]} == case.found
    else:
        assert verdicts(document) == dict(expected(case, document))
    bad = [row for row in (*document["checks"], *document["backends"]) if row["verdict"] in ("no", "broken")]
    assert all(row["reason"] for row in bad)
    assert all(row["remedy"] and "\n" not in row["remedy"] for row in bad)


@pytest.mark.parametrize("case", [case for case in CASES if str(case) in QUICK], ids=str)
def test_some_faults(case: Case) -> None:
    check(case)


def other_cases() -> Iterator[Any]:
    """All but those; what changes no answer is run by `make conformance-every` alone."""
    for case in CASES:
        if str(case) not in QUICK:
            yield pytest.param(case, id=str(case), marks=() if case.found or case.code else pytest.mark.every)


@pytest.mark.long
@pytest.mark.parametrize("case", list(other_cases()))
def test_every_fault(case: Case) -> None:
    check(case)


def test_the_tables_name_every_switch() -> None:
    assert {case.front for case in CASES} == set(FINDS_ITS_DRIVER_BY)
    assert {str(case) for case in CASES} >= QUICK
    named = {case.setting.partition("=")[0] for case in CASES}
    assert [name for name in SWITCHES if name not in named] == []
