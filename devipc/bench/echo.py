"""A process that sends back what it is sent: the bare round trip that requests are compared with.

Run as ``python -m devipc.bench.echo FD``; ends when the other end of the socket does.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from types import TracebackType

__all__ = ["Echo"]

_TIMEOUT_S = 30.0


class Echo:
    """That process, and this end of its socket."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "devipc.bench.echo", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._socket.settimeout(_TIMEOUT_S)
        self.round_trip()

    def round_trip(self, payload: bytes = b"x" * 64) -> None:
        """Send ``payload`` and wait until it is back."""
        self._socket.send(payload)
        self._socket.recv(4096)

    def __enter__(self) -> Echo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.wait(_TIMEOUT_S)


def main() -> None:
    """Echo until the other end is closed."""
    with socket.socket(fileno=int(sys.argv[1])) as other:
        while data := other.recv(4096):
            other.send(data)


if __name__ == "__main__":
    main()
