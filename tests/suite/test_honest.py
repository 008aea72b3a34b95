"""Honest backends pass everything, again and again, and quickly."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.suite.runs import Run, run_suite

HOST = "--devipc-backend=devipc.host.plugin:devipc_backend"
MAX_S = 90.0
RUNS = 20


def assert_clean(run: Run) -> None:
    assert run.status == 0, run.output
    counts = run.document["counts"]
    assert counts["fail"] == counts["error"] == counts["deviation"] == 0, run.output


def skipped(run: Run) -> set[str]:
    return {identity for identity, result in run.document["cases"].items() if result == "skip"}


@pytest.mark.long
@pytest.mark.timeout(200)
def test_host_passes(tmp_path: Path) -> None:
    started = time.monotonic()
    run = run_suite(tmp_path, HOST)
    assert_clean(run)
    assert time.monotonic() - started < MAX_S
    expected = {"DISC-002", "DISC-005", "DISC-010", "DISC-205", "MEM-036", "OFF-043"}
    assert skipped(run) == expected, "the host device runs every case but these"
    assert len(run.document["cases"]) >= 140


@pytest.mark.long
@pytest.mark.every
@pytest.mark.timeout(560)
@pytest.mark.parametrize("turn", range(RUNS // 2))
def test_host_passes_again_and_again(tmp_path: Path, turn: int) -> None:
    """Two at a time, so that each run also stands beside another."""
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(2) as pool:
        for run in pool.map(lambda folder: run_suite(folder, HOST, timeout_s=540), folders):
            assert_clean(run)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_two_devices_pass(tmp_path: Path) -> None:
    """With a profile that hides and reorders them, nothing about devices is left out but slices."""
    profile = "--devipc-profile=tests.suite.device_liars:two_devices_profile"
    run = run_suite(tmp_path, profile, "--devipc-only=DISC,MEM")
    assert_clean(run)
    assert skipped(run) == {"DISC-010", "DISC-205"}


@pytest.mark.long
@pytest.mark.timeout(320)
def test_a_device_without_words_and_events_passes(tmp_path: Path) -> None:
    """Latches are queues of copies there, and two strategies are refused by type."""
    only = "--devipc-only=SYNC,ORD,CRASH,XFER,STATE"
    run = run_suite(tmp_path, "--devipc-backend=tests.suite.sync_liars:without_sync", only, timeout_s=300)
    assert_clean(run)
    results = {(test["id"], test["parameters"]): test["result"] for test in run.document["tests"]}
    assert results["SYNC-067", "polling"] == results["SYNC-067", "host_flag"] == "pass", run.output
    assert results["SYNC-067", "stream_memop"] == results["SYNC-067", "event"] == "skip"
    assert run.result("SYNC-202") == "skip"
    assert set(run.document["skips"]["SYNC-202"].values()) == {"this device has no word waits: left out"}
