"""The probing commands as a person meets them: on a terminal, in a pipe, interrupted, and on a full disk."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from devipc.cli.matrix import command
from tests.probe.tool import SCRIPT, environment, run, site

__all__ = ["site"]

HOST = environment(only="host")
COLOUR = re.compile(r"\x1b\[[0-9;]*?3[0-7][0-9;]*m")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_a_terminal(*arguments: str, **more: str) -> tuple[int, str]:
    """Run the command with a terminal of 80 columns; return its exit code and what it drew."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [SCRIPT, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            env={**HOST, "TERM": "xterm-256color", "COLUMNS": "80", **more},
        )
    finally:
        os.close(theirs)
    drawn = b""
    try:
        while select.select([ours], [], [], 50)[0]:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the last writer is gone
                break
            drawn += part
        code = process.wait(10)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return code, drawn.decode()


def test_on_a_terminal_there_are_tables_colours_and_progress() -> None:
    code, drawn = on_a_terminal("probe", "--backend", "host")
    assert code == 0
    assert COLOUR.search(drawn)
    assert "host 0: memory.memfd" in drawn  # the progress says what is done
    lines = [CONTROL.sub("", line) for line in drawn.replace("\r", "\n").splitlines()]
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("┃ check") for line in lines)
    assert any("required: memory: holds" in line for line in lines)


def test_without_colour_nothing_is_coloured() -> None:
    code, drawn = on_a_terminal("probe", "--backend", "host", NO_COLOR="1")
    assert (code, COLOUR.search(drawn)) == (0, None)
    assert "sync.stream_memop" in drawn


def test_in_a_pipe_there_is_plain_text() -> None:
    done = run("probe", "--backend", "host", env=HOST)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    checks = [line.split()[:3] for line in done.stdout.splitlines() if re.match(r"  (identity|\w+\.\w+) ", line)]
    assert len(checks) == 14
    assert {verdict for _, verdict, _ in checks} == {"yes"}
    assert ["memory.memfd", "yes", "yes"] in checks


def test_the_matrix_of_one_device() -> None:
    done = run("matrix", "--backend", "host", env=HOST)
    assert (done.returncode, done.stderr) == (0, "")
    assert "  host 0  memfd + stream_memop\n" in done.stdout
    assert "cell: handle kind + completion strategy" in done.stdout


@pytest.mark.long
def test_the_matrix_of_two_devices_says_why_a_cell_is_not_the_best(site: Path) -> None:
    done = run("matrix", "--json", "--backend", "faulty", env=environment(site, fault="no_waits"))
    document = json.loads(done.stdout)
    assert (done.returncode, document["schema"], document["exit_code"]) == (0, "devipc.matrix/1", 0)
    cells = {(cell["exporter"], cell["importer"]): cell for cell in document["cells"]}
    assert len(cells) == 4
    own, other = cells["faulty 0", "faulty 0"], cells["faulty 0", "faulty 1"]
    assert (own["kind"], own["strategy"]) == ("memfd", "host_flag")
    assert [reason.split(":")[0] for reason in own["reasons"]] == ["sync.stream_memop no"]
    assert (other["kind"], other["strategy"]) == ("", "host_flag")
    assert "its own backend and device only; remedy: " in other["reasons"][0]


def test_a_process_without_standard_streams_probes_all_the_same(site: Path) -> None:
    command = f"{SCRIPT} probe --backend host --json 3>&1 <&- >&- 2>&- >&3 3>&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=50, env=HOST, check=False)
    assert (done.returncode, json.loads(done.stdout)["counts"]["yes"] > 10) == (0, True), done.stdout


def test_a_matrix_that_fails_is_a_document_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_disk(**_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("devipc.cli.matrix.run_matrix", no_disk)
    done = CliRunner().invoke(command, ["--json"])
    document = json.loads(done.stdout)
    assert (done.exit_code, document["exit_code"], document["cells"]) == (4, 4, [])
    assert "No space left" in document["error"]


def test_the_matrix_without_a_device_and_with_one_that_cannot_be_shared(site: Path) -> None:
    refused = run("matrix", "--backend", "faulty", "--device", "0", env=environment(site, fault="map_refused"))
    assert refused.returncode == 1
    assert "- + stream_memop *" in refused.stdout
    assert "memory.memfd no: in the importer: not across this border; remedy: give both" in refused.stdout
    assert run("matrix", "--backend", "faulty", env=environment(site, fault="list_none")).returncode == 3


def test_env_takes_out_what_is_private(tmp_path: Path) -> None:
    home = tmp_path / "ada-lovelace"
    home.mkdir()
    secret = {"HOME": str(home), "LOGNAME": "ada-lovelace", "CUDA_VISIBLE_DEVICES": f"{home}/x"}
    secret["DEVIPC_X"] = "GPU-d0e15170-0a5c-4d2b-9f31-000000000001"
    done = run("env", env=HOST | secret)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ada-lovelace" not in done.stdout
    assert "  CUDA_VISIBLE_DEVICES: ~/x\n" in done.stdout
    assert "  DEVIPC_X: GPU-d0e15170-...\n" in done.stdout
    assert "backend host:\n  driver: built in\n" in done.stdout
    facts = json.loads(run("env", "--json", "--no-backends", env=HOST | secret).stdout)
    assert facts["schema"] == "devipc.env/1"
    assert "backend host" not in facts["facts"]


def test_env_of_a_backend_that_crashes_is_a_fact(site: Path) -> None:
    done = run("env", env=environment(site, fault="import_segv"))
    assert done.returncode == 0
    assert "backend faulty:\n  error: the exporter's process crashed (signal 11)\n" in done.stdout


def test_explain_says_what_a_check_does() -> None:
    done = run("explain", "memory.vmm_fd", env=HOST)
    assert (done.returncode, done.stderr) == (0, "")
    assert "devipc probe --require memory=vmm_fd" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    unknown = run("explain", "memory.vmmfd", env=HOST)
    assert (unknown.returncode, "did you mean memory.vmm_fd?" in unknown.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("probe", "--require", "speed"), 2),
        (("probe", "--timeout", "0"), 2),
        (("probe", "--timeout", "inf"), 2),
        (("env", "--timeout", "nan"), 2),
        (("probe", "--backend", "nobody"), 3),
        (("probe", "--backend", "host", "--device", "nowhere"), 3),
        (("matrix", "--backend", "nobody"), 3),
        (("explain", "nothing"), 2),
        (("explain",), 0),
    ],
)
def test_exit_codes(arguments: tuple[str, ...], code: int) -> None:
    done = run(*arguments, env=HOST)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert ("remedy" in done.stderr or "Usage" in done.stderr) is (code != 0)


def test_an_output_that_takes_nothing_is_a_failure_of_the_tool() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [SCRIPT, "probe", "--backend", "host", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=50,
            env=HOST,
            check=False,
        )
    assert (done.returncode, "Traceback" in done.stderr) == (4, False)


def children_of_probes(mark: str) -> list[str]:
    """Return the processes of a probe that carry ``mark`` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_probe_is_ended_in_the_middle(site: Path, number: signal.Signals) -> None:
    mark = f"DEVIPC_TEST_OPENED={site}/opened"
    env = environment(site, fault="map_hang", DEVIPC_TEST_OPENED=f"{site}/opened")
    process = subprocess.Popen(
        [SCRIPT, "probe", "--backend", "faulty", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    )
    try:
        deadline = time.monotonic() + 30
        while not (site / "opened").exists() or (site / "opened").read_text().count("\n") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.2)
        assert len(children_of_probes(mark)) == 5  # itself, and two children, each with who adopts what it leaves
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out) == (130 if number is signal.SIGINT else -signal.SIGKILL, b"")
    assert b"Traceback" not in err
    deadline = time.monotonic() + 5
    while (left := children_of_probes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


BARE = "import click, ctypes, importlib.metadata, json, socket, subprocess, rich.console, rich.table"
"""What the command imports that is not devipc's."""
BARE_STARTS = 20
"""What a probe may cost, in bare starts. 11 to 15 were measured with three vendors' backends installed, on two cores of
a slow machine on 2026-11-30; 22 where both processes of the checks waited in a loop for a second more."""


def processor_s(*command: str) -> float:
    """Run a command; return what it and its children took of the processors."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, timeout=50, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.timing
def test_without_a_driver_it_takes_less_than_two_seconds() -> None:
    """All installed backends, in processor time; where interpreters start slowly, as much longer as they take."""
    starts = [processor_s(sys.executable, "-c", BARE) for _ in range(5)]
    took_s = processor_s(SCRIPT, "probe")
    starts += [processor_s(sys.executable, "-c", BARE) for _ in range(5)]  # the machine may have become another
    bare_s = sum(starts) / len(starts)
    print(f"devipc probe: {took_s:.2f} s of processor time, {took_s / bare_s:.1f} times a bare start of {bare_s:.3f} s")
    assert took_s < max(2.0, BARE_STARTS * bare_s)
