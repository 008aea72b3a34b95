"""The conformance suite on the simulated driver: a part of it always, all of it in several guises on request."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .peers import environment

pytestmark = pytest.mark.simulator

ALL = {"host_flag", "polling", "event"}
VARIANTS: dict[str, tuple[dict[str, object], set[str]]] = {
    "whole": ({}, ALL),
    "no-events": ({"DEVSIM_IPC_EVENTS": 0}, ALL - {"event"}),
    "older-handles": ({"DEVSIM_HANDLE_FORMAT": 0, "DEVSIM_FD_MODE": 1}, ALL),
    "unordered": ({"DEVSIM_UNORDERED": 1}, ALL),
}
QUICK = "MEM-011,MEM-016,LIFE-050,SYNC-205,ORD-086"


def run_suite(folder: Path, switches: dict[str, object], *options: str, timeout_s: float) -> dict[str, Any]:
    """Run the suite as anybody would; return its results."""
    results = folder / "results.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "devipc.conformance"),
            *("-p", "devipc.conformance.plugin", "--devipc-results", str(results), *options),
            *("--devipc-profile", "backends.levelzero.tests.profile:whole_device"),
        ],
        cwd=folder,
        env=environment({**switches, "DEVIPC_TRIAL_CACHE": ""}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    report: dict[str, Any] = json.loads(results.read_text())
    assert (report["counts"]["fail"], report["counts"]["error"]) == (0, 0)
    return report


def passed(report: dict[str, Any], identity: str) -> set[str]:
    return {test["parameters"] for test in report["tests"] if test["result"] == "pass" and test["id"] == identity}


def test_some_cases_pass(tmp_path: Path) -> None:
    report = run_suite(tmp_path, {}, "--devipc-only", QUICK, timeout_s=55)
    assert passed(report, "ORD-086") == ALL
    assert passed(report, "MEM-011") == {"opaque"}
    assert report["counts"]["pass"] == 7


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_case_passes(name: str, tmp_path: Path) -> None:
    switches, strategies = VARIANTS[name]
    report = run_suite(tmp_path, switches, timeout_s=380)
    assert len(report["cases"]) >= 60
    assert passed(report, "ORD-086") == strategies
