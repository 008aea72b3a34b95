"""Processes whose ``/proc`` was mounted for another pid namespace can still talk to each other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from devipc.channel.liveness import pid_of_pidfd

ROOT = Path(__file__).parents[2]
TALK = """
import subprocess, sys
from devipc.session import Exporter
exporter = Exporter(sys.argv[1], strategy="polling")
code = "import sys; from devipc.session import Importer; print(Importer(sys.argv[1]).names())"
done = subprocess.run([sys.executable, "-c", code, exporter.path], capture_output=True, text=True, timeout=30)
exporter.close()
sys.exit(done.stdout + done.stderr if done.stdout != "[]\\n" else 0)
"""


def test_numbers_of_a_foreign_proc_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.pidfd_open(os.getpid())
    readlink = os.readlink
    try:
        assert pid_of_pidfd(fd) == os.getpid()
        monkeypatch.setattr(os, "readlink", lambda path: "1" if path == "/proc/self" else readlink(path))
        assert pid_of_pidfd(fd) == 0
    finally:
        os.close(fd)


def test_a_pid_namespace_without_a_proc_of_its_own(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if (
        unshare is None
        or subprocess.run([unshare, "--pid", "--fork", "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no right to make a pid namespace")
    done = subprocess.run(
        [unshare, "--pid", "--fork", sys.executable, "-c", TALK, str(tmp_path / "x.sock")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
