"""An interrupt at any moment ends the demo in one line, and neither process leaves a socket behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from devipc.channel.listener import default_directory

SCRIPT = str(Path(sys.executable).with_name("devipc"))
ARGUMENTS = ["demo", "--hand-overs", "100000", "--page-kib", "4"]


def sockets() -> list[str]:
    return os.listdir(default_directory())


def test_the_demo_removes_the_socket_of_the_process_that_it_killed() -> None:
    done = subprocess.run(
        [SCRIPT, "demo", "--hand-overs", "20", "--no-cache"], capture_output=True, timeout=50, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert sockets() == []


@pytest.mark.parametrize("after_s", [0.05, 0.15, 0.25, 0.4, 0.7, 1.2])
def test_an_interrupt_of_both_processes_is_one_line(after_s: float) -> None:
    demo = subprocess.Popen(
        [SCRIPT, *ARGUMENTS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        time.sleep(after_s)
        os.killpg(demo.pid, signal.SIGINT)  # as a terminal does
        out, err = demo.communicate(timeout=20)
    finally:
        if demo.poll() is None:
            demo.kill()
            demo.communicate()
    assert demo.returncode in (130, -signal.SIGINT)  # the latter while Python itself is starting
    assert out == ""
    if demo.returncode == 130:
        assert err in ("", "interrupted; nothing was left behind\n")
    assert sockets() == []


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.parametrize("words", ["scheduler A starts: 0 of 1", "B finds A's pages in host memory: 1 of 6"])
@pytest.mark.parametrize("whole_group", [False, True])
def test_an_interrupt_ends_schedulers_and_daemon(words: str, whole_group: bool) -> None:
    pytest.importorskip("msgspec")
    demo = subprocess.Popen(
        [SCRIPT, "demo", "--hand-overs", "4000", "--page-kib", "4", "--progress"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert demo.stderr is not None
    try:
        said: list[str] = []
        while words not in said:
            said.append(demo.stderr.readline().rstrip("\n"))
            assert said[-1], (said, demo.communicate(timeout=20))
        (os.killpg if whole_group else os.kill)(demo.pid, signal.SIGINT)
        out, err = demo.communicate(timeout=20)
    finally:
        if demo.poll() is None:
            demo.kill()
            demo.communicate()
    assert (demo.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted; nothing was left behind"
    assert "Traceback" not in err
    left = [line for line in _commands_of_session(demo.pid) if line]
    assert not left


def _commands_of_session(session: int) -> list[bytes]:
    """Command lines of the processes of a session that are there, zombies left out."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append((process / "cmdline").read_bytes())
        except OSError:
            continue
    return found


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_output_that_takes_nothing_is_no_traceback(options: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [SCRIPT, "demo", "--hand-overs", "20", "--no-cache", *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=50,
            check=False,
        )
    assert "Traceback" not in done.stderr
    assert (done.returncode, "No space left" in done.stderr) == (1, True)
