"""The leak guard of ``tests/conftest.py`` must see what it is there for, and let honest tests pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

# What the leaking tests leave ends with the inner run: "cat" and the thread see their pipe close.
LEAKY = """
import os, socket, subprocess, tempfile, threading

kept = []

def test_process():
    kept.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))

def test_zombie():
    kept.append(subprocess.Popen(["true"]))

def test_thread():
    reader, writer = os.pipe()
    threading.Thread(target=os.read, args=(reader, 1), daemon=True).start()

def test_socket():
    kept.append(socket.socketpair())

def test_memory_file():
    os.memfd_create("left")

def test_temporary_file():
    os.close(tempfile.mkstemp()[0])
"""
HONEST = """
import os, subprocess, tempfile, threading

def test_honest(tmp_path):
    subprocess.run(["true"], check=True)
    thread = threading.Thread(target=print)
    thread.start()
    thread.join()
    os.close(os.memfd_create("closed"))
    (tmp_path / "file").write_text("pytest keeps these")
    with tempfile.NamedTemporaryFile():
        pass
"""


def test_the_guard_sees_each_kind_of_leak(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text() + "\n_SETTLE_S = 0.2\n")
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    (tmp_path / "test_honest.py").write_text(HONEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "t"), str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert "7 passed, 6 errors" in done.stdout, done.stdout + done.stderr
    for kind in ("process", "zombie", "thread", "socket", "memory_file", "temporary_file"):
        assert f"ERROR test_leaky.py::test_{kind} - Failed: the test left behind" in done.stdout
