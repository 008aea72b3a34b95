"""How a client attaches: the greeting with the supervisor, then a session with its engine process.

Owns that order, and that nothing stays when it breaks off. What becomes of an attachment is not decided here.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass

from devipc.channel.datagram import close_all
from devipc.channel.link import Link
from devipc.deadline import deadline_after, remaining
from devipc.errors import CapabilityError, DevIPCError, HandleError, PeerGone, StaleError
from devipc.hicache.client.attachment import Attachment
from devipc.hicache.client.readypoints import Forwarder
from devipc.hicache.operations import Kind
from devipc.hicache.tier.index import IndexReader
from devipc.hicache.wire import protocol as p
from devipc.hicache.wire.greeting import FEATURES, accept_welcome, hello
from devipc.hicache.wire.slots import Slots
from devipc.hicache.wire.transport import LinkKind, Offer, Transport, Way
from devipc.session import Importer

__all__ = ["CLIENT_FACT", "FIRST_PAUSE_S", "LONGEST_PAUSE_S", "Target", "attach", "attach_first"]

CLIENT_FACT = "hicache_client"
"""By this fact of a session's client the engine process finds its peer: the client's id in hex."""

FIRST_PAUSE_S = 0.02
"""Between the first two attempts to attach; then twice as long each time."""
LONGEST_PAUSE_S = 1.0
"""Between two attempts at most."""

_SLOTS = 4096
_HELLO_S = 10.0
_FENCES_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to attach, and as who.

    Parameters
    ----------
    path : str
        The supervisor's socket.
    client : bytes
        16 random bytes; the same for each attachment of one client.
    device_uuid : str or None
        The device that the engine must have; None takes whichever it has.
    way : Way
        How frames shall travel, where the supervisor lets them.
    allow_uids : collection of int
        Users other than this one whose daemon is trusted.
    """

    path: str
    client: bytes
    device_uuid: str | None
    way: Way
    allow_uids: Collection[int] = ()


class EngineSession(Importer):
    """The session with the engine process: memory there, fences both ways, and its death."""

    def __init__(self, target: Target, welcome: p.WelcomeFrame) -> None:
        self._client = target.client.hex()
        super().__init__(
            welcome.engine_path,
            backend=welcome.backend,
            device=welcome.device_uuid,
            allow_uids=target.allow_uids,
        )

    def facts(self) -> dict[str, str]:
        """See :meth:`devipc.session.Endpoint.facts`."""
        return {**super().facts(), CLIENT_FACT: self._client}


def attach(target: Target, forwarder: Forwarder, *, timeout_s: float = _HELLO_S) -> Attachment:
    """Attach to a supervisor, then to its engine process. Blocks; everything is given back when it raises.

    Raises
    ------
    PeerGone
        When nobody listens there, or somebody went meanwhile.
    DevIPCError
        What the supervisor refuses with, ``busy`` while something of an older attachment is left.
    CapabilityError
        When the engine has another device than the target says, or its backend is not installed.
    """
    deadline = deadline_after(timeout_s)
    with ExitStack() as undo:
        link = Link.connect(target.path, facts={}, timeout_s=remaining(deadline), allowed_uids=target.allow_uids)
        undo.callback(link.close)
        link.start()
        slots = Slots.create(_SLOTS)
        undo.callback(slots.close)
        welcome, index_fd, transport = _greet(link, target, slots, remaining(deadline))
        undo.callback(transport.close)
        try:
            reader = IndexReader(index_fd, epoch=welcome.epoch)
        finally:
            close_all([index_fd])
        undo.callback(reader.close)
        session = EngineSession(target, welcome)
        undo.callback(session.close)
        if session.peer.instance != welcome.engine_instance:
            raise StaleError("another process listens where the engine should be", remedy="try again")
        session.decide(session.peer)  # now: fences of the engine need it, and it may take seconds
        timelines = {
            kind: session.open_fence(f"done/{target.client.hex()}/{kind.value}", wait_s=_FENCES_S)
            for kind in (Kind.BACKUP, Kind.RESTORE)
        }
        made = Attachment(link, welcome, transport, slots, reader, session, timelines, forwarder)
        undo.pop_all()
        return made


def attach_first(target: Target, forwarder: Forwarder, *, wait_s: float) -> Attachment:
    """Attach as soon as that can be done, at most ``wait_s`` seconds from now; raises as :func:`attach`."""
    deadline, pause = deadline_after(wait_s), FIRST_PAUSE_S
    while True:
        try:
            return attach(target, forwarder)
        except DevIPCError as error:
            if (error.retryable or isinstance(error, PeerGone)) and remaining(deadline):
                time.sleep(min(pause, remaining(deadline)))
                pause = min(2 * pause, LONGEST_PAUSE_S)
                continue
            if isinstance(error, PeerGone):
                raise PeerGone(
                    f"no cache daemon serves at {target.path!r}: {error.message}",
                    code=error.code,
                    remedy="start it with `devipc hicache serve`, or pass wait_s= to wait for it",
                    retryable=True,
                ) from error
            raise


def _greet(link: Link, target: Target, slots: Slots, timeout_s: float) -> tuple[p.WelcomeFrame, int, Transport]:
    """Say hello, by messages where rings are refused; return the answer, the index's descriptor and the transport."""
    try:
        return _greet_by(target.way, link, target, slots, timeout_s)
    except CapabilityError as error:
        if target.way is Way.MESSAGES or error.code not in ("way", "memory_order"):
            raise
    return _greet_by(Way.MESSAGES, link, target, slots, timeout_s)


def _greet_by(
    way: Way, link: Link, target: Target, slots: Slots, timeout_s: float
) -> tuple[p.WelcomeFrame, int, Transport]:
    with Offer(way) as offer:
        body = p.encode(hello(features=FEATURES, client=target.client, way=way.value))
        answer = link.call(LinkKind.HELLO, body, fds=(slots.fileno(), *offer.fds), timeout_s=timeout_s)
        fds = list(answer.take_fds())
        try:
            welcome = p.decode_welcome(answer.body)
            accept_welcome(welcome, features=FEATURES)
            if target.device_uuid not in (None, welcome.device_uuid):
                raise CapabilityError(
                    f"the daemon serves device {welcome.device_uuid}, not {target.device_uuid}",
                    code="wrong_device",
                    remedy="connect to the daemon of this device",
                )
            if not fds:
                raise HandleError("a welcome without an index", code="fd_count")
            index_fd = fds.pop(0)
        except BaseException:
            close_all(fds)
            raise
        try:
            return welcome, index_fd, offer.complete(fds)
        except BaseException:
            close_all([index_fd])
            raise
