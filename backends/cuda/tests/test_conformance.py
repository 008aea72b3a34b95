"""The conformance suite on the simulated driver: as it is, without inter-process events, without value operations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .peers import environment

pytestmark = [pytest.mark.long, pytest.mark.simulator, pytest.mark.timeout(300)]

PROFILE = "backends.cuda.tests.profile:simulated"
LENIENT = "backends.cuda.tests.profile:lenient"
ALL = {"stream_memop", "host_flag", "polling", "event"}
VARIANTS: dict[str, tuple[dict[str, object], set[str]]] = {
    "whole": ({}, ALL),
    "no-events": ({"DEVSIM_IPC_EVENTS": 0}, ALL - {"event"}),
    "no-memops": ({"DEVSIM_MEMOPS": 0}, ALL - {"stream_memop"}),
    "neither": ({"DEVSIM_IPC_EVENTS": 0, "DEVSIM_MEMOPS": 0}, {"host_flag", "polling"}),
    "slow": ({"DEVSIM_DELAY_US": 50}, ALL),
}
IN_CI = ("whole",)
"""The others are run by `make conformance-every`."""
LACKING = ("no-events", "neither")
COMPLETION = "SYNC-071,SYNC-087,SYNC-090,SYNC-116,SYNC-205,SYNC-216,SYNC-218,ORD-085,ORD-086"
"""Cases that meet what these lack, or have to do without; CI runs no others of them."""

HANDLES = "MEM-100,MEM-107,MEM-108,MEM-220"
"""Cases in which descriptors are passed on, opened by many threads at once, and mapped side by side."""


def run_suite(folder: Path, switches: dict[str, object], profile: str, *options: str) -> Any:
    """Run the suite in a process of its own; return its report."""
    results = folder / "results.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "devipc.conformance"),
            *("-p", "devipc.conformance.plugin", "--devipc-simulated", "--devipc-results", str(results)),
            *("--devipc-profile", profile, *options),
        ],
        cwd=folder,
        env=environment({**switches, "DEVIPC_TRIAL_CACHE": ""}),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    report = json.loads(results.read_text())
    assert (report["counts"]["fail"], report["counts"]["error"]) == (0, 0)
    return report


def passed(report: Any, case: str) -> set[str]:
    return {test["parameters"] for test in report["tests"] if test["result"] == "pass" and test["id"] == case}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.every) for name in VARIANTS]
)
def test_every_case_passes(name: str, tmp_path: Path) -> None:
    switches, strategies = VARIANTS[name]
    report = run_suite(tmp_path, switches, PROFILE if strategies == ALL else LENIENT)
    assert len(report["cases"]) >= 140
    assert passed(report, "ORD-086") == strategies


@pytest.mark.parametrize("name", LACKING)
def test_completion_passes_without(name: str, tmp_path: Path) -> None:
    switches, strategies = VARIANTS[name]
    report = run_suite(tmp_path, switches, LENIENT, "--devipc-only", COMPLETION)
    assert len(report["cases"]) == 9
    assert passed(report, "ORD-086") == strategies


@pytest.mark.parametrize("mode", [1, 2])
def test_handles_open_whatever_becomes_of_their_descriptors(mode: int, tmp_path: Path) -> None:
    """A driver that closes what it is given, and one that reads it once more when the memory is mapped."""
    report = run_suite(tmp_path, {"fd_mode": mode}, PROFILE, "--devipc-only", HANDLES)
    for case in ("MEM-107", "MEM-108"):
        assert passed(report, case) == {"vmm_fd", "legacy", "pool"}
