"""Drivers that leak, attach wrong memory or forget freed memory: the conformance suite says so, with a number.

The suite runs as anybody would run it, on cases that are chosen by their ids.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from devipc_cuda import driver
from devipc_cuda.backend import CudaBackend

from devipc.spi import HandleKind

from .peers import environment, simulated

MIB = 2**20
KINDS = {"vmm_fd", "legacy", "pool"}
FDS = re.compile(r"fds (\d+) -> (\d+)")
BYTES = re.compile(r"device memory: (\d+) bytes less are free")


def run_suite(folder: Path, only: str, *options: str, **switches: object) -> dict[str, dict[str, str]]:
    """Run some cases; return the reasons of those that failed, by case and kind, "" for those that passed."""
    results = folder / "results.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "devipc.conformance"),
            *("-p", "devipc.conformance.plugin", "--devipc-results", str(results), "--devipc-only", only, *options),
            *(() if "--devipc-profile" in options else ("--devipc-backend", "cuda")),
        ],
        cwd=folder,
        env=environment({**switches, "DEVIPC_TRIAL_CACHE": ""}),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert results.exists(), done.stdout[-4000:] + done.stderr[-2000:]
    report = json.loads(results.read_text())
    assert report["counts"]["error"] == 0, done.stdout[-4000:]
    found: dict[str, dict[str, str]] = {}
    for test in report["tests"]:
        assert test["result"] in ("pass", "fail"), test
        reason = test["reason"] or done.stdout if test["result"] == "fail" else ""
        found.setdefault(test["id"], {})[test["parameters"]] = reason
    return found


def failed(found: dict[str, str]) -> set[str]:
    return {kind for kind, reason in found.items() if reason}


@pytest.mark.long
@pytest.mark.simulator
@pytest.mark.timeout(120)
class TestAccounts:
    """What the suite's accounting finds."""

    def test_without_a_switch_nothing_is_found(self, tmp_path: Path) -> None:
        found = run_suite(tmp_path, "LIFE-047,LIFE-055,MEM-011,MEM-014,MEM-025", "--devipc-exclusive")
        assert all(set(each) == KINDS for each in found.values())
        assert not any(failed(each) for each in found.values())

    def test_an_export_that_pins_for_ever(self, tmp_path: Path) -> None:
        """100 exports of 2 MiB."""
        cycles = run_suite(tmp_path, "LIFE-055", "--devipc-exclusive", leak_export=1)["LIFE-055"]
        assert "legacy" in failed(cycles)
        assert "vmm_fd" not in failed(cycles)
        lost = BYTES.search(cycles["legacy"])
        assert lost, cycles["legacy"]
        assert int(lost[1]) == 200 * MIB

    def test_an_open_that_leaks_a_descriptor(self, tmp_path: Path) -> None:
        cycles = run_suite(tmp_path, "LIFE-055", leak_open=1)["LIFE-055"]
        assert "legacy" in failed(cycles)
        assert "vmm_fd" not in failed(cycles)
        grown = FDS.search(cycles["legacy"])
        assert grown, cycles["legacy"]
        assert int(grown[2]) - int(grown[1]) == 100

    def test_a_copy_that_leaks_a_descriptor(self, tmp_path: Path) -> None:
        writes = run_suite(tmp_path, "MEM-012", leak_copy=1)["MEM-012"]
        assert failed(writes) == KINDS
        for reason in writes.values():
            grown = FDS.search(reason)
            assert grown, reason
            assert int(grown[2]) > int(grown[1])


@pytest.mark.long
@pytest.mark.simulator
@pytest.mark.timeout(120)
class TestContents:
    """What comparing bytes finds."""

    def test_an_open_that_attaches_other_memory(self, tmp_path: Path) -> None:
        """Every way in which a mapping is looked at finds it; the kinds whose handle is a descriptor cannot err so."""
        found = run_suite(tmp_path, "MEM-011,MEM-014,MEM-025", wrong_attach=1)
        assert set(found) == {"MEM-011", "MEM-014", "MEM-025"}
        for each in found.values():
            assert failed(each) == {"legacy"}
        assert re.search(r"\d+ of \d+ bytes are wrong", found["MEM-011"]["legacy"])

    def test_freed_memory_that_is_overwritten(self, tmp_path: Path) -> None:
        """A failure, unless the profile declares it."""
        found = run_suite(tmp_path, "LIFE-050", poison_freed=1)["LIFE-050"]
        assert failed(found) == {"legacy"}
        assert re.search(r"\d+ of \d+ bytes are wrong", found["legacy"])

    def test_freed_memory_that_may_be_overwritten(self, tmp_path: Path) -> None:
        profile = ("--devipc-profile", "backends.cuda.tests.profile:forgetful")
        assert failed(run_suite(tmp_path, "LIFE-050", *profile, poison_freed=1)["LIFE-050"]) == set()


@simulated(leak_small=1)
def test_small_memory_of_ours_is_never_kept_by_an_export(device: Any, sim: Any) -> None:
    """The driver keeps the shared block of an exported small allocation for ever: ours are whole blocks."""
    for _ in range(10):
        block = device.memory.allocate(1000, kind=HandleKind.LEGACY)
        device.memory.release(device.memory.export(block.ptr, 1000))
        device.memory.free(block)
    assert (sim.counter("leaked"), sim.counter("live_blocks"), sim.used_bytes()) == (0, 0, 0)


@simulated(bare=True, leak_small=1)
def test_small_memory_of_others_is_kept_and_that_is_disclosed(sim: Any) -> None:
    device = CudaBackend().open_device()
    with device.context:
        ptr = int(driver.call("cuMemAlloc", 1000))
    device.memory.release(device.memory.export(ptr, 1000))
    with device.context:
        driver.call("cuMemFree", ptr)
    assert (sim.counter("leaked"), sim.used_bytes()) == (1, 2 * MIB)
    evidence = device.memory.kinds()[HandleKind.LEGACY].evidence
    assert "small allocations into common 2 MiB blocks" in evidence
    assert "memory.allocate() rounds up" in evidence
    device.close()
