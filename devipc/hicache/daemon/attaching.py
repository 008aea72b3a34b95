"""How a connection becomes a client: its greeting is checked, its descriptors are taken, the engine is told.

Owns the handlers of a client's link and the rule that one client id is attached once: the next life of it waits until
nothing of the older one is left. It knows neither the listener nor how an engine is kept.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from devipc.channel.datagram import close_all, no_descriptors
from devipc.channel.link import Link, PeerState, Reply
from devipc.channel.message import Message
from devipc.errors import (
    CapabilityError,
    ClosedError,
    CompletionTimeout,
    DevIPCError,
    HandleError,
    PeerRefused,
    ResourceExhausted,
    UsageError,
)
from devipc.hicache.daemon.client import AttachedClient, Host, OperationNumbers
from devipc.hicache.daemon.keeper import Life
from devipc.hicache.daemon.options import DaemonConfig
from devipc.hicache.daemon.remotecopies import RemoteClient
from devipc.hicache.requests import CancelWord, CompletionFence, ReadyPoint
from devipc.hicache.results import fresh
from devipc.hicache.tier.index import IndexWriter
from devipc.hicache.wire import protocol as p
from devipc.hicache.wire.greeting import FEATURES, answer_hello
from devipc.hicache.wire.transport import Taken, Way, take_offer

__all__ = ["Clients"]

_OLDER_S = 5.0
_UNSERVED_S = 0.5
_log = logging.getLogger("devipc.hicache")


class _Numbers(OperationNumbers):
    def __init__(self, remote: RemoteClient) -> None:
        self._remote = remote
        self.op = 0

    def ready(self, point: p.ReadyForm, slot: int) -> ReadyPoint:
        """See :class:`~devipc.hicache.wire.codec.Named`."""
        if point is True:
            return self._remote.ready(None)
        return self._remote.ready(point or None, slot)

    def fence(self, slot: int) -> CompletionFence:
        """See :class:`~devipc.hicache.wire.codec.Named`."""
        return self._remote.fence(slot, self.op)

    def cancel(self, slot: int) -> CancelWord:
        """See :class:`~devipc.hicache.wire.codec.Named`."""
        return self._remote.cancel(slot)


class Clients:
    """See the module. Any thread.

    Parameters
    ----------
    config : DaemonConfig
        Limits.
    index : IndexWriter
        Sent to each client.
    life : callable
        Returns the engine that serves, or None.
    host : Host
        What the clients need.
    """

    def __init__(
        self, config: DaemonConfig, index: IndexWriter, *, life: Callable[[], Life | None], host: Host
    ) -> None:
        self._config, self._index, self._life, self._host = config, index, life, host
        self._lock = threading.Lock()
        self._by_id: dict[bytes, AttachedClient] = {}
        self._entering: set[bytes] = set()
        self._unserved: set[AttachedClient] = set()  # got no thread, and are not let go: who greets next tries again
        self._lives: dict[AttachedClient, tuple[Life, RemoteClient]] = {}

    def all(self) -> list[AttachedClient]:
        """Return those who are attached, those included that are being taken apart."""
        with self._lock:
            return list(self._by_id.values())

    def of(self, life: Life) -> list[AttachedClient]:
        """Return those who are attached to one engine."""
        with self._lock:
            return [client for client, (its, _) in self._lives.items() if its is life]

    def let_go(self, client: AttachedClient, timeout_s: float) -> None:
        """See :class:`~devipc.hicache.daemon.client.Host`. Again does nothing."""
        with self._lock:
            life, remote = self._lives.get(client, (None, None))
        if life is None or remote is None:
            return
        life.engine.detach(client.session)
        life.process.close_client(remote, timeout_s=timeout_s)
        with self._lock:
            self._lives.pop(client, None)

    def forget(self, client: AttachedClient) -> None:
        """Note that one is over."""
        with self._lock:
            if self._by_id.get(client.client) is client:
                del self._by_id[client.client]

    def hello(self, link: Link, message: Message) -> Reply:
        """Answer the greeting of a client; see :class:`~devipc.hicache.wire.transport.LinkKind`. Blocks."""
        theirs = p.decode_hello(message.body)
        if self._host.refusal is not None:
            raise fresh(self._host.refusal)
        if any(client.link is link for client in self.all()):
            raise UsageError("a client greeted on this connection already", remedy="connect once for each client")
        if Way(theirs.way) is Way.RINGS and (self._config.messages or link.peer.uid != os.geteuid()):
            # One of another user gets no memory mapped here but its slots.
            raise CapabilityError("no rings for this client", code="way", remedy="greet again with messages")
        if len(message.fds) < 2:
            raise HandleError(f"{len(message.fds)} descriptors in a greeting", code="fd_count")
        self._reserve(theirs.client, link.peer.uid)
        try:
            return self._attach(link, theirs, message)
        except OSError as error:
            raise no_descriptors("attach", error) from error
        finally:
            with self._lock:
                self._entering.discard(theirs.client)

    def _reserve(self, client: bytes, uid: int) -> None:
        """Make sure that nothing of an older attachment is left, and that there is room."""
        self._end_unserved()
        with self._lock:
            if client in self._entering:
                raise ResourceExhausted("this client is attaching already", code="busy", remedy="greet again")
            older = self._by_id.get(client)
            if older is not None and older.link.peer.uid != uid:
                # Whoever may ask for the status knows the id; nobody ends another user's attachment by it.
                raise PeerRefused(
                    "another user's client has this id", code="client", remedy="greet with one of your own"
                )
            if older is None and len(self._by_id) + len(self._entering) >= self._config.max_clients:
                raise ResourceExhausted(
                    f"{self._config.max_clients} clients are attached",
                    code="busy",
                    remedy="end one of them, or let the daemon take more (max_clients)",
                )
            self._entering.add(client)
        if older is None:
            return
        older.hang_up(ClosedError("the client attached again"))
        if not older.wait_over(_OLDER_S):
            with self._lock:
                self._entering.discard(client)
            raise ResourceExhausted(
                "copies of this client's older attachment still run", code="busy", remedy="greet again later"
            )

    def _attach(self, link: Link, theirs: p.HelloFrame, message: Message) -> Reply:
        life = self._life()
        if life is None:
            raise ResourceExhausted(
                "the engine is being started again", code="no_engine", remedy="greet again in a moment"
            )
        slots_fd, *offer = message.take_fds()
        try:
            remote = life.process.open_client(theirs.client, slots_fd, uid=link.peer.uid)
        except BaseException:
            close_all(offer)
            raise
        taken: Taken | None = None
        try:
            taken = take_offer(Way(theirs.way), offer)
            welcome = self._welcome(theirs, life, remote)
            client = AttachedClient(
                theirs.client,
                link,
                taken.transport,
                _Numbers(remote),
                host=self._host,
                way=theirs.way,
                joins=bool(theirs.features & p.FEATURE_PASSED),
            )
            session = life.engine.attach(theirs.client, client)
        except BaseException:
            if taken is not None:
                taken.transport.close()
            life.process.close_client(remote)
            raise
        client.session = session
        with self._lock:
            self._by_id[theirs.client] = client
            self._lives[client] = (life, remote)
        try:
            client.start()
        except DevIPCError:
            taken.transport.close()
            self._end(client, _OLDER_S)
            raise
        if link.state is not PeerState.CONNECTED:
            client.hang_up(ClosedError("the client went while it greeted"))
        return welcome, (self._index.fileno(), *taken.fds)

    def _end(self, client: AttachedClient, timeout_s: float) -> None:
        """Let go of one that no thread serves, and of its id; where that is not over in time, it is tried again."""
        try:
            self.let_go(client, timeout_s)
        except CompletionTimeout as error:
            _log.warning("the engine still maps memory of client %s: %s", client.client.hex()[:8], error)
            with self._lock:
                self._unserved.add(client)
            return
        self.forget(client)

    def _end_unserved(self) -> None:
        """Try again to end those that no thread serves: nobody else does, and each keeps its id and its room."""
        with self._lock:
            unserved, self._unserved = self._unserved, set()
        for client in unserved:
            self._end(client, _UNSERVED_S)

    def _welcome(self, theirs: p.HelloFrame, life: Life, remote: RemoteClient) -> bytes:
        welcome = answer_hello(
            theirs,
            features=FEATURES,
            epoch=self._index.epoch,
            layer_groups=tuple(self._config.layer_groups),
            engine_path=remote.path,
            engine_instance=life.process.instance,
            device_uuid=life.engine.carrier.device_uuid,
            backend=self._config.backend,
            write_policy=self._config.write_policy,
        )
        return p.encode(welcome)
