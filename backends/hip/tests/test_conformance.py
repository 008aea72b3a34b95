"""The conformance suite on the simulated runtime: as it is, without events, without values, and as older ones are.

And on another vendor's simulated driver, by the library that passes calls on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .peers import ROOT, environment

pytestmark = pytest.mark.simulator

ALL = {"stream_memop", "host_flag", "polling", "event"}
VARIANTS: dict[str, tuple[dict[str, object], set[str]]] = {
    "whole": ({}, ALL),
    "no-events": ({"DEVSIM_IPC_EVENTS": 0}, ALL - {"event"}),
    "neither": ({"DEVSIM_IPC_EVENTS": 0, "DEVSIM_MEMOPS": 0}, {"host_flag", "polling"}),
    "older": (
        {"driver_version": 70_200_001, "few_attributes": 1, "fd_by_pointer": 1, "retains": 0, "event_wait_blocks": 1},
        ALL - {"event"},
    ),
}
IN_CI = ("whole",)
"""The others are run by `make conformance-every`."""
LACKING = ("no-events",)
COMPLETION = "SYNC-071,SYNC-087,SYNC-090,SYNC-116,SYNC-205,SYNC-216,SYNC-218,ORD-085,ORD-086"
"""Cases that meet what these lack, or have to do without; CI runs no others of them."""
FORWARDED = "MEM-011,MEM-016,MEM-203,LIFE-050,SYNC-078,SYNC-205,ORD-085,ORD-086"
"""Cases in which each kind of memory and each strategy is used by two processes."""


def run_suite(tmp_path: Path, env: dict[str, str], *options: str) -> Any:
    """Run the suite in a process of its own; return its report."""
    results = tmp_path / "results.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "devipc.conformance"),
            *("-p", "devipc.conformance.plugin", "--devipc-results", str(results), *options),
        ],
        cwd=tmp_path,
        env={**env, "DEVIPC_TRIAL_CACHE": ""},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    report = json.loads(results.read_text())
    assert (report["counts"]["fail"], report["counts"]["error"]) == (0, 0)
    return report


def passed(report: Any, case: str) -> set[str]:
    return {test["parameters"] for test in report["tests"] if test["result"] == "pass" and test["id"] == case}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.every) for name in VARIANTS]
)
def test_every_case_passes(name: str, tmp_path: Path) -> None:
    switches, strategies = VARIANTS[name]
    chosen = (
        ("--devipc-profile", "backends.hip.tests.profile:simulated") if name == "whole" else ("--devipc-backend", "hip")
    )
    report = run_suite(tmp_path, environment(switches), *chosen)
    assert len(report["cases"]) >= 60
    assert passed(report, "ORD-086") == strategies


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LACKING)
def test_completion_passes_without(name: str, tmp_path: Path) -> None:
    switches, strategies = VARIANTS[name]
    report = run_suite(tmp_path, environment(switches), "--devipc-backend", "hip", "--devipc-only", COMPLETION)
    assert len(report["cases"]) == 9
    assert passed(report, "ORD-086") == strategies


def test_values_arrive_in_order_by_every_strategy(tmp_path: Path) -> None:
    report = run_suite(tmp_path, environment({}), "--devipc-backend", "hip", "-k", "test_hand_back")
    assert passed(report, "ORD-086") == ALL


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", [1, 2])
def test_threads_open_at_once_whatever_becomes_of_the_descriptors(mode: int, tmp_path: Path) -> None:
    """Of one extent, so that a number that was closed comes back as the same file."""
    report = run_suite(tmp_path, environment({"fd_mode": mode}), "--devipc-backend", "hip", "--devipc-only", "MEM-107")
    assert passed(report, "MEM-107") >= {"vmm_fd", "pool"}


def forwarded() -> dict[str, str]:
    """Variables of a process whose runtime passes calls on to the simulated driver of another vendor."""
    folders = []
    for front in ("hip_on_cuda", "cuda"):
        command = [sys.executable, str(ROOT / "tests/simulator/build.py"), front]
        folders.append(subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.strip())
    values = environment({})
    del values["DEVSIM_DRIVER_VERSION"]
    values["ROCM_PATH"] = folders[0]
    values["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (folders[1], values.get("LD_LIBRARY_PATH"))))
    return values


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_script_for_hardware_runs(tmp_path: Path) -> None:
    """On the other vendor's simulated driver; what it writes says that no AMD device was below."""
    values = forwarded()
    values["PATH"] = f"{Path(sys.executable).parent}:{values['PATH']}"
    values["DEVIPC_HIP_FOLDER"] = values["ROCM_PATH"]
    values["OUT"] = str(tmp_path / "out")
    script = str(ROOT / "backends/hip/tests/hardware/run_h200.sh")
    done = subprocess.run(["bash", script, "demo"], env=values, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "out/results/demo.json").read_text())
    assert kept["hardware"] == kept["facts"]["hardware"] == "NVIDIA via forwarding"
    assert "HIP by forwarding" in kept["facts"]["device"]
    assert set(kept["strategies"]) == ALL


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("only", [FORWARDED, pytest.param("", marks=pytest.mark.every)], ids=["some", "all"])
def test_every_case_passes_by_forwarding(only: str, tmp_path: Path) -> None:
    options = ("--devipc-profile", "backends.hip.tests.profile:forwarded")
    report = run_suite(tmp_path, forwarded(), *options, *(("--devipc-only", only) if only else ()))
    assert len(report["cases"]) >= (8 if only else 60)
    assert passed(report, "ORD-086") == ALL
    tried = {test["parameters"] for test in report["tests"] if test["result"] == "pass" and test["id"] == "MEM-203"}
    assert tried == {"legacy", "vmm_fd", "pool"}
