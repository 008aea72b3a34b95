"""The conformance suite on the simulated driver: a part of it always, all of it in several guises on request."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .peers import environment

pytestmark = pytest.mark.simulator

ALL = {"host_flag", "polling", "event"}
VARIANTS: dict[str, tuple[dict[str, object], set[str]]] = {
    "whole": ({"DEVSIM_COPY_MBPS": 3000}, ALL),  # slow enough for a queue of copies to hold a stream back
    "no-events": ({"DEVSIM_IPC_EVENTS": 0}, ALL - {"event"}),
    "older-handles": ({"DEVSIM_HANDLE_FORMAT": 0, "DEVSIM_FD_MODE": 1}, ALL),
    "unordered": ({"DEVSIM_UNORDERED": 1}, ALL),
}
IN_CI = ("whole",)
"""The others are run by `make conformance-every`."""
LACKING = ("no-events",)
COMPLETION = "SYNC-071,SYNC-087,SYNC-090,SYNC-116,SYNC-205,SYNC-216,SYNC-218,ORD-085,ORD-086"
"""Cases that meet what these lack, or have to do without; CI runs no others of them."""
SKIPS = re.compile(
    "no word (waits|writes): Level Zero has no call|without word waits no stream|records graphs|grown range|is a slice"
    "|needs gigabytes|does not choose where it maps"
)
"""What this backend or its simulated device does not have."""
QUICK = "MEM-011,MEM-016,LIFE-050,SYNC-205,ORD-086"


def run_suite(
    folder: Path, switches: dict[str, object], *options: str, timeout_s: float, profile: str = "simulated"
) -> dict[str, Any]:
    """Run the suite as anybody would; return its results."""
    results = folder / "results.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "devipc.conformance"),
            *("-p", "devipc.conformance.plugin", "--devipc-results", str(results), *options),
            *("--devipc-profile", f"backends.levelzero.tests.profile:{profile}"),
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
    report = run_suite(tmp_path, {"DEVSIM_COPY_MBPS": 3000}, "--devipc-only", QUICK, timeout_s=55)
    assert passed(report, "ORD-086") == ALL
    assert passed(report, "MEM-011") == {"opaque"}
    assert report["counts"]["pass"] == 7


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.every) for name in VARIANTS]
)
def test_every_case_passes(name: str, tmp_path: Path) -> None:
    switches, strategies = VARIANTS[name]
    whole = strategies == ALL
    report = run_suite(tmp_path, switches, timeout_s=380, profile="simulated" if whole else "lenient")
    assert len(report["cases"]) >= 140
    assert passed(report, "ORD-086") == strategies
    if name == "whole":
        reasons = {test["reason"] for test in report["tests"] if test["result"] == "skip"}
        odd = {reason for reason in reasons if not SKIPS.search(reason)}
        assert not odd


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LACKING)
def test_completion_passes_without(name: str, tmp_path: Path) -> None:
    switches, strategies = VARIANTS[name]
    report = run_suite(tmp_path, switches, "--devipc-only", COMPLETION, timeout_s=280, profile="lenient")
    assert len(report["cases"]) == 9
    assert passed(report, "ORD-086") == strategies
