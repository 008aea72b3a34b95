"""A second process for a test: spawned, told what to run, talked to over a socket that carries descriptors.

Owns starting and ending it. A peer runs one function of a test module, ``function(pipe)``; a failure in it fails the
test that waits for its answer.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import plain_pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 30.0


class Pipe:
    """JSON messages with descriptors, both ways; every receive has a deadline."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._end.settimeout(TIMEOUT_S)

    def send(self, message: object = None, fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self._end, [json.dumps(message).encode()], list(fds))

    def receive(self) -> tuple[Any, tuple[int, ...]]:
        data, fds, _, _ = socket.recv_fds(self._end, 60_000, 8)
        if not data:
            raise EOFError("the other process has ended")
        message = json.loads(data)
        if isinstance(message, dict) and "error" in message:
            raise AssertionError(f"the other process failed:\n{message['error']}")
        return message, tuple(fds)

    def ask(self, message: object = None, fds: tuple[int, ...] = ()) -> Any:
        self.send(message, fds)
        return self.receive()[0]


class Peer(Pipe):
    """The test's end, and the process behind the other one."""

    def __init__(self, end: socket.socket, process: subprocess.Popen[bytes]) -> None:
        super().__init__(end)
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(TIMEOUT_S)


@contextlib.contextmanager
def spawn(function: Callable[[Pipe], None]) -> Iterator[Peer]:
    """Run ``function`` in a fresh interpreter until the block ends; it has ended by itself then, or the test fails."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, f"{function.__module__}:{function.__qualname__}", str(theirs.fileno())],
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        peer = Peer(ours, process)
        try:
            yield peer
            ours.close()
            code = process.wait(TIMEOUT_S)
            assert code in (0, -signal.SIGKILL), f"the other process ended with {code}"
        finally:
            if process.poll() is None:
                peer.kill()


def main() -> None:
    target, number = sys.argv[1:]
    module, name = target.split(":")
    plain_pytest.stand_in()
    with socket.socket(fileno=int(number)) as end:
        pipe = Pipe(end)
        try:
            getattr(importlib.import_module(module), name)(pipe)
        except EOFError:
            os._exit(0)
        except BaseException:
            with contextlib.suppress(OSError):
                pipe.send({"error": traceback.format_exc()})
            os._exit(1)


if __name__ == "__main__":
    main()
