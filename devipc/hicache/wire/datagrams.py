"""Frames as datagrams over a socket: the way beside rings in shared memory.

Owns the cutting of long frames, and the end that every call sees. It knows no frame and no greeting.
"""

from __future__ import annotations

import contextlib
import copy
import os
import select
import socket
import struct
import threading
import time
from collections import deque

from devipc.channel.datagram import Deadline, send_datagram
from devipc.channel.identity import close_in_child
from devipc.errors import (
    ClosedError,
    CompletionTimeout,
    DevIPCError,
    ForkError,
    PeerGone,
    ResourceExhausted,
    WireError,
)
from devipc.hicache.wire.protocol import MAX_FRAME_NBYTES
from devipc.turns import take_turn
from devipc.wire import MAX_BODY_NBYTES

__all__ = ["MessageTransport"]

_WAIT_S = 0.02  # how long the kernel waits for a datagram
_LAST, _MORE = b"\0", b"\1"
_AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # once: flags are joined as slowly as a datagram is sent


class MessageTransport:
    """Frames as datagrams. Fulfils :class:`~devipc.hicache.wire.transport.Transport`.

    Descriptors that a peer sends along are dropped by the kernel: nothing here asks for them.

    A frame is one datagram or several, each behind a byte that says whether more follow. A peer that stands still
    for a while ends nothing: of a frame that is out by half the rest is kept, and goes before everything else, with the
    next push or while somebody takes. No more than that one frame is kept.

    Parameters
    ----------
    sock : socket.socket
        Connected, ``SOCK_SEQPACKET``; owned.
    own : bool
        No other process has this end: nobody else can change how its calls wait.
    """

    def __init__(self, sock: socket.socket, *, own: bool) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self._buffer = bytearray(MAX_BODY_NBYTES + 1)
        self._view = memoryview(self._buffer)
        self._parts = bytearray()
        self._poller = select.poll()
        self._poller.register(sock.fileno(), select.POLLIN)
        self._taken = 0
        self._rest: deque[memoryview] = deque()  # of a frame that is out by half; changed while sending
        self._sending, self._turn, self._closing = threading.Lock(), threading.Lock(), threading.Lock()
        self._ended: DevIPCError | None = None
        self._closed = False
        self._own = own
        self._flags = int(socket.MSG_TRUNC if own else socket.MSG_TRUNC | socket.MSG_DONTWAIT)
        sock.setblocking(True)
        if own:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, int(_WAIT_S * 1e6)))
        close_in_child(self)

    @property
    def taken(self) -> int:
        """See :class:`~devipc.hicache.wire.transport.Transport`."""
        return self._taken

    def announce(self) -> None:
        """See :class:`~devipc.hicache.wire.transport.Transport`: nobody is woken but by a datagram."""

    def push(self, frame: bytes, /, *, timeout_s: float) -> None:
        """See :class:`~devipc.hicache.wire.transport.Transport`."""
        with self._sending:
            self._check()
            if len(frame) <= MAX_BODY_NBYTES and not self._rest:
                try:
                    self._sock.send(_LAST + frame, _AT_ONCE)
                    return
                except OSError:  # full, or gone: the careful way says which
                    pass
            self._push_parts(frame, Deadline(timeout_s))

    def _push_parts(self, frame: bytes, deadline: Deadline) -> None:
        view = memoryview(frame)
        parts = [view[start : start + MAX_BODY_NBYTES] for start in range(0, max(len(view), 1), MAX_BODY_NBYTES)]
        try:
            self._send_rest(deadline)
            self._rest.extend(parts)
            try:
                self._send_rest(deadline)
            except (CompletionTimeout, ResourceExhausted):
                if len(self._rest) == len(parts):
                    self._rest.clear()  # nothing of it is out, nor will be
                    raise
        except DevIPCError as error:
            self._check()
            if isinstance(error, CompletionTimeout):
                raise _busy(deadline.timeout_s or 0.0) from error
            raise

    def _send_rest(self, deadline: Deadline) -> None:
        """Send what is kept; raises CompletionTimeout with the rest still kept."""
        try:
            while self._rest:
                send_datagram(self._sock, [_MORE if len(self._rest) > 1 else _LAST, self._rest[0]], (), deadline)
                self._rest.popleft()
        except DevIPCError:
            raise
        except BaseException:  # an interrupt: whether the last part is out is not known, and nothing may follow it
            self.end(PeerGone("a frame broke off", code="broken_frame", remedy="connect again"))
            raise

    def _awaits(self, deadline: Deadline) -> bool:
        """Wait for a datagram, or meanwhile for room for what is kept; False when the time is up."""
        if not self._rest:
            return bool(self._poller.poll(deadline.poll_ms()))
        mine: list[bool] = []
        try:
            if take_turn(self._sending, mine):  # or somebody is at it
                with contextlib.suppress(DevIPCError):  # no room yet; whoever receives learns of an end
                    self._send_rest(Deadline(0.0))
        finally:
            if mine and mine[0]:
                self._sending.release()
        both = select.poll()
        both.register(self._sock.fileno(), select.POLLIN | (select.POLLOUT if self._rest else 0))
        found = both.poll(min(deadline.left_s(), _WAIT_S) * 1e3)
        return any(event & ~select.POLLOUT for _, event in found) or deadline.left_s() > 0

    def take(self, *, timeout_s: float, spin: bool = True) -> bytes:
        """See :class:`~devipc.hicache.wire.transport.Transport`; it never spins."""
        begun = time.monotonic()
        mine: list[bool] = []
        try:
            if not take_turn(self._turn, mine) and not take_turn(self._turn, mine, timeout_s):
                raise CompletionTimeout("another thread takes")
            self._check()
            # Mostly one wait is enough. Where there is time, the call that receives waits by itself.
            soon = not self._rest and timeout_s >= _WAIT_S and (self._own or self._poller.poll(_WAIT_S * 1e3))
            if soon and (frame := self._receive()) is not None:
                return frame
            self._check()
            deadline = Deadline(timeout_s - (time.monotonic() - begun))
            while self._awaits(deadline):
                frame = self._receive()
                if frame is not None:
                    return frame
                self._check()
        finally:
            if mine and mine[0]:
                self._turn.release()
        raise CompletionTimeout(f"no frame came for {timeout_s:g} s")

    def _receive(self) -> bytes | None:
        """Return the frame that the next datagram completes, if one comes soon and does."""
        self._taken += 1
        try:
            nbytes = self._sock.recv_into(self._buffer, 0, self._flags)
        except (BlockingIOError, ConnectionResetError):  # a reset is told once; last words are still in the queue
            self._taken -= 1
            return None
        if not nbytes:
            self._taken -= 1
            self.end(PeerGone("the other side closed the connection", code="closed", remedy="connect again"))
            self._check()
        more = self._buffer[0]
        if nbytes > len(self._buffer) or more > 1 or len(self._parts) + nbytes - 1 > MAX_FRAME_NBYTES:
            self.end(WireError("a datagram that is no part of a frame", code="frame_size"))
            self._check()
        if not more and not self._parts:
            return bytes(self._view[1:nbytes])
        self._parts += self._view[1:nbytes]
        if more:
            self._taken -= 1
            return None
        frame, self._parts = bytes(self._parts), bytearray()
        return frame

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ForkError("this transport belongs to the process that forked", remedy="connect in the child")
        if self._ended is not None:
            raise copy.copy(self._ended)

    def end(self, error: DevIPCError) -> None:
        """See :class:`~devipc.hicache.wire.transport.Transport`."""
        self._ended = self._ended or error
        with self._closing:
            if not self._closed:
                try:
                    self._sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def close(self) -> None:
        """See :class:`~devipc.hicache.wire.transport.Transport`."""
        if os.getpid() != self._pid:
            return
        self.end(ClosedError("the transport is closed", remedy="connect again"))
        with self._sending, self._turn, self._closing:
            self._closed = True
            self._sock.close()

    def close_in_child(self) -> None:
        """Close this process's descriptor."""
        self._sock.close()


def _busy(timeout_s: float) -> ResourceExhausted:
    return ResourceExhausted(
        f"the other side took nothing for {timeout_s:g} s",
        code="busy",
        remedy="submit less at once; the peer does not keep up, or stands still",
    )
