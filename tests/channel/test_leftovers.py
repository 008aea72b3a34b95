"""Sockets of owners that were killed: swept by whoever comes next, while those of the living stay."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from devipc.channel.listener import Listener, connect, remove_leftovers

ROOT = Path(__file__).parents[2]
KILLED = """
import os, signal, sys
from devipc.channel.listener import Listener
listener = Listener(sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
"""


def leave(path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT, timeout=30, check=False)
    assert path.exists()


def test_only_what_dead_owners_left_is_removed(tmp_path: Path) -> None:
    leave(tmp_path / "dead.sock")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "lonely.sock").write_text("no lock beside it")
    os.symlink("notes.txt", tmp_path / "link.sock.lock")
    with Listener(tmp_path / "live.sock") as live:
        remove_leftovers(str(tmp_path))
        left = sorted(os.listdir(tmp_path))
        assert left == ["link.sock.lock", "live.sock", "live.sock.lock", "lonely.sock", "notes.txt"]
        connect(live.path, timeout_s=5).close()
    remove_leftovers(str(tmp_path / "absent"))


def test_sweeping_disturbs_nobody_who_is_just_beginning_to_listen(tmp_path: Path) -> None:
    stop = threading.Event()

    def sweep() -> None:
        while not stop.is_set():
            remove_leftovers(str(tmp_path))

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for number in range(300):
            with Listener(tmp_path / f"{number}.sock") as listener:
                connect(listener.path, timeout_s=5).close()
    finally:
        stop.set()
        sweeper.join()
    assert os.listdir(tmp_path) == []
