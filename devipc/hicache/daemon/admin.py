"""Asking a running daemon: what it does, and to drain.

Owns the connection of an administrator, who greets as any peer does, and needs no place among the clients.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from devipc.channel.link import Link
from devipc.channel.listener import default_directory
from devipc.deadline import deadline_after, remaining
from devipc.errors import ProtocolError
from devipc.hicache.wire.protocol import LeaveFrame, encode
from devipc.hicache.wire.transport import LinkKind

__all__ = ["ask_drain", "ask_status", "default_socket"]

_CONNECT_S = 5.0


def default_socket() -> str:
    """Return where a daemon of this user listens when nothing else is said."""
    return os.path.join(default_directory(), "hicache.sock")


@contextmanager
def _connected(path: str, timeout_s: float) -> Iterator[Link]:
    link = Link.connect(path, facts={}, timeout_s=min(timeout_s, _CONNECT_S))
    try:
        link.start()
        yield link
    finally:
        link.close()


def ask_status(path: str, *, timeout_s: float) -> dict[str, Any]:
    """Return the status of the daemon at ``path``, schema ``devipc.hicache.status/1``. Blocks.

    Raises
    ------
    PeerGone
        When none listens there.
    CompletionTimeout
        When it does not answer in time.
    """
    deadline = deadline_after(timeout_s)
    with _connected(path, timeout_s) as link:
        answer = link.call(LinkKind.STATUS, timeout_s=remaining(deadline))
    return _object(answer.body)


def ask_drain(path: str, *, timeout_s: float) -> None:
    """Let the daemon at ``path`` finish what is under way, take nothing more, and end. Blocks until it has drained.

    Raises
    ------
    PeerGone
        When none listens there.
    CompletionTimeout
        When something was still under way after ``timeout_s``: the daemon goes on draining, and ends all the same.
    """
    with _connected(path, timeout_s) as link:
        link.call(LinkKind.DRAIN, encode(LeaveFrame(timeout_s=timeout_s)), timeout_s=timeout_s + _CONNECT_S)


def _object(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"the daemon's status is no JSON object ({error})", code="status") from error
