"""Sessions between two users, who have to name each other, and what a failing greeting leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from devipc.channel.link import Link
from devipc.errors import PeerGone, ResourceExhausted
from devipc.session import Exporter, Importer
from tests.session.processes import ROOT, eventually, grown, holdings
from tests.session.worker import TIMEOUT_S

OTHER_UID = 65534
SOON_S = 3.0  # where a side waits in vain for the other

STRANGER = """
import os, sys
import numpy
from devipc.errors import DevIPCError
from devipc.registry import load_backend
from devipc.session import Exporter, Importer
folder, other, *allowed = sys.argv[1:]
with Exporter() as warm, Importer(warm.path) as up:  # all modules, while they can still be read
    warm.share("warm", warm.allocate(4096))
    up.open("warm").to_numpy()
os.chdir(folder)
os.setgroups([]); os.setgid(int(other)); os.setuid(int(other))
try:
    with Importer("s", allow_uids=[int(uid) for uid in allowed]) as session, session.open("block") as block:
        print("read", bytes(block.to_numpy()[:4]))
except DevIPCError as error:
    print(type(error).__name__, error.code)
"""


def stranger(folder: Path, *allowed: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, str(folder), str(OTHER_UID), *map(str, allowed)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=40,
    )
    return done.stdout.strip() or done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_two_users_who_name_each_other_share_memory(tmp_path: Path) -> None:
    folder = tmp_path / "meeting"
    folder.mkdir(mode=0o711)
    with Exporter(folder / "s", allow_uids=[OTHER_UID], timeout_s=TIMEOUT_S) as session:
        session.share("block", session.allocate(4096))
        assert stranger(folder, 0) == f"read {bytes(4)!r}"
        assert stranger(folder) == "PeerRefused uid"
    with Exporter(folder / "s", timeout_s=TIMEOUT_S):
        assert stranger(folder, 0) == "PeerRefused connect"


def test_a_link_that_cannot_start_leaves_nothing_on_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    with Exporter(timeout_s=SOON_S) as exporter:
        before = holdings()
        with Importer(exporter.path, timeout_s=SOON_S):
            pass
        assert eventually(lambda: not grown(before, holdings()) and not exporter.peers), (holdings(), before)
        real = Link.start

        refused: list[str] = []

        def start(link: Link) -> None:
            if not refused or threading.current_thread().name in refused:
                raise ResourceExhausted("no thread to be had to talk to a peer", code="threads")
            real(link)

        monkeypatch.setattr(Link, "start", start)
        for threads in (["MainThread"], ["devipc-greet"], []):  # this side, that side, both
            refused[:] = threads
            with pytest.raises((ResourceExhausted, PeerGone)):
                Importer(exporter.path, timeout_s=SOON_S).names()
            assert eventually(lambda: not grown(before, holdings()) and not exporter.peers), (holdings(), before)
        monkeypatch.undo()
        with Importer(exporter.path, timeout_s=SOON_S) as again:
            assert again.names() == []


def test_a_greeting_that_gets_no_thread_leaves_the_exporter_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    with Exporter(timeout_s=TIMEOUT_S) as exporter:
        real = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if thread.name == "devipc-greet":
                raise RuntimeError("can't start new thread")
            real(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(PeerGone):
                Importer(exporter.path, timeout_s=TIMEOUT_S)
        with Importer(exporter.path, timeout_s=TIMEOUT_S) as again:
            assert again.names() == []
