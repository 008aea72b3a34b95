"""Whatever a backend does is a row: lies are seen, crashes and hangs cost one row each, the rest is still found out."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from devipc.adopting import end_adopted
from devipc.probe import pair
from devipc.probe.pair import Target
from devipc.probe.runner import MAX_HANGS, Checks
from tests.probe.tool import environment, probe, row, run, verdicts

FAULTY = Target("faulty", "FAULTY-0")

# fault, check, verdict, part of the reason
ROWS = [
    ("", "memory.memfd", "yes", ""),
    ("wrong_offset", "memory.memfd", "broken", "the importer sees other bytes than were shared"),
    ("map_copy", "memory.memfd", "broken", "does not see what the exporter wrote later"),
    ("map_spoils", "memory.memfd", "broken", "data changed when the memory was opened"),
    ("close_spoils", "memory.memfd", "broken", "data changed when the importer closed"),
    ("old_bytes", "memory.memfd", "broken", "holds old bytes"),
    ("map_refused", "memory.memfd", "no", "in the importer: not across this border"),
    ("map_segv", "memory.memfd", "broken", "the importer's process crashed (signal 11)"),
    ("export_segv", "memory.memfd", "broken", "the exporter's process crashed (signal 11)"),
    ("export_exit", "memory.memfd", "broken", "ended without an answer (exit status 7)"),
    ("export_raise", "memory.memfd", "broken", "raised ZeroDivisionError: by hand"),
    ("export_escape", "memory.memfd", "broken", r"raised ValueError: \ud800\x1b[2Jxxxx"),
    ("no_register", "memory.memfd", "untested", "cannot be compared without registered host memory"),
    ("no_register", "sync.polling", "yes", ""),
    ("pin_limit", "sync.polling", "yes", ""),
    ("pin_limit", "memory.memfd", "yes", ""),
    ("pin_limit", "mechanism.host", "untested", "there is no work to look at: 1 MiB may be pinned"),
    ("events_done", "mechanism.event", "broken", "reported before the work in front of it is done"),
    ("events_done", "sync.event", "broken", "reported as reached"),
    ("markers_done", "mechanism.host", "broken", "never recorded is done"),
    ("markers_done", "sync.polling", "broken", "reported as reached"),
    ("markers_late", "sync.polling", "broken", "reported as reached"),
    ("markers_done", "transfer.order", "broken", "never recorded is done"),
    ("short_copy", "transfer.copy", "broken", "1 of 1048576 bytes are wrong"),
    ("no_waits", "mechanism.stream_memop", "no", "no word waits"),
    ("device_segv", "identity", "broken", "process crashed (signal 11)"),
    ("device_busy", "identity", "no", "the device is busy"),
    ("claims_raise", "identity", "broken", "raised OSError: no such node"),
    ("two_sizes", "identity", "broken", "see different ones: total_nbytes"),
]


@pytest.fixture
def checks(site: Path, monkeypatch: pytest.MonkeyPatch) -> Checks:
    """Checks of the faulty backend's first device; this process itself never loads it."""
    for name, value in environment(site).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    return Checks(FAULTY, FAULTY, timeout_s=20)


@pytest.mark.parametrize(("fault", "check", "verdict", "reason"), ROWS)
def test_a_fault_is_a_row(
    checks: Checks, monkeypatch: pytest.MonkeyPatch, fault: str, check: str, verdict: str, reason: str
) -> None:
    monkeypatch.setenv("DEVIPC_TEST_FAULT", fault)
    with checks:
        found = (checks.open() if check == "identity" else checks.run(check, None)).capability
    assert found.verdict == verdict, found
    assert reason in found.reason
    assert len(found.reason) + len(found.evidence) < 10_000
    if verdict == "broken" and ("crashed" in reason or "raised" in reason):
        assert "faulty.py" in found.evidence  # the stack says whose fault it is


@pytest.mark.once
@pytest.mark.parametrize("fault", ["map_hang", pytest.param("device_hang", marks=pytest.mark.long)])
def test_a_hang_is_ended_and_its_stack_shown(checks: Checks, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setenv("DEVIPC_TEST_FAULT", fault)
    with Checks(FAULTY, FAULTY, timeout_s=2) as checks:
        started = time.monotonic()
        found = (checks.open() if fault == "device_hang" else checks.run("memory.memfd", None)).capability
        assert time.monotonic() - started < 12
        monkeypatch.setenv("DEVIPC_TEST_FAULT", "")
        assert checks.run("memory.memfd", None).capability  # new processes: nothing of it is left
    assert (found.verdict, "in hang" in found.evidence) == ("broken", True)
    process = "importer" if fault == "map_hang" else "exporter"
    assert found.reason == f"the {process}'s process did not answer within 2 s"


@pytest.mark.long
def test_a_process_that_no_descriptor_can_be_had_for_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[subprocess.Popen[bytes]] = []

    def end(process: subprocess.Popen[bytes]) -> None:
        end_adopted(process)
        ended.append(process)

    def full(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "pidfd_open", full)
    monkeypatch.setattr(pair, "end_adopted", end)
    with pytest.raises(OSError, match="Too many open files"):
        pair.Pair(FAULTY, None)
    assert [process.returncode is not None for process in ended] == [True]
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_device_that_always_hangs_is_given_up(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVIPC_TEST_FAULT", "map_hang")
    with Checks(FAULTY, FAULTY, timeout_s=1) as checks:
        found = [checks.run("memory.memfd", None).capability for _ in range(MAX_HANGS + 1)]
    assert [one.verdict for one in found] == ["broken"] * MAX_HANGS + ["untested"]
    assert "not tried" in found[-1].reason


@pytest.mark.once
@pytest.mark.parametrize(
    ("fault", "code", "found"),
    [
        pytest.param("", 0, {}, marks=pytest.mark.long),
        ("map_segv", 1, {"memory.memfd": "broken"}),
        pytest.param(
            "no_sync", 0, {"mechanism": "no", "sync.stream_memop": "no", "sync.event": "no"}, marks=pytest.mark.long
        ),
        ("device_segv", 1, {"identity": "broken"}),
        pytest.param("claims_no_text", 0, {}, marks=pytest.mark.long),
    ],
)
def test_the_rest_is_found_out_all_the_same(site: Path, fault: str, code: int, found: dict[str, str]) -> None:
    document = probe("--backend", "faulty", "--device", "1", env=environment(site, fault=fault), code=code)
    assert verdicts(document) == found
    assert all(row(document, check)["remedy"] for check in found)
    assert {one["device"] for one in document["checks"]} == {"FAULTY-1"}


@pytest.mark.long
@pytest.mark.parametrize("fault", ["no_memory", "no_transfer"])
def test_a_missing_interface_is_one_row_and_a_reason_in_those_that_need_it(site: Path, fault: str) -> None:
    document = probe("--backend", "faulty", "--device", "0", env=environment(site, fault=fault), code=1)
    missing = fault.removeprefix("no_")
    assert row(document, missing)["reason"] == "left out for a test"
    assert set(verdicts(document).values()) == {"no", "untested"}
    yes = {check for check, verdict in verdicts(document, but="").items() if verdict == "yes"}
    wanted = {"no_memory": {"identity", "sync.host_flag", "sync.polling", "sync.stream_memop", "sync.event"}}
    assert yes == wanted.get(fault, {"identity"})


@pytest.mark.once
@pytest.mark.parametrize(
    ("fault", "verdict", "reason"),
    [
        ("import_segv", "broken", "crashed (signal 11)"),
        ("import_hang", "broken", "timed out after 2 s"),
        pytest.param("import_raise", "no", "loading it raised RuntimeError: no luck", marks=pytest.mark.long),
        pytest.param("list_none", "no", "no driver", marks=pytest.mark.long),
        ("list_no_text", "broken", "uuid of a device is int, not str"),
        pytest.param("list_no_name", "broken", "a device has no uuid", marks=pytest.mark.long),
        pytest.param("list_escape", "broken", "name of a device is not at most 128 pri", marks=pytest.mark.long),
        pytest.param("list_long", "broken", "uuid of a device is not at most 128 pri", marks=pytest.mark.long),
    ],
)
def test_a_plugin_that_cannot_be_loaded_costs_its_own_row(site: Path, fault: str, verdict: str, reason: str) -> None:
    document = probe("--timeout", "2", env=environment(site, fault=fault), code=0)
    backends = {one["backend"]: one for one in document["backends"]}
    assert (backends["faulty"]["verdict"], backends["faulty"]["devices"]) == (verdict, [])
    assert reason in backends["faulty"]["reason"]
    assert backends["faulty"]["remedy"]
    assert {one["backend"] for one in document["checks"]} == {"host"}
    assert verdicts(document) == {}


def test_nothing_to_probe_is_an_exit_code_of_its_own(site: Path) -> None:
    env = environment(site, fault="import_raise")
    assert probe("--backend", "faulty", env=env, code=3)["checks"] == []
    assert probe("--backend", "nobody", env=env, code=3)["backends"][0]["verdict"] == "no"
    assert probe("--device", "no-such-device", env=environment(site), code=3)["checks"] == []


def test_no_other_device_is_opened_than_was_asked_for(site: Path) -> None:
    opened = site / "opened"
    env = environment(site, DEVIPC_TEST_OPENED=str(opened))
    document = probe("--backend", "faulty", "--device", "FAULTY-1", env=env, code=0)
    assert set(opened.read_text().split()) == {"FAULTY-1"}
    assert [info["uuid"] for info in document["backends"][0]["devices"]] == ["FAULTY-0", "FAULTY-1"]


LIBRARY = """
import os, sys
from devipc.probe.runner import run_probe
from devipc.registry import check_backend_in_child
assert check_backend_in_child("faulty", timeout_s=50.0).devices
with open(os.environ["DEVIPC_TEST_RUNAWAYS"]) as file:
    assert file.read(), "nothing was hidden"
run_probe(backend="faulty", devices=["0"], timeout_s=50.0)
print("probed", flush=True)
sys.stdin.readline()  # still there, and adopts nothing
"""


def left_of(hidden: Path) -> list[int]:
    """End the processes that were hidden, and return which there were."""
    left = [int(pid) for pid in hidden.read_text().split() if Path(f"/proc/{pid}").exists()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


@pytest.mark.once
@pytest.mark.parametrize(
    ("command", "fault", "code"),
    [
        (("probe", "--backend", "faulty", "--device", "0"), "run_away_segv", 1),
        pytest.param(("probe", "--backend", "faulty", "--device", "0"), "run_away", 0, marks=pytest.mark.long),
        (("backends",), "run_away", 0),
        pytest.param(("matrix", "--backend", "faulty", "--device", "0"), "run_away", 0, marks=pytest.mark.long),
        pytest.param(("env",), "run_away", 0, marks=pytest.mark.long),
    ],
)
def test_processes_that_a_backend_hides_end_with_the_command(
    site: Path, command: tuple[str, ...], fault: str, code: int
) -> None:
    hidden = site / "hidden"
    done = run(*command, "--json", env=environment(site, fault=fault, DEVIPC_TEST_RUNAWAYS=str(hidden)))
    assert not left_of(hidden)
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize("fault", ["run_away", "run_away_segv"])
def test_processes_that_a_backend_hides_end_with_the_call_of_a_library(site: Path, fault: str) -> None:
    """Also those of a plugin that then crashes."""
    hidden = site / "hidden"
    env = environment(site, fault=fault, DEVIPC_TEST_RUNAWAYS=str(hidden))
    with subprocess.Popen(
        [sys.executable, "-c", LIBRARY], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == "probed\n"
        left = left_of(hidden)
        user.communicate("end\n", timeout=30)
    assert not left
    assert user.returncode == 0


def test_processes_that_a_backend_hides_end_with_whoever_asked(site: Path) -> None:
    """Who is killed ends nothing any more."""
    hidden = site / "hidden"
    env = environment(site, fault="run_away_hang", DEVIPC_TEST_RUNAWAYS=str(hidden))
    program = 'from devipc.registry import check_backend_in_child; check_backend_in_child("faulty", timeout_s=50.0)'
    with subprocess.Popen([sys.executable, "-c", program], env=env) as user:
        deadline = time.monotonic() + 30.0
        while not (hidden.exists() and hidden.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        user.kill()
    deadline = time.monotonic() + 10.0
    while any(Path(f"/proc/{pid}").exists() for pid in hidden.read_text().split()):
        assert time.monotonic() < deadline, left_of(hidden)
        time.sleep(0.01)
