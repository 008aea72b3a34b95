"""One datagram and its descriptors, out and in, with a deadline.

Owns the two socket calls that carry descriptors, and the rule that every descriptor that arrives is either handed on
or closed. It knows no header: what the bytes mean is the channel's business.
"""

from __future__ import annotations

import array
import ctypes
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from devipc.calltrace import report
from devipc.errors import CompletionTimeout, DevIPCError, PeerGone, ResourceExhausted, UsageError
from devipc.wire import MAX_FRAME_NBYTES

__all__ = [
    "MAX_FRAME_FDS",
    "Credentials",
    "Datagram",
    "Deadline",
    "close_all",
    "is_readable",
    "no_descriptors",
    "peer_credentials",
    "receive_datagram",
    "send_datagram",
    "wait_for",
]

MAX_FRAME_FDS = 250
"""Descriptors in one datagram; the kernel's own limit is 253."""

_KERNEL_MAX_FDS = 253
_FD_NBYTES = 4
_CREDENTIALS = struct.Struct("=iII")
# Room for all the kernel can deliver, credentials included, so that a truncation can only mean a full table.
_CONTROL_NBYTES = socket.CMSG_SPACE(_KERNEL_MAX_FDS * _FD_NBYTES) + socket.CMSG_SPACE(_CREDENTIALS.size) + 256
_LONGEST_S = 2.0**31 / 1000 - 1  # what poll can take; 24 days
_libc = ctypes.PyDLL(None)


class _PollEntry(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class Deadline:
    """A moment on the monotonic clock; ``None`` seconds never end."""

    __slots__ = ("_at", "timeout_s")

    def __init__(self, timeout_s: float | None) -> None:
        if timeout_s is not None and timeout_s != timeout_s:
            raise UsageError("a timeout that is not a number", remedy="pass seconds")
        self.timeout_s = timeout_s
        self._at = None if timeout_s is None else time.monotonic() + min(max(timeout_s, 0.0), _LONGEST_S)

    def left_s(self) -> float:
        """Return the seconds that are left: never negative, at most what every wait can take."""
        return _LONGEST_S if self._at is None else max(self._at - time.monotonic(), 0.0)

    def poll_ms(self) -> float | None:
        """Return the rest in the form that ``poll`` takes."""
        return None if self._at is None else self.left_s() * 1e3

    def expired(self, what: str) -> CompletionTimeout:
        """Return the error that says that ``what`` did not happen in time."""
        return CompletionTimeout(
            f"{what} within {self.timeout_s} s", remedy="the peer may be stopped or overloaded; try again or close"
        )


@dataclass(frozen=True, slots=True)
class Credentials:
    """The kernel's record of who made the other end, in ids as seen from here; ``pid`` is 0 when it is not visible."""

    pid: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Datagram:
    """What one receive call delivered; whoever holds it owns ``fds``.

    Parameters
    ----------
    data : bytes
        The bytes; empty at end of file.
    fds : list of int
        All descriptors that came, from whatever control message, close-on-exec.
    truncated : bool
        The datagram was longer than a frame can be.
    control_truncated : bool
        Descriptors were lost on the way.
    """

    data: bytes
    fds: list[int]
    truncated: bool
    control_truncated: bool


def close_all(fds: Iterable[int]) -> None:
    """Close each of ``fds``, whatever happens to one of them."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass


def no_descriptors(call: str, error: OSError) -> ResourceExhausted:
    """Return the error for a call that could not make a descriptor or a socket."""
    return ResourceExhausted(
        f"{call}: no file descriptor (fds) to be had ({error.strerror})",
        code="fds",
        remedy="raise `ulimit -n` or close connections that are no longer used",
    )


def peer_credentials(sock: socket.socket) -> Credentials:
    """Return the kernel's record of who made the other end of ``sock``."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Credentials(*_CREDENTIALS.unpack(raw))


def wait_for(sock: socket.socket, events: int, deadline: Deadline, what: str) -> None:
    """Sleep until ``sock`` shows one of ``events``, an error or a hang-up.

    Raises
    ------
    CompletionTimeout
        At the deadline; ``what`` begins its message.
    """
    poller = select.poll()
    poller.register(sock.fileno(), events)
    report("channel_wait")
    if not poller.poll(deadline.poll_ms()):
        raise deadline.expired(what)


def send_datagram(
    sock: socket.socket, parts: Sequence[bytes | memoryview], fds: Sequence[int], deadline: Deadline
) -> None:
    """Send ``parts`` as one datagram together with duplicates of ``fds``, which stay the caller's.

    Raises
    ------
    CompletionTimeout
        When the peer does not make room before the deadline. Nothing was sent.
    PeerGone
        When the peer is not there any more.
    ResourceExhausted
        When too many descriptors are under way, or the kernel has no memory.
    UsageError
        When one of ``fds`` is not open.
    """
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    while True:
        report("channel_send")
        try:
            sock.sendmsg(parts, control, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            return
        except BlockingIOError:
            wait_for(sock, select.POLLOUT, deadline, "the peer took no message")
        except OSError as error:
            raise _send_error(error, len(fds)) from error


def _send_error(error: OSError, fd_count: int) -> DevIPCError:
    if error.errno in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
        return PeerGone("the peer closed its end", remedy="connect again when it is back")
    if error.errno in (errno.ETOOMANYREFS, errno.EMFILE, errno.ENFILE):
        return ResourceExhausted(
            f"{fd_count} file descriptors (fds) cannot be sent: too many are under way ({error.strerror})",
            code="fds",
            remedy="raise `ulimit -n`, or try again once the peers have received what was sent to them",
        )
    if error.errno == errno.EBADF:
        return UsageError(
            "a descriptor to be sent is not open", code="bad_fd", remedy="keep it open until the call returns"
        )
    return ResourceExhausted(
        f"the kernel did not take the message ({error.strerror})",
        code="socket",
        remedy="free memory, or raise net.core.wmem_max and wmem_default above 128 KiB",
    )


def receive_datagram(sock: socket.socket) -> Datagram | None:
    """Return the datagram that has come, with all its descriptors, which become the caller's; None if there is none.

    Control messages are taken in any order and of any kind; those that carry no descriptor are ignored. Never blocks.
    """
    report("channel_recv")
    try:
        data, control, flags, _ = sock.recvmsg(
            MAX_FRAME_NBYTES, _CONTROL_NBYTES, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        )
    except (BlockingIOError, ConnectionResetError):
        # A reset is told once, before what the peer sent in time; its last words are still in the queue.
        return None
    return Datagram(data, _descriptors(control), bool(flags & socket.MSG_TRUNC), bool(flags & socket.MSG_CTRUNC))


def is_readable(sock: socket.socket) -> bool:
    """Return whether a datagram or a hang-up waits. Never blocks, nor lets go of the interpreter lock."""
    entry = _PollEntry(sock.fileno(), select.POLLIN, 0)
    return bool(_libc.poll(ctypes.byref(entry), ctypes.c_ulong(1), ctypes.c_int(0)))


def _descriptors(control: Iterable[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()
