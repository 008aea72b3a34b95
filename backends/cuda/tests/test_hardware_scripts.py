"""The checks of ``hardware/`` run on the simulated driver too, small: they stay alive where no device is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .peers import PACKAGE, ROOT, environment

LATE = {"late_ms": 50, "copy_mbps": 100}


def run(script: str, out: Path, *arguments: str, **switches: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", f"{PACKAGE}.hardware.{script}", "--out", str(out), *arguments],
        cwd=ROOT,
        env={**environment(switches), "DEVIPC_TRIAL_CACHE": ""},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(out.read_text())
    assert report["facts"]["simulated"]
    assert report["device memory not given back"] <= 0
    return report["sections"]  # type: ignore[no-any-return]


@pytest.mark.simulator
def test_late_writes_are_seen_after_the_hang_up_and_never_after_the_pidfd(tmp_path: Path) -> None:
    sections = run("death", tmp_path / "late.json", "--only", "late writes, 0", **LATE)
    (section,) = sections.values()
    found = section["found"]
    assert found["rounds with bytes after hang-up"] >= 1
    assert found["rounds with bytes after pidfd"] == 0
    for round_ in found["rounds"]:
        assert round_["hang-up, ms"] < round_["last write seen, ms"] <= round_["pidfd, ms"]


@pytest.mark.simulator
@pytest.mark.parametrize("only", ["dead exporter", "stream_memop, 0", "host waits"])
def test_deaths(tmp_path: Path, only: str) -> None:
    assert run("death", tmp_path / "death.json", "--only", only)


@pytest.mark.simulator
def test_what_a_pending_wait_holds_up(tmp_path: Path) -> None:
    sections = run("pending_wait", tmp_path / "pending.json")
    blocked = sections["a wait pending"]["found"]["blocked until released"]
    assert {"cuMemFree", "cuMemHostUnregister", "cuCtxSynchronize"} <= set(blocked)
    assert "later launch of a kernel" not in blocked


@pytest.mark.simulator
def test_forms_of_submission(tmp_path: Path) -> None:
    out = tmp_path / "submission.json"
    command = [
        sys.executable,
        "-m",
        f"{PACKAGE}.hardware.submission",
        "--out",
        str(out),
        "--tokens",
        "64",
        "--rows",
        "200",
    ]
    done = subprocess.run(
        [*command, "--only", "classic", "mla"],
        cwd=ROOT,
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    measured = {name for name in report if name.endswith("tokens")}
    assert measured == {"classic, 64 tokens", "classic, 16 tokens", *(f"mla, {n} tokens" for n in (64, 16, 1))}
    for name in measured:
        form = "strided, in one batch call" if "mla" in name else "plain batches, 3 threads and streams each way"
        assert report[name][form]["d2h"]["share"] > 0


@pytest.mark.simulator
def test_the_usual_namespaces(tmp_path: Path) -> None:
    assert run("namespaces", tmp_path / "namespaces.json")


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.simulator
def test_deaths_around_the_cache(tmp_path: Path) -> None:
    sections = run("hicache_death", tmp_path / "death.json")
    for name in ("engine killed, a stream waits", "daemon killed, a stream waits"):
        assert sections[name]["found"]["the fence says"] == "poisoned: peer_died"
    assert sections["scheduler killed in mid-transfer"]["found"]["under way"]


@pytest.mark.long
@pytest.mark.simulator
def test_how_long_a_backup_takes(tmp_path: Path) -> None:
    sections = run("hicache_latency", tmp_path / "latency.json", "--only", "16 tokens, noted")
    (section,) = sections.values()
    way = section["found"]["nothing to wait for"]["us from the submission: [first entered, last left, calls]"]
    order = ["supervisor: takes the request", "engine: submits", "supervisor: publishes"]
    assert [label for label in way if label in order] == order


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.simulator
def test_scenarios_in_process_and_through_the_daemon(tmp_path: Path) -> None:
    sections = run("hicache_scenarios", tmp_path / "scenarios.json")
    assert len(sections) == 3
    for section in sections.values():
        assert section["found"]["passed"] == section["found"]["of"] == 2
        assert {verdict for verdict, _ in section["found"]["trials"].values()} == {"yes"}


@pytest.mark.simulator
def test_a_fault_tells_everybody(tmp_path: Path) -> None:
    sections = run("sticky", tmp_path / "sticky.json")
    told = sections["a faulting kernel"]["found"]["fences, told to the peer after the fault"]
    assert set(told.values()) == {"poisoned: device_lost"}
