"""Messages with descriptors between two processes, over a ``SOCK_SEQPACKET`` socket.

Owns connected sockets: framing, splitting, limits, and who owns which descriptor. It knows no request, no peer state
and no device; what a message means is decided above, and paths are the business of :mod:`devipc.channel.listener`.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from devipc.calltrace import report
from devipc.channel.datagram import (
    Credentials,
    Deadline,
    close_all,
    is_readable,
    no_descriptors,
    peer_credentials,
    receive_datagram,
    send_datagram,
    wait_for,
)
from devipc.channel.identity import close_in_child
from devipc.channel.message import ABANDON_FRAME, Assembler, LostMessage, Message, split
from devipc.errors import ClosedError, ForkError, PeerGone, PeerRefused, UsageError
from devipc.turns import take_turn
from devipc.wire import MAX_MESSAGE_FDS, MAX_MESSAGE_NBYTES

__all__ = ["Channel", "LostMessage", "Message", "channel_pair"]


class Channel:
    """A connected socket that carries messages of bytes and descriptors.

    Sending is safe from any thread; there is one receiver at a time. :meth:`close` is safe from any thread and ends
    calls that are waiting. A forked child's copy is closed at once and only raises :class:`ForkError`.

    Parameters
    ----------
    sock : socket.socket
        A connected ``AF_UNIX`` ``SOCK_SEQPACKET`` socket; owned, also when this raises.
    allowed_uids : collection of int
        User ids other than our own that the peer may have.

    Raises
    ------
    PeerRefused
        When the peer's user is neither ours nor allowed; the socket is closed.
    """

    def __init__(self, sock: socket.socket, *, allowed_uids: Collection[int] = ()) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._users = 0
        self._closed = False
        self._assembler = Assembler()
        self._broke_off = False
        self._waits = False
        try:
            if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
                raise UsageError("a channel needs an AF_UNIX SOCK_SEQPACKET socket")
            self.peer: Credentials = peer_credentials(sock)
            if self.peer.uid != os.geteuid() and self.peer.uid not in allowed_uids:
                raise PeerRefused(
                    f"the peer runs as user {self.peer.uid}, this process as {os.geteuid()}",
                    code="uid",
                    remedy="run both as one user, or put the user on the list of allowed ones",
                )
        except BaseException:
            sock.close()
            raise
        close_in_child(self)

    @classmethod
    def adopt(cls, fd: int, *, allowed_uids: Collection[int] = ()) -> Channel:
        """Make a channel of a socket that this process inherited; ``fd`` is owned, also when this raises."""
        try:
            sock = socket.socket(fileno=fd)
        except OSError as error:
            close_all([fd])
            raise UsageError(f"descriptor {fd} is no socket ({error.strerror})") from error
        sock.set_inheritable(False)
        return cls(sock, allowed_uids=allowed_uids)

    def detach(self) -> int:
        """Close this object, but not the connection, and return the socket's descriptor, which is the caller's now.

        For an end that a spawned child inherits: pass the number on, start the child, then close the descriptor here.
        """
        with self._lock:
            if self._closed or self._users:
                raise UsageError("the channel is closed or in use")
            self._closed = True
        self._assembler.drop()
        return self._sock.detach()

    @property
    def closed(self) -> bool:
        """True once this end was closed."""
        return self._closed

    def send(
        self,
        kind: int,
        body: bytes | memoryview = b"",
        *,
        request: int = 0,
        fds: Sequence[int] = (),
        timeout_s: float,
    ) -> None:
        """Send one message; the peer gets duplicates of ``fds``, which stay the caller's.

        Blocks until the kernel took it all or the deadline passed. Frames of a message that broke off are withdrawn
        before the next one, so that the channel stays usable. Any thread.

        Raises
        ------
        CompletionTimeout, PeerGone, ResourceExhausted
            As for one datagram; the peer sees either the whole message or nothing.
        UsageError
            For a message beyond the limits, or a closed descriptor.
        """
        view = memoryview(body).cast("B")
        if not 0 < kind < 2**16 or not 0 <= request < 2**64:
            raise UsageError(f"kind {kind} or request {request} out of range")
        if view.nbytes > MAX_MESSAGE_NBYTES or len(fds) > MAX_MESSAGE_FDS:
            raise UsageError(
                f"message of {view.nbytes} bytes and {len(fds)} descriptors; at most {MAX_MESSAGE_NBYTES} and"
                f" {MAX_MESSAGE_FDS} fit",
                code="message_size",
                remedy="put large arrays into an arena, and split what carries more descriptors",
            )
        deadline = Deadline(timeout_s)
        mine: list[bool] = []
        with self._in_use():
            try:
                if not take_turn(self._sending, mine, deadline.left_s()):
                    raise deadline.expired("another thread's message was not sent")
                self._send_frames(kind, view, request, fds, deadline)
            except PeerGone:
                if self.closed:
                    raise ClosedError("the channel was closed while sending") from None
                raise
            finally:
                if mine and mine[0]:
                    self._sending.release()

    def _send_frames(self, kind: int, body: memoryview, request: int, fds: Sequence[int], deadline: Deadline) -> None:
        if self._broke_off:
            send_datagram(self._sock, [ABANDON_FRAME], (), deadline)
            self._broke_off = False
        for head, part, some, more in split(kind, request, body, fds):
            send_datagram(self._sock, [head, part], some, deadline)
            self._broke_off = more

    def receive(self, timeout_s: float | None) -> Message:
        """Wait for the next whole message and return it; its descriptors become the caller's.

        Blocks until the deadline (``None``: until a message, a hang-up or :meth:`close`). One thread at a time. After
        a refusal all descriptors that came are closed and the channel could go on; callers close it instead, since the
        peer cannot be trusted to be what it says.

        Raises
        ------
        CompletionTimeout
            When no whole message came in time; what came of it is kept for the next call.
        PeerGone
            At end of file. An empty datagram counts as one: it cannot be told apart.
        WireError
            For anything that is no frame, lies about its length or descriptors, or mixes two messages.
        LostMessage
            When this process has no descriptor left.
        """
        self._check_process()
        deadline = Deadline(timeout_s)
        mine: list[bool] = []
        try:
            if not take_turn(self._receiving, mine):
                raise UsageError("another thread is receiving on this channel")
            with self._in_use():
                while True:
                    self._wait(deadline)
                    datagram = receive_datagram(self._sock)
                    message = None if datagram is None else self._assembler.feed(datagram)
                    if message is not None:
                        return message
        except PeerGone:
            if self.closed:
                raise ClosedError("the channel was closed while receiving") from None
            raise
        finally:
            if mine and mine[0]:
                self._receiving.release()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkError("this channel belongs to the process that forked", remedy="connect again in the child")

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the socket open: a number closed under a waiting thread could come back as somebody else's file."""
        self._check_process()
        counted = False
        try:
            with self._lock:
                if self._closed:
                    raise ClosedError("the channel is closed")
                self._users += 1
                counted = True  # no call, hence no interrupt, comes between the two
            yield
        finally:
            last = False
            if counted:
                with self._lock:
                    self._users -= 1
                    last = self.closed and not self._users
            if last:
                self._release()

    def _wait(self, deadline: Deadline) -> None:
        self._waits = True
        try:
            wait_for(self._sock, select.POLLIN, deadline, "no message came")
        finally:
            self._waits = False

    def is_quiet(self) -> bool:
        """Return whether the receiver waits and nothing has come: nothing is on its way through this process.

        A closed channel is quiet. Never blocks, nor lets go of the interpreter lock, so that the two looks are one.
        """
        try:
            with self._in_use():
                return self._waits and not is_readable(self._sock)
        except ClosedError:
            return True

    def close(self) -> None:
        """Hang up. Threads that wait in :meth:`send` or :meth:`receive` end; never blocks; again does nothing."""
        if os.getpid() != self._pid or self.closed:
            return
        report("channel_close")
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            last = not self._users
        if last:
            self._release()

    def _release(self) -> None:
        self._assembler.drop()
        self._sock.close()

    def close_in_child(self) -> None:
        """Close a forked child's copies; the parent's connection is not touched."""
        self._release()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def channel_pair() -> tuple[Channel, Channel]:
    """Return the two ends of a fresh connection inside this process."""
    try:
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise no_descriptors("socketpair", error) from error
    return Channel(left), Channel(right)
