"""``devipc conformance``: what it runs, what it writes, what it prints and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from devipc.conformance.results import write_results

SCRIPT = str(Path(sys.executable).with_name("devipc"))
LIAR = "tests.suite.liars:short_mapping"


def conformance(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, "conformance", *arguments], capture_output=True, text=True, timeout=55, cwd=folder, check=False
    )


def test_a_run_leaves_its_results(tmp_path: Path) -> None:
    files = ("--results", "results.json", "--junit", "junit.xml")
    done = conformance(tmp_path, "run", "--backend", "host", "--only", "MEM-011, DISC-010", "--json", *files)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads((tmp_path / "results.json").read_text())
    assert document["cases"] == {"DISC-010": "skip", "MEM-011": "pass"}
    assert document["skips"] == {"DISC-010": {"": "no device here is a slice"}}
    assert (document["driver"], document["bindings"]) == ("built in", "")
    assert document["settings"]["simulated"] is False
    assert len(list(ElementTree.parse(tmp_path / "junit.xml").iter("testcase"))) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["junit.xml", "results.json"], "something else was left"

    report = conformance(tmp_path, "report", "results.json", "--json")
    assert report.returncode == 0, report.stderr
    (run,) = json.loads(report.stdout)["runs"]
    assert (run["backend"], run["good"], run["whole"]) == ("host", True, False)
    assert run["skips"] == {"DISC-010": "no device here is a slice"}


def test_a_failure_ends_with_one(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    where = str(tmp_path / "results.json")
    done = conformance(root, "run", "--backend", LIAR, "--only", "MEM-011", "--results", where, "--simulated")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "MEM-011: An importer reads the bytes that the exporter wrote." in done.stdout
    report = conformance(tmp_path, "report", "results.json")
    assert report.returncode == 1
    assert "host on host memory: MEM-011[memfd] fail: " in report.stdout
    assert "host memory (simulated)" in report.stdout


def test_required_allows_no_unlisted_skip(tmp_path: Path) -> None:
    done = conformance(tmp_path, "run", "--backend", "host", "--only", "DISC-010", "--required")
    assert done.returncode == 1
    assert "skipped, and the profile does not list that" in done.stdout


def test_cases_are_listed(tmp_path: Path) -> None:
    listed = json.loads(conformance(tmp_path, "list", "--json").stdout)
    assert listed["schema"] == "devipc.conformance.cases/1"
    assert len(listed["cases"]) >= 120
    assert all(set(case) == {"id", "demand", "clause", "large"} for case in listed["cases"])
    assert conformance(tmp_path, "list", "--only", "STATE").stdout.startswith("2 cases\n")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("run",), 2, "no backend was named"),
        (("run", "--backend", "nobody"), 3, "no backend 'nobody' is installed"),
        (("run", "--backend", "host", "--device", "nowhere"), 3, "no device nowhere"),
        (("run", "--backend", "host", "--only", "NONE-1"), 2, "no case or area NONE-1"),
        (("report", __file__), 2, "cannot be read"),
        (("report", "/dev/zero"), 2, "it is no regular file"),
        (("run", "--backend", "host", "--results", "/no/such/results.json"), 2, "cannot be written"),
        (("run", "--backend", "host", "--jobs", "2", "--results", "/no/such/results.json"), 2, "cannot be written"),
    ],
)
def test_what_cannot_begin_says_why(tmp_path: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = conformance(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.once
def test_shares_beside_each_other_are_one_run(tmp_path: Path) -> None:
    alone = conformance(tmp_path, "run", "--backend", "host", "--only", "DISC", "--json")
    beside = conformance(tmp_path, "run", "--backend", "host", "--only", "DISC", "--json", "--jobs", "2")
    assert (alone.returncode, beside.returncode) == (0, 0), beside.stderr
    assert "share 2 of 2:" in beside.stderr
    one, other = json.loads(alone.stdout), json.loads(beside.stdout)
    assert {(test["id"], test["parameters"], test["result"]) for test in one["tests"]} == {
        (test["id"], test["parameters"], test["result"]) for test in other["tests"]
    }
    assert len(one["tests"]) == len(other["tests"])
    for part in ("counts", "cases", "skips", "settings", "device"):
        assert one[part] == other[part]


@pytest.mark.once
def test_what_goes_wrong_in_one_share_is_said(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    where = str(tmp_path / "results.json")
    done = conformance(root, "run", "--backend", LIAR, "--only", "MEM-011,DISC-010", "--jobs", "3", "--results", where)
    assert done.returncode == 1, done.stderr
    assert "MEM-011" in done.stdout
    assert json.loads(Path(where).read_text())["cases"] == {"DISC-010": "skip", "MEM-011": "fail"}
    assert conformance(tmp_path, "run", "--backend", "nobody", "--jobs", "2").returncode == 3
    for wrong in (("--share", "3/2"), ("--share", "0/1"), ("--jobs", "2", "--junit", "some.xml")):
        refused = conformance(tmp_path, "run", "--backend", "host", *wrong)
        assert refused.returncode == 2
        assert "remedy" in refused.stderr


def test_results_go_to_what_is_no_file_as_they_are(tmp_path: Path) -> None:
    fifo, device = tmp_path / "fifo", tmp_path / "null"
    os.mkfifo(fifo)
    os.symlink("/dev/null", device)
    with open(os.open(fifo, os.O_RDWR), "rb", buffering=0) as end:
        write_results(fifo, {"some": "results"})
        write_results(device, {"some": "results"})
        assert json.loads(end.read(100)) == {"some": "results"}
    assert (fifo.is_fifo(), device.is_symlink(), Path("/dev/null").is_char_device()) == (True, True, True)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_stuck_case_leaves_a_document_on_the_standard_output_too(tmp_path: Path) -> None:
    (tmp_path / "profiles.py").write_text(
        "from devipc.conformance import BackendProfile\n"
        "STUCK = BackendProfile(backend='tests.suite.sync_liars:stuck', deadline_s=1)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [SCRIPT, "conformance", "run", "--profile", "profiles:STUCK", "--only", "DISC-203", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, env=env, check=False)
    assert (done.returncode, json.loads(done.stdout)["cases"]) == (70, {"DISC-203": "fail"}), done.stderr


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_a_run_is_the_end_of_all_shares(tmp_path: Path, number: signal.Signals) -> None:
    command = [SCRIPT, "conformance", "run", "--backend", "host", "--jobs", "2"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 20
    while len(shares := children.read_text().split()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(2.0)  # well into the cases
    process.send_signal(number)
    output, _ = process.communicate(timeout=40)
    assert process.returncode == (-number if number == signal.SIGKILL else 130), output
    assert len(shares) == 2
    deadline = time.monotonic() + 30
    while (there := [pid for pid in shares if _lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert there == []
    if number != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
