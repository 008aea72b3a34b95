"""The other process of the session tests: a scripted exporter or importer that can end itself at its N-th call.

Run as ``python -m tests.session.worker ROLE OPTIONS-AS-JSON``. It prints JSON lines and ends with its standard input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from typing import Any

from devipc.calltrace import observe
from devipc.completion import choose
from devipc.errors import DevIPCError
from devipc.probe.stage import Stage
from devipc.registry import load_backend
from devipc.session import Exporter, Importer

TIMEOUT_S = 10.0
VALUES = 4
NBYTES = 64 * 1024


def say(**answer: Any) -> None:
    """Print one JSON line."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


class Countdown:
    """Counts traced calls, and SIGKILLs this process just before the N-th of them."""

    def __init__(self, kill_at: int) -> None:
        self.calls = 0
        self._kill_at = kill_at

    def __call__(self, _call: str) -> None:
        self.calls += 1
        if self.calls == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10)


def exporter(options: dict[str, Any]) -> None:
    """Share a block, signal a few values, take as many back, leave."""
    with Exporter(strategy=options["strategy"], timeout_s=TIMEOUT_S) as session:
        block = session.allocate(NBYTES)
        with Stage(session.device, NBYTES) as stage:
            stage.view[:] = b"\x07" * NBYTES
            stage.store(block.ptr, NBYTES)
            stage.synchronize()
            session.share("block", block)
            there = session.create_fence("there")
            say(path=session.path, pid=os.getpid())
            peer = session.wait_peer()
            for n in range(1, VALUES + 1):
                there.signal(stage.stream, n)
            say(signalled=VALUES)
            for line in iter(sys.stdin.readline, ""):
                if line.strip() == "back":
                    with peer.open_fence("back") as back:
                        back.synchronize(VALUES, TIMEOUT_S)
                    say(back=VALUES)
                elif line.strip() == "decision":
                    say(decision=peer.decision.to_json())
                elif line.strip() == "end":
                    return


def importer(options: dict[str, Any]) -> None:
    """Map the parent's block, follow its fence, signal back, leave."""
    with Importer(options["path"], strategy=options["strategy"], timeout_s=TIMEOUT_S) as session:
        with session.open("block") as block, Stage(session.device, NBYTES) as stage:
            there = session.open_fence("there")
            for n in range(1, VALUES + 1):
                there.wait(stage.stream, n, timeout_s=TIMEOUT_S)
                stage.load(block.ptr, NBYTES)
            stage.synchronize()
            say(content=bytes(stage.view[:16]).hex(), pid=os.getpid())
            back = session.create_fence("back")
            for n in range(1, VALUES + 1):
                back.signal(stage.stream, n)
            stage.synchronize()
            say(signalled=VALUES)
            sys.stdin.readline()
            there.close()


def pool(options: dict[str, Any]) -> None:
    """Share blocks whose bytes are their number, and tell how many are lent when asked, until told to end."""
    with Exporter(strategy=options["strategy"], timeout_s=TIMEOUT_S) as session, Stage(session.device, NBYTES) as stage:
        for number in range(options["blocks"]):
            block = session.allocate(NBYTES)
            stage.view[:] = bytes([number]) * NBYTES
            stage.store(block.ptr, NBYTES)
            stage.synchronize()
            session.share(f"block/{number}", (block.ptr + 256, NBYTES - 512))
        say(path=session.path, pid=os.getpid())
        while sys.stdin.readline() == "tell\n":
            say(lent=len(session.shares._tokens))


def victim(options: dict[str, Any]) -> None:
    """Export, fill memory of a given size, then do nothing until killed."""
    ballast = bytearray(options["ballast_mib"] << 20)
    for at in range(0, len(ballast), 4096):
        ballast[at] = 1
    exporter(options)


def decider(options: dict[str, Any]) -> None:
    """Choose a strategy with the parent by live trials, again and again."""
    with Importer(options["path"], timeout_s=TIMEOUT_S) as session:
        while True:
            choose(session.device, session.peer, backend=load_backend("host"))


ROLES = {"exporter": exporter, "importer": importer, "pool": pool, "victim": victim, "decider": decider}


def main() -> None:
    """Run the role; report how many calls it took."""
    role, options = sys.argv[1], json.loads(sys.argv[2])
    countdown = Countdown(options.get("kill_at", 0))
    with ExitStack() as stack:
        if options.get("count", True):
            stack.enter_context(observe(countdown))
        try:
            ROLES[role](options)
        except DevIPCError as error:
            say(error=type(error).__name__, message=str(error))
    say(calls=countdown.calls)


if __name__ == "__main__":
    main()
