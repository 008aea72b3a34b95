"""Clients of other users: those on the list get messages and may not end the daemon, all others get nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from devipc.hicache.operations import Event
from devipc.hicache.wire import protocol as p
from tests.hicache.daemon.daemons import TIMEOUT_S, Daemon, RawClient

ROOT = Path(__file__).resolve().parents[3]
LISTED, STRANGER = 65534, 65533


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_users_on_the_list_are_served_and_others_are_not() -> None:
    # Not in the temporary folder of the run, which other users cannot enter.
    folder = f"/var/tmp/devipc-test-{os.getpid()}"
    os.mkdir(folder, 0o755)
    os.chmod(folder, 0o755)
    try:
        one = Daemon(folder, options={"allow_uids": LISTED})
        try:
            assert said(one.path, LISTED) == {"rings": "way", "messages": "completed", "drain": "PeerRefused"}
            mine = RawClient(one.path, client=bytes(16))  # the id that the other user will say is its own
            assert said(one.path, LISTED)["messages"] == "client"
            assert mine.ask(p.PingFrame(op=1)).event is Event.COMPLETED
            mine.close()
            assert said(one.path, STRANGER).get("messages") != "completed"
            assert f"user {STRANGER}" in one.said()
            assert one.status()["state"] == "running"
            assert one.end() == 0
        finally:
            one.close()
    finally:
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def said(path: str, uid: int) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hicache.daemon.other_user", path, str(uid)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        assert "PeerGone" in done.stderr  # hung up on while it greeted
        return {}
    found: dict[str, str] = json.loads(done.stdout)
    return found
