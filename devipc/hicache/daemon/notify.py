"""How whoever started the daemon learns what became of it: a line, a descriptor, or the service manager's socket.

Owns the three ways. It knows nothing of what is announced.
"""

from __future__ import annotations

import logging
import os
import socket
import sys

from devipc.errors import UsageError

__all__ = ["announce", "tell_manager"]

_log = logging.getLogger("devipc.hicache")


def announce(line: str, *, ready_fd: int | None) -> None:
    """Print ``line``, and write it to ``ready_fd``, which is closed behind it.

    Raises
    ------
    UsageError
        When ``ready_fd`` is not open for writing.
    """
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    if ready_fd is None:
        return
    try:
        os.write(ready_fd, (line + "\n").encode())
        os.close(ready_fd)
    except OSError as error:
        raise UsageError(
            f"cannot write to descriptor {ready_fd} ({error.strerror})",
            code="ready_fd",
            remedy="pass the writing end of a pipe that this process inherits",
        ) from error


def tell_manager(state: str) -> None:
    """Send ``state`` (``READY=1``, ``STOPPING=1``, ``STATUS=...``) to the socket in ``$NOTIFY_SOCKET``, if it is set.

    The protocol is sd_notify(3)'s: one datagram, the address a path, or an abstract name behind ``@``.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.sendto(state.encode(), address)
    except OSError as error:
        _log.warning("the service manager was not told %s: %s", state.split("=", 1)[0], error)
