"""Five results that are kept apart, and runs that cannot begin or cannot end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.suite.runs import run_suite

pytestmark = pytest.mark.once
HOST = "--devipc-backend=devipc.host.plugin:devipc_backend"


def profile(name: str) -> str:
    return f"--devipc-profile=tests.suite.profiles:{name}"


def test_pass(tmp_path: Path) -> None:
    run = run_suite(tmp_path, profile("made_by_a_function"), "--devipc-only=MEM-011")
    assert (run.status, run.result("MEM-011")) == (0, "pass"), run.output
    (test,) = run.document["tests"]
    assert test["parameters"] == "memfd"
    assert test["demand"].endswith(".")
    assert test["clause"] == "interfaces/memory.py: open"
    assert 0 < test["duration_s"] < 60
    assert run.document["backend"] == "host"
    assert run.document["device"]["uuid"].startswith("host-")
    assert run.document["facts"]["driver"] == "built in"
    assert run.document["date"].startswith("20")


def test_deviation(tmp_path: Path) -> None:
    run = run_suite(tmp_path, profile("known_short"), "--devipc-only=MEM-011", "--devipc-deadline=2")
    assert (run.status, run.result("MEM-011")) == (0, "deviation"), run.output
    assert "https://example.org/issues/1" in run.reasons("MEM-011")
    assert "maps a page less" in run.reasons("MEM-011")


def test_deviation_that_passes_is_named(tmp_path: Path) -> None:
    run = run_suite(tmp_path, profile("passes_anyway"), "--devipc-only=MEM-011")
    assert (run.status, run.result("MEM-011")) == (0, "pass")
    assert "MEM-011 is declared as a deviation and passed" in run.output


def test_skip(tmp_path: Path) -> None:
    run = run_suite(tmp_path, HOST, "--devipc-only=DISC-010")
    assert (run.status, run.result("DISC-010")) == (0, "skip")
    assert run.reasons("DISC-010") == "no device here is a slice"


def test_unlisted_skip_fails_where_skips_are_not_allowed(tmp_path: Path) -> None:
    run = run_suite(tmp_path, profile("no_skips"), "--devipc-only=DISC-010")
    assert (run.status, run.result("DISC-010")) == (1, "fail"), run.output
    run = run_suite(tmp_path, profile("listed_skips"), "--devipc-only=DISC-010")
    assert (run.status, run.result("DISC-010")) == (0, "skip"), run.output


def test_expected_kind_that_is_missing_fails(tmp_path: Path) -> None:
    run = run_suite(tmp_path, profile("wants_pools"), "--devipc-only=MEM-027")
    results = {test["parameters"]: test["result"] for test in run.document["tests"]}
    assert results == {"memfd": "pass", "pool": "fail"}, run.output


def test_error_of_the_suite_is_no_verdict(tmp_path: Path) -> None:
    broken = tmp_path / "test_broken.py"
    broken.write_text(
        "from devipc.conformance import case\n"
        "@case('OWN-900', 'A case of a vendor breaks by itself.', clause='spi.py: nothing')\n"
        "def test_broken(rig):\n"
        "    raise RuntimeError('a slip of the case')\n"
        "@case('OWN-901', 'A role of a vendor that does not exist is asked for.', clause='spi.py: nothing')\n"
        "def test_no_role(peer):\n"
        "    peer.call(lambda worker, fds: None)\n"
    )
    run = run_suite(tmp_path, HOST, paths=(str(broken),))
    assert run.status == 1
    assert run.document["cases"] == {"OWN-900": "error", "OWN-901": "error"}, run.output
    assert "a slip of the case" in run.reasons("OWN-900")
    assert run.document["counts"]["fail"] == 0


@pytest.mark.long
@pytest.mark.timeout(120)
def test_process_that_is_stuck_is_ended_with_its_results(tmp_path: Path) -> None:
    run = run_suite(
        tmp_path, "--devipc-backend=tests.suite.sync_liars:stuck", "--devipc-only=DISC-203", "--devipc-deadline=1"
    )
    assert run.status == 70, run.output
    assert run.result("DISC-203") == "fail"
    assert "still stuck" in run.reasons("DISC-203")
    assert "create_marker" in run.output, "the stacks show where"


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--devipc-backend=no_such_backend", "no backend 'no_such_backend' is installed"),
        ("--devipc-backend=no.such:thing", "cannot be loaded"),
        ("--devipc-profile=tests.suite.profiles:HOST", "no BackendProfile"),
        ("--devipc-device=7", "no backend was named"),
    ],
)
def test_run_that_cannot_begin_says_why(tmp_path: Path, argument: str, words: str) -> None:
    run = run_suite(tmp_path, argument)
    assert run.status == 4
    assert words in run.output
    assert not run.document


def test_unknown_device_is_refused(tmp_path: Path) -> None:
    run = run_suite(tmp_path, HOST, "--devipc-device=GPU-none")
    assert run.status == 4
    assert "no device GPU-none" in run.output
