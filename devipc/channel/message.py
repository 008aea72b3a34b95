"""Messages, and how they are cut into frames and put together again.

Owns the limits, the checks of every frame against what really came, and the ownership of received descriptors. It
does no I/O: datagrams are handed in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from devipc.channel.datagram import MAX_FRAME_FDS, Datagram, close_all
from devipc.errors import PeerGone, ResourceExhausted, WireError
from devipc.wire import (
    HEADER_NBYTES,
    MAX_BODY_NBYTES,
    MAX_MESSAGE_FDS,
    MAX_MESSAGE_NBYTES,
    Header,
    decode_header,
    encode_header,
)

__all__ = ["ABANDON_FRAME", "Assembler", "LostMessage", "Message", "split"]

_ABANDON = 0
ABANDON_FRAME = encode_header(Header(_ABANDON, 0, 0))
"""Says that the message begun before will not be completed; the receiver drops what came of it."""


@dataclass(slots=True)
class Message:
    """One received message. It owns its descriptors until they are taken or closed.

    Parameters
    ----------
    kind : int
        What it is; at least 1.
    request : int
        Pairs an answer with its question; 0 when there is none.
    body : bytes
        At most ``MAX_MESSAGE_NBYTES`` bytes.
    fds : tuple of int
        Descriptors that came with it, close-on-exec; empty once they were taken or closed.
    """

    kind: int
    request: int = 0
    body: bytes = b""
    fds: tuple[int, ...] = ()

    def take_fds(self) -> tuple[int, ...]:
        """Hand all descriptors over to the caller, who closes them from now on."""
        fds, self.fds = self.fds, ()
        return fds

    def close_fds(self) -> None:
        """Close what was not taken. Calling it again does nothing."""
        close_all(self.take_fds())


class LostMessage(ResourceExhausted):
    """A message came whose descriptors did not fit into this process; the channel goes on.

    ``kind`` and ``request`` are those of the message, so that its sender can be answered.
    """

    def __init__(self, *, kind: int, request: int) -> None:
        super().__init__(
            "no file descriptor (fds) left in this process to receive those of a message",
            code="fds",
            remedy="raise `ulimit -n` or close mappings that are no longer used, then ask again",
        )
        self.kind = kind
        self.request = request


Frame = tuple[bytes, memoryview, Sequence[int], bool]


def split(kind: int, request: int, body: memoryview, fds: Sequence[int]) -> Iterator[Frame]:
    """Yield the frames of a message: head, part of the body, part of the descriptors, whether more follow."""
    count = max(1, -(-body.nbytes // MAX_BODY_NBYTES), -(-len(fds) // MAX_FRAME_FDS))
    for index in range(count):
        part = body[index * MAX_BODY_NBYTES : (index + 1) * MAX_BODY_NBYTES]
        some = fds[index * MAX_FRAME_FDS : (index + 1) * MAX_FRAME_FDS]
        more = index + 1 < count
        yield encode_header(Header(kind, request, part.nbytes, len(some), more)), part, some, more


@dataclass(slots=True)
class _Partial:
    kind: int
    request: int
    body: bytearray = field(default_factory=bytearray)
    fds: list[int] = field(default_factory=list)
    lost: bool = False


class Assembler:
    """Puts messages together from datagrams, and closes every descriptor of what it refuses. One thread."""

    def __init__(self) -> None:
        self._partial: _Partial | None = None

    def feed(self, datagram: Datagram) -> Message | None:
        """Take one datagram, which is owned from now on, and return the message that it completes, if any.

        Raises
        ------
        PeerGone
            For an empty datagram: it cannot be told from end of file.
        WireError
            For anything that is no frame, lies about its length or descriptors, or mixes two messages. What was
            collected before is dropped.
        LostMessage
            At the end of a message some of whose descriptors the kernel could not deliver to this process.
        """
        try:
            return self._feed(datagram)
        except BaseException:
            close_all(datagram.fds)
            self.drop()
            raise

    def drop(self) -> None:
        """Forget what was collected, and close its descriptors."""
        partial, self._partial = self._partial, None
        if partial is not None:
            close_all(partial.fds)

    def _feed(self, datagram: Datagram) -> Message | None:
        if not datagram.data:
            raise PeerGone("the peer closed its end", remedy="connect again when it is back")
        if datagram.truncated:
            raise WireError("datagram is longer than a frame may be", code="frame_size")
        header = decode_header(datagram.data)
        came = len(datagram.fds)
        # The control buffer holds all that the kernel can send: what is lost found no room in our descriptor table.
        lost = datagram.control_truncated and came < header.fd_count
        if not lost and (datagram.control_truncated or came != header.fd_count):
            raise WireError(f"header announces {header.fd_count} descriptors, {came} came", code="fd_count")
        if header.kind == _ABANDON:
            if self._partial is None or datagram.data != ABANDON_FRAME:
                raise WireError("a message is abandoned that was never begun", code="abandon")
            self.drop()
            return None
        return self._join(header, datagram, lost=lost)

    def _join(self, header: Header, datagram: Datagram, *, lost: bool) -> Message | None:
        partial = self._partial or _Partial(header.kind, header.request)
        if (partial.kind, partial.request) != (header.kind, header.request):
            raise WireError("frames of two messages are mixed", code="interleaved")
        if (header.more or self._partial) and not header.body_nbytes and not header.fd_count:
            raise WireError("a frame of a split message carries nothing", code="empty")
        if (
            len(partial.body) + header.body_nbytes > MAX_MESSAGE_NBYTES
            or len(partial.fds) + header.fd_count > MAX_MESSAGE_FDS
        ):
            raise WireError("a split message grows beyond its limits", code="message_size")
        partial.body += memoryview(datagram.data)[HEADER_NBYTES:]
        partial.fds += datagram.fds
        datagram.fds.clear()
        if lost or partial.lost:
            partial.lost = True
            close_all(partial.fds)
            partial.fds.clear()
        if header.more:
            self._partial = partial
            return None
        self._partial = None
        if partial.lost:
            raise LostMessage(kind=partial.kind, request=partial.request)
        return Message(partial.kind, partial.request, bytes(partial.body), tuple(partial.fds))
