"""The conformance suite on the simulated driver: as it is, without inter-process events, without value operations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("name", VARIANTS)
def test_every_case_passes(name: str, tmp_path: Path) -> None:
    switches, strategies = VARIANTS[name]
    results = tmp_path / "results.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "devipc.conformance"),
            *("-p", "devipc.conformance.plugin", "--devipc-simulated", "--devipc-results", str(results)),
            *("--devipc-profile", PROFILE if strategies == ALL else LENIENT),
        ],
        cwd=tmp_path,
        env=environment({**switches, "DEVIPC_TRIAL_CACHE": ""}),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    report = json.loads(results.read_text())
    assert len(report["cases"]) >= 140
    assert (report["counts"]["fail"], report["counts"]["error"]) == (0, 0)
    passed = {test["parameters"] for test in report["tests"] if test["result"] == "pass" and test["id"] == "ORD-086"}
    assert passed == strategies
