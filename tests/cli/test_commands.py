"""What the command line prints and how it ends: text, JSON, exit codes, an interrupt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(sys.executable).with_name("devipc"))
STRATEGIES = ["stream_memop", "host_flag", "polling", "event"]


def devipc(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, timeout=50, env=os.environ | environment, check=False
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.timing
def test_the_demo_tells_its_story(strategy: str) -> None:
    done = devipc("demo", "--strategy", strategy, "--hand-overs", "40", "--page-kib", "4", "--no-cache", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert list(report)[:2] == ["schema", "backend"]
    assert set(report) == {"schema", "backend", "device", "share", "decision", "hand_over", "kill", "life", "ok"}
    assert (report["schema"], report["ok"]) == ("devipc.demo/1", True)
    assert report["decision"]["strategy"] == strategy
    assert {row["strategy"] for row in report["decision"]["candidates"]} == set(STRATEGIES)
    assert [report[step]["wrong_pages"] for step in ("share", "hand_over", "kill")] == [0, 0, 0]
    assert report["hand_over"]["count"] == 40
    assert 20 <= report["kill"]["pages_taken"] < 40
    assert 0 <= report["kill"]["dying_ms"] < 100
    assert report["kill"]["dying_ms"] <= report["kill"]["gone_ms"]


@pytest.mark.once
def test_the_demo_in_words() -> None:
    done = devipc("demo", "--hand-overs", "40")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "backend host, device host memory"
    assert lines[-1] == "all right"
    assert "\x1b" not in done.stdout  # nothing is drawn in a pipe


@pytest.mark.once
def test_the_demo_lets_a_cache_outlive_scheduler_and_daemon() -> None:
    pytest.importorskip("msgspec")
    done = devipc("demo", "--hand-overs", "8", "--json", "--progress")
    assert done.returncode == 0
    assert "B goes on without the cache: 6 of 6" in done.stderr.splitlines()
    life = json.loads(done.stdout)["life"]
    assert (life["schema"], life["ok"], life["different_answers"]) == ("devipc.life/1", True, 0)
    answered = [(step["restored"], step["computed"], step["degraded"]) for step in life["steps"] if "restored" in step]
    assert answered == [(0, 2304, False), (2304, 0, False), (0, 2304, True), (0, 2304, False), (2304, 0, False)]
    cached = [step for step in life["steps"] if step.get("restored")]
    assert all(step["strategy"] and step["plan"]["restore"] for step in cached)
    assert set(life["first_token_ms"]) == {"computed", "restored"}


def test_backends_are_listed_with_reasons() -> None:
    done = devipc("backends", "--json", DEVIPC_BACKENDS_DISABLE="nobody")
    assert done.returncode == 0
    listed = json.loads(done.stdout)
    assert listed["schema"] == "devipc.backends/1"
    rows = {row["backend"]: row for row in listed["backends"]}
    assert rows["host"]["verdict"] == "yes"
    assert rows["host"]["devices"]
    assert all(row["verdict"] == "yes" or (row["reason"] and row["remedy"]) for row in rows.values())


def test_a_disabled_backend_is_listed_as_such() -> None:
    done = devipc("backends", DEVIPC_BACKENDS_DISABLE="host")
    assert done.returncode == 0
    assert "disabled by DEVIPC_BACKENDS_DISABLE" in done.stdout


def test_a_backend_that_hangs_shows_where() -> None:
    done = devipc("backends", "--timeout", "0.001")
    assert done.returncode == 0
    table, _, evidence = done.stdout.partition("evidence of host:\n")
    assert "see in the evidence where it hung" in table
    assert "  Timeout" in evidence


def test_every_row_of_a_document_has_the_same_keys() -> None:
    rows = json.loads(devipc("backends", "--json", DEVIPC_BACKENDS_DISABLE="host").stdout)["backends"]
    rows += json.loads(devipc("backends", "--json").stdout)["backends"]
    assert len({frozenset(row) for row in rows}) == 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--version",), 0),
        (("--help",), 0),
        (("nonsense",), 2),
        (("demo", "--strategy", "telepathy"), 2),
        (("demo", "--slots", "1"), 2),
        (("demo", "--backend", "nobody"), 3),
        (("demo", "--device", "nowhere"), 3),
        (("backends", "--timeout", "-1"), 2),
    ],
)
def test_exit_codes(arguments: tuple[str, ...], code: int) -> None:
    done = devipc(*arguments)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert bool(done.stderr) is (code != 0)


def test_an_interrupt_ends_both_processes() -> None:
    command = [SCRIPT, "demo", "--hand-overs", "1000000", "--page-kib", "4"]
    # Its own output is a pipe that the child inherits for errors: communicate() returns only when both have ended.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (130, "")
    assert "interrupted" in err


def test_the_second_process_is_silent_when_the_first_is_killed() -> None:
    command = [SCRIPT, "demo", "--hand-overs", "1000000", "--page-kib", "4"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=2)
    finally:
        process.kill()
    out, err = process.communicate(timeout=30)  # returns when the second one has ended as well
    assert (process.returncode, out, err) == (-signal.SIGKILL, "", "")
