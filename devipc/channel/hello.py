"""The first two messages of a link, and the errors that travel over it.

Owns who talks to whom: protocol versions, instance, facts, and the signs of life that each side hands to the other.
Everything that comes is checked before it is used. It knows no request beyond this and starts no thread.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass

from devipc import errors
from devipc.channel.datagram import Deadline, close_all
from devipc.channel.identity import local_facts, process_instance
from devipc.channel.liveness import own_life, pid_of_pidfd
from devipc.channel.seqpacket import Channel, Message
from devipc.errors import DevIPCError, HandleError, PeerError, PeerRefused, ProtocolError, VendorStatus, WireError
from devipc.memfd import PAGE_NBYTES, validate_memfd
from devipc.undoing import what_is_left
from devipc.wire import Reader, Writer

__all__ = ["FIRST_FREE_KIND", "Greeted", "Kind", "PeerIdentity", "decode_error", "encode_error", "greet"]

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
FIRST_FREE_KIND = 64
"""Message kinds below belong to the link."""

_MAX_FACTS = 128
_MAX_KEY_NBYTES = 64
_MAX_VALUE_NBYTES = 4096
_HAS_PIDFD = 1
_HAS_LIFE = 2
_FAREWELL_S = 0.1


class Kind(enum.IntEnum):
    """The link's own messages."""

    HELLO = 1
    HELLO_ACK = 2
    ANSWER = 3
    ERROR = 4
    BYE = 5


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Who is at the other end.

    Parameters
    ----------
    instance : bytes
        16 random bytes, one life of one process; the only identity.
    pid : int
        Process id as seen from here, for people; 0 when it is not visible.
    uid : int
        User id that the kernel vouches for.
    facts : dict
        What the peer says about itself and its environment.
    """

    instance: bytes
    pid: int
    uid: int
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class Greeted:
    """Result of the first exchange; whoever holds it owns both descriptors."""

    peer: PeerIdentity
    version: int
    life_fd: int | None
    pidfd: int | None


def greet(channel: Channel, *, first: bool, facts: Mapping[str, str], timeout_s: float) -> Greeted:
    """Exchange greetings; both sides have to finish within ``timeout_s``. Blocks.

    On any failure the peer is told, as far as it listens, and the channel is closed.

    Parameters
    ----------
    channel : Channel
        Nothing was sent or received on it yet.
    first : bool
        True on the side that connected: it speaks first.
    facts : mapping
        Added to what :func:`devipc.channel.identity.local_facts` tells.
    timeout_s : float
        For the whole exchange.

    Raises
    ------
    ProtocolError, WireError, HandleError
        The peer speaks something else, or sent a descriptor that is not what it says.
    PeerRefused
        No common protocol version.
    CompletionTimeout, PeerGone
        The peer said nothing, or left.
    """
    deadline = Deadline(timeout_s)
    try:
        if first:
            _send_greeting(channel, Kind.HELLO, facts, deadline)
            return _receive_greeting(channel, Kind.HELLO_ACK, deadline)
        greeted = _receive_greeting(channel, Kind.HELLO, deadline)
        try:
            _send_greeting(channel, Kind.HELLO_ACK, facts, deadline)
        except BaseException:
            close_all(fd for fd in (greeted.life_fd, greeted.pidfd) if fd is not None)
            raise
        return greeted
    except BaseException as error:
        if isinstance(error, DevIPCError):
            _tell_failure(channel, error)
        channel.close()
        raise


def _tell_failure(channel: Channel, error: DevIPCError) -> None:
    try:
        channel.send(Kind.ERROR, encode_error(error), timeout_s=_FAREWELL_S)
    except DevIPCError:
        pass


def _send_greeting(channel: Channel, kind: Kind, facts: Mapping[str, str], deadline: Deadline) -> None:
    life = own_life()
    fds = [fd for fd in (life.pidfd, life.memfd) if fd is not None]
    flags = _HAS_PIDFD * (life.pidfd is not None) + _HAS_LIFE * (life.memfd is not None)
    everything = {**local_facts(), **facts}
    writer = Writer().u16(PROTOCOL_MIN).u16(PROTOCOL_MAX).raw(process_instance(), 16).u8(flags).u32(len(everything))
    if len(everything) > _MAX_FACTS:
        raise errors.UsageError(f"{len(everything)} facts, at most {_MAX_FACTS} fit", code="facts")
    for key, value in everything.items():
        writer.text(key, limit=_MAX_KEY_NBYTES).text(value, limit=_MAX_VALUE_NBYTES)
    channel.send(kind, writer.done(), fds=fds, timeout_s=deadline.left_s())


def _receive_greeting(channel: Channel, kind: Kind, deadline: Deadline) -> Greeted:
    message = channel.receive(deadline.left_s())
    try:
        if message.kind == Kind.ERROR:
            raise decode_error(message.body, f"peer {channel.peer.pid}")
        if message.kind != kind:
            raise ProtocolError(
                f"message of kind {message.kind} came before the greeting",
                code="no_hello",
                remedy="the peer must say HELLO first; check that it is a devipc process",
            )
        return _decode_greeting(channel, message)
    finally:
        message.close_fds()


def _decode_greeting(channel: Channel, message: Message) -> Greeted:
    reader = Reader(message.body)
    lowest, highest = reader.u16(), reader.u16()
    version = min(highest, PROTOCOL_MAX)
    if version < max(lowest, PROTOCOL_MIN):
        raise PeerRefused(
            f"the peer speaks protocol {lowest} to {highest}, this side {PROTOCOL_MIN} to {PROTOCOL_MAX}",
            code="version",
            remedy="run devipc versions that have a protocol in common",
        )
    instance, flags = reader.raw(16), reader.u8()
    facts = {}
    for _ in range(reader.count(limit=_MAX_FACTS)):
        key = reader.text(limit=_MAX_KEY_NBYTES)
        facts[key] = reader.text(limit=_MAX_VALUE_NBYTES)
    if highest <= PROTOCOL_MAX:  # a newer peer may append what we do not know
        reader.end()
    if flags & ~(_HAS_PIDFD | _HAS_LIFE) and highest <= PROTOCOL_MAX:
        raise WireError(f"unknown flags {flags:#x} in a greeting", code="flags")
    if len(message.fds) != flags.bit_count():
        raise WireError(
            f"{len(message.fds)} descriptors in a greeting that announces {flags.bit_count()}", code="fd_count"
        )
    fds = list(message.fds)
    pidfd = fds.pop(0) if flags & _HAS_PIDFD else None
    life_fd = fds.pop(0) if flags & _HAS_LIFE else None
    pid = channel.peer.pid if pidfd is None else _checked_pid(channel, pidfd)
    if life_fd is not None:
        validate_memfd(life_fd, min_nbytes=PAGE_NBYTES)
    message.take_fds()
    close_all(fds)
    return Greeted(PeerIdentity(instance, pid, channel.peer.uid, facts), version, life_fd, pidfd)


def _checked_pid(channel: Channel, pidfd: int) -> int:
    pid = pid_of_pidfd(pidfd)
    made_by = channel.peer.pid
    # Not comparable: not visible from here (0), already over (-1), or a socket pair that this process made for a child.
    if pid > 0 and made_by not in (0, os.getpid(), pid):
        raise HandleError(
            f"the peer is process {made_by}, but sent the pidfd of process {pid}",
            code="foreign_pidfd",
            remedy="each process must send its own pidfd, over a connection that it made itself",
        )
    return max(pid, 0)


_LIMITS = {"type": 64, "code": 64, "message": 2048, "remedy": 2048, "backend": 64, "device": 128, "call": 128}
_TYPES = {
    name: kind
    for name in errors.__all__
    if isinstance(kind := getattr(errors, name), type) and issubclass(kind, DevIPCError)
}


def encode_error(error: DevIPCError) -> bytes:
    """Return ``error`` in the form that travels; long texts are cut.

    What could not be undone, also of those that it was made from, is a part of its message then.
    """
    kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in _TYPES), PeerError.__name__)
    status, left = error.status, what_is_left(error)
    room = _LIMITS["message"]
    kept = ", ".join(str(getattr(one, "status", None) or getattr(one, "message", one)) for one in left)
    kept = _cut(f"; not undone until that process ends: {kept}", room // 2) if left else ""
    texts = {
        "type": kind,
        "code": error.code,
        "message": _cut(error.message, room - len(kept.encode())) + kept,
        "remedy": error.remedy,
        "backend": error.backend,
        "device": error.device,
        "call": status.call if status else "",
    }
    writer = Writer().u8(int(error.retryable and not left)).i64(status.value if status else 0)
    for key, text in texts.items():
        writer.text(_cut(text, _LIMITS[key]), limit=_LIMITS[key])
    return writer.text(_cut(status.name if status else "", 128), limit=128).done()


def _cut(text: str, nbytes: int) -> str:
    return text.encode(errors="replace")[:nbytes].decode(errors="ignore")


def decode_error(body: bytes, who: str) -> DevIPCError:
    """Return the error that a peer sent, as the same class where this side knows it, else as :class:`PeerError`.

    The peer's words are marked as ``who``'s and stripped of control characters.

    Raises
    ------
    WireError
        When it is no error.
    """
    reader = Reader(body)
    retryable, value = reader.u8(), reader.i64()
    texts = {key: _printable(reader.text(limit=limit)) for key, limit in _LIMITS.items()}
    status_name = _printable(reader.text(limit=128))
    reader.end()
    if retryable > 1:
        raise WireError(f"retry flag {retryable} in an error", code="flags")
    return _TYPES.get(texts["type"], PeerError)(
        f"{who} answers: {texts['message']}",
        code=texts["code"],
        remedy=texts["remedy"],
        retryable=bool(retryable),
        backend=texts["backend"],
        device=texts["device"],
        status=VendorStatus(texts["call"], value, status_name) if texts["call"] else None,
    )


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
