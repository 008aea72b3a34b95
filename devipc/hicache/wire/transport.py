"""How frames travel between a client and its supervisor, beside the link that greets, carries descriptors and watches.

Owns the two ways, rings in shared memory and datagrams, and who makes which descriptor of them. It knows no frame: what
is pushed here comes out there, whole and in order, or the transport ends.

The client offers one way with its greeting, the supervisor takes it or refuses the greeting::

    client                                      supervisor
    offer = Offer(Way.RINGS)
    link.call(LinkKind.HELLO, hello,            taken = take_offer(way, fds)
              fds=[slots, *offer.fds])          answer: welcome, [index, *taken.fds]
    transport = offer.complete(fds)             taken.transport

Who is refused with ``memory_order`` or ``way`` may greet again with messages.
"""

from __future__ import annotations

import enum
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from devipc.channel.datagram import close_all, no_descriptors
from devipc.channel.link import FIRST_FREE_KIND
from devipc.errors import DevIPCError, HandleError
from devipc.hicache.wire.datagrams import MessageTransport
from devipc.hicache.wire.protocol import MAX_FRAME_NBYTES
from devipc.hicache.wire.ring import DEFAULT_SPIN_S, Consumer, Producer

__all__ = ["LinkKind", "MessageTransport", "Offer", "RingTransport", "Taken", "Transport", "Way", "take_offer"]


class LinkKind(enum.IntEnum):
    """Questions on the link between a client, or an administrator, and a supervisor."""

    HELLO = FIRST_FREE_KIND
    """Body: a HelloFrame. Descriptors: the slots, then the offer. Answer: a WelcomeFrame, the index, the transport."""
    LEAVE = FIRST_FREE_KIND + 1
    """Body: a LeaveFrame. Answered when nothing of the client is open or mapped; else refused, ``stalled_stream``."""
    STATUS = FIRST_FREE_KIND + 2
    """No body, no greeting needed. Answer: a JSON object."""
    DRAIN = FIRST_FREE_KIND + 3
    """Body: a LeaveFrame, no greeting needed. Answered, with nothing, when all is drained."""


class Way(enum.StrEnum):
    """How frames travel."""

    RINGS = "rings"
    MESSAGES = "messages"


class Transport(Protocol):
    """One end, for frames both ways. Any thread; one at a time takes."""

    @property
    def taken(self) -> int:
        """Frames that were taken, those included that an interrupt took away from the taker."""
        ...

    def push(self, frame: bytes, /, *, timeout_s: float) -> None:
        """Hand a frame over; blocks while the other side does not keep up.

        Raises
        ------
        ResourceExhausted
            With code ``busy`` when there was no room in time. Nothing was handed over.
        PeerGone, ClosedError, DevIPCError
            When the other side closed, this side was closed, or what :meth:`end` was told.
        """
        ...

    def take(self, *, timeout_s: float, spin: bool = True) -> bytes:
        """Return the next frame. Blocks until there is one.

        Without ``spin`` it sleeps at once, where it would look for a moment else.

        Raises
        ------
        CompletionTimeout
            When none came in time.
        ProtocolError
            When the other side breaks the rules; the transport has ended.
        PeerGone, ClosedError, DevIPCError
            As for :meth:`push`.
        """
        ...

    def announce(self) -> None:
        """Note that a frame is about to be pushed: the other side is woken for it, where that helps. Never blocks."""
        ...

    def end(self, error: DevIPCError) -> None:
        """Let all calls raise ``error``, those that wait included. The first one stays. Never blocks."""
        ...

    def close(self) -> None:
        """Tell the other side, and give everything back. Again does nothing."""
        ...


class _Push(Protocol):
    def __call__(self, frame: bytes, /, *, timeout_s: float) -> None: ...


class _Take(Protocol):
    def __call__(self, *, timeout_s: float, spin: bool = True) -> bytes: ...


class RingTransport:
    """Frames in shared memory: two rings. Fulfils :class:`Transport`.

    Parameters
    ----------
    out, into : Producer and Consumer
        Owned.
    """

    def __init__(self, out: Producer, into: Consumer) -> None:
        self._out, self._into = out, into
        # The rings' own, without a call of Python's between.
        self.push: _Push = out.push
        self.take: _Take = into.take
        self.announce: Callable[[], None] = out.announce

    @property
    def taken(self) -> int:
        """See :class:`Transport`."""
        return self._into.taken

    def end(self, error: DevIPCError) -> None:
        """See :class:`Transport`."""
        self._out.end(error)
        self._into.end(error)

    def close(self) -> None:
        """See :class:`Transport`."""
        self._out.close()
        self._into.close()


class Offer:
    """A client's half of a transport, before it is taken. A context manager: closes what was not completed.

    Parameters
    ----------
    way : Way
        How frames shall travel.

    Raises
    ------
    CapabilityError
        For rings, on a machine whose memory order does not allow them.
    ResourceExhausted
        When memory or descriptors ran out.
    """

    def __init__(self, way: Way) -> None:
        self.way = way
        self._out: Producer | None = None
        self._pair: list[socket.socket] = []
        if way is Way.RINGS:
            self._out = Producer()
        else:
            self._pair = list(_socketpair())

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors to send with the greeting; they stay this object's."""
        return self._out.fds() if self._out is not None else tuple(sock.fileno() for sock in self._pair[1:])

    def complete(self, fds: Sequence[int]) -> Transport:
        """Return the transport, with what the supervisor's answer brought, which is owned also when this raises.

        Raises
        ------
        HandleError
            When that is not the other half.
        """
        if self._out is None:
            close_all(fds)
            if fds:
                raise HandleError(f"{len(fds)} descriptors for a socket", code="fd_count")
            mine, theirs = self._pair
            self._pair = []
            theirs.close()
            return MessageTransport(mine, own=True)
        into = Consumer(fds, limit_nbytes=MAX_FRAME_NBYTES, spin_s=DEFAULT_SPIN_S)
        out, self._out = self._out, None
        return RingTransport(out, into)

    def close(self) -> None:
        """Give back what was not completed."""
        if self._out is not None:
            self._out.close()
        for sock in self._pair:
            sock.close()
        self._out, self._pair = None, []

    def __enter__(self) -> Offer:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


class Taken:
    """What a supervisor made of an offer.

    Attributes
    ----------
    transport : Transport
        The supervisor's end; the caller closes it.
    fds : tuple of int
        To send with the answer; they stay the transport's.
    """

    def __init__(self, transport: Transport, fds: tuple[int, ...]) -> None:
        self.transport = transport
        self.fds = fds


def take_offer(way: Way, fds: Sequence[int], *, spin_s: float = DEFAULT_SPIN_S) -> Taken:
    """Take what a client offered; the descriptors are owned, also when this raises.

    Parameters
    ----------
    way : Way
        As the greeting says.
    fds : sequence of int
        What came behind the slots.
    spin_s : float
        How long the supervisor looks for a frame before it sleeps.

    Raises
    ------
    HandleError
        When they are no half of such a transport.
    CapabilityError
        For rings, on a machine whose memory order does not allow them.
    ResourceExhausted
        When memory or descriptors ran out.
    """
    if way is Way.MESSAGES:
        return Taken(MessageTransport(_adopt(fds), own=False), ())
    into = Consumer(fds, limit_nbytes=MAX_FRAME_NBYTES, spin_s=spin_s)
    try:
        out = Producer()
    except BaseException:
        into.close()
        raise
    return Taken(RingTransport(out, into), out.fds())


def _adopt(fds: Sequence[int]) -> socket.socket:
    sock: socket.socket | None = None
    connected = False
    try:
        if len(fds) == 1:
            sock = socket.socket(fileno=fds[0])
            sock.getpeername()
            connected = True
    except OSError:
        pass
    if sock is None or not connected or (sock.family, sock.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        if sock is not None:
            sock.close()
        else:
            close_all(fds)
        raise HandleError(f"{len(fds)} descriptors are no connected socket of messages", code="transport")
    return sock


def _socketpair() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise no_descriptors("socketpair", error) from error
