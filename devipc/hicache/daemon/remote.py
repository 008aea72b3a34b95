"""The supervisor's half of an engine process: it is spawned, asked, watched, stopped, and killed when it must be.

Owns the process and the link to it. It loads no driver, and knows neither a key nor a table; what moves pages through
it is :class:`~devipc.hicache.daemon.remotecopies.RemoteCarrier`. How a supervisor uses it::

    process = EngineProcess(EngineSpawn(backend="host", folder=folder), arena.fileno(), arena.nbytes)
    engine = Engine(process.carrier, tier, config)      # the tables, in the supervisor
    process.on_end(engine.lose)                         # told twice: dying, then gone
    client = process.open_client(client_id, slots_fd, uid=uid)      # at HELLO; client.path goes into WELCOME
    session = engine.attach(client_id, answers)         # owner: the client's id, which names it in the engine process
    fence, ready, cancel = client.fence(slot, op), client.ready(point, slot), client.cancel(slot)   # for a request
    session.dying(); session.wait_idle(...); engine.detach(session); process.close_client(client)
    engine.close(timeout_s)                             # the lanes; then the process
    process.close(timeout_s)

An engine that dies: at the first sign ``on_end`` hears an error that is no DeviceLostError, so that nothing new begins
and what waits ends; copies in flight stay, since a dead process's last transfers still land. Then it is killed for
certain, and when its pidfd is readable ``on_end`` hears a DeviceLostError, which ends everything. The tier stays; a
new EngineProcess and a new Engine over it go on.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from devipc.channel import Channel, Message
from devipc.channel.datagram import close_all, no_descriptors
from devipc.channel.hello import decode_error
from devipc.channel.link import Link, PeerState
from devipc.channel.listener import remove_leftovers
from devipc.channel.seqpacket import channel_pair
from devipc.deadline import deadline_after, remaining
from devipc.errors import CompletionTimeout, DeviceLostError, DevIPCError, DriverError, PeerGone
from devipc.hicache.daemon.child import Child, EngineSpawn, meaning
from devipc.hicache.daemon.remotecopies import RemoteCarrier, RemoteClient
from devipc.hicache.planning.planner import Direction
from devipc.hicache.wire import jobs as j
from devipc.hicache.wire.pulse import PulseReader
from devipc.hicache.wire.ring import RING_FDS, Consumer, Producer
from devipc.hicache.wire.slots import Slots

__all__ = ["EngineProcess", "EngineSpawn"]

_GREET_S = 20.0
_KILLED_S = 30.0
_GRACE_S = 1.0
_ASK_S = 0.05
_log = logging.getLogger("devipc.hicache")


class EngineProcess:
    """See the module. Any thread.

    Making it blocks until the process is ready: it has opened the device and registered the arena.

    Parameters
    ----------
    spawn : EngineSpawn
        How.
    arena_fd, arena_nbytes : int
        The host tier's memory; stays the caller's, and must stay mapped as long as the tier is used.

    Attributes
    ----------
    carrier : RemoteCarrier
        For :class:`~devipc.hicache.engine.Engine`.
    instance : bytes
        16 bytes: this life of the process, as clients learn it in WELCOME.
    facts : dict
        What the process found at its start, JSON-ready: device, backend, capabilities.

    Raises
    ------
    DevIPCError
        What kept the process from being ready, as the same class; or PeerGone when it ended, CompletionTimeout when it
        took too long. Nothing of it is left then.
    """

    def __init__(self, spawn: EngineSpawn, arena_fd: int, arena_nbytes: int) -> None:
        self._spawn = spawn
        self._lock = threading.Lock()
        self._listeners: list[Callable[[DevIPCError], None]] = []
        self._told: list[DevIPCError] = []
        self._cause: DevIPCError | None = None
        self._child = Child(spawn.module, on_end=self._gone)
        self._closing = False
        self._carrier: RemoteCarrier | None = None
        self._pulse: PulseReader | None = None
        self._clients: dict[bytes, RemoteClient] = {}
        deadline = deadline_after(spawn.start_timeout_s)
        mine, theirs = channel_pair()
        try:
            self._child.start(theirs)
        except BaseException:
            mine.close()
            raise
        rings: list[Producer] = []
        try:
            self._link = self._greet(mine, min(_GREET_S, remaining(deadline)))
            self.instance = self._link.peer.instance
            self._start(rings, arena_fd, arena_nbytes, deadline)
        except BaseException:
            self._abandon(rings)
            raise

    @property
    def carrier(self) -> RemoteCarrier:
        """What moves pages through this process."""
        assert self._carrier is not None
        return self._carrier

    @property
    def pid(self) -> int:
        """The process id, for people."""
        return self._child.pid

    # --- starting ---

    def _greet(self, channel: Channel, timeout_s: float) -> Link:
        link = Link.over(channel, facts={"role": "hicache-supervisor"}, timeout_s=timeout_s)
        link.handle(j.EngineCall.LOST, self._on_lost)
        link.on_state(self._on_state)
        try:
            link.start()
        except BaseException:
            link.close()
            raise
        return link

    def _start(self, rings: list[Producer], arena_fd: int, arena_nbytes: int, deadline: float) -> None:
        spawn = self._spawn
        rings.append(Producer(slots=256, slot_nbytes=8192, arena_nbytes=4 * 2**20))
        rings.append(Producer(slots=256, slot_nbytes=8192, arena_nbytes=4 * 2**20))
        rings.append(Producer(slots=1024, slot_nbytes=128, arena_nbytes=2 * j.MAX_JOB_NBYTES))
        start = j.Start(
            backend=spawn.backend,
            device=spawn.device,
            strategy=spawn.strategy,
            arena_nbytes=arena_nbytes,
            chunk_nbytes=spawn.chunk_nbytes,
            pin_required=spawn.pin_required,
            bounce_nbytes=spawn.bounce_nbytes,
            groups=tuple(spawn.layer_groups),
            folder=spawn.folder,
        )
        fds = [arena_fd, *(fd for ring in rings for fd in ring.fds())]
        answer = self._link.call(j.EngineCall.START, j.encode(start), fds=fds, timeout_s=remaining(deadline))
        try:
            ready = j.decode_call(answer.body, j.Ready)
            self.facts: dict[str, object] = json.loads(ready.facts)
        except BaseException:
            answer.close_fds()
            raise
        *reports, pulse = answer.take_fds() or (-1,)
        try:
            self._pulse = PulseReader(pulse)
        except BaseException:
            close_all(reports)
            raise
        consumer = Consumer(reports[:RING_FDS], limit_nbytes=j.MAX_JOB_NBYTES)
        try:
            self._carrier = RemoteCarrier(
                ready.device_uuid,
                ready.unpinned_reason,
                moves={Direction.BACKUP: rings[0], Direction.RESTORE: rings[1]},
                orders=rings[2],
                reports=consumer,
                plans=self._pulse.plans,
                broken=self._dying,
            )
            self._carrier.floor_nbytes_per_s = float(str(self.facts.get("floor_nbytes_per_s", 0)))
        except BaseException:
            consumer.close()
            raise
        with self._lock:
            told = list(self._told)
        for error in told:  # it ended while it was being looked at
            self._carrier.end(error)

    def _abandon(self, rings: list[Producer]) -> None:
        self._closing = True
        self.kill()
        self._child.wait(_KILLED_S)
        self._child.join(_KILLED_S)
        if hasattr(self, "_link"):
            self._link.close()
        if self._carrier is not None:
            self._carrier.close_rings()
        else:
            for ring in rings:
                ring.close()
        if self._pulse is not None:
            self._pulse.close()

    # --- clients ---

    def open_client(self, client_id: bytes, slots_fd: int, *, uid: int, timeout_s: float = 10.0) -> RemoteClient:
        """Have the process listen for a client's session. Blocks for a round trip.

        Parameters
        ----------
        client_id : bytes
            16 bytes, which the client's session tells as the fact ``hicache_client``, in hexadecimal.
        slots_fd : int
            The client's slots; owned, also when this raises.
        uid : int
            User that may connect there.

        Raises
        ------
        UsageError
            When the client is open already: close it first.
        HandleError
            When the descriptor is no set of slots.
        PeerGone, CompletionTimeout
            When the process does not answer.
        """
        try:
            kept = os.dup(slots_fd)
        except OSError as error:
            os.close(slots_fd)
            raise no_descriptors("dup", error) from error
        try:
            slots = Slots.open(slots_fd)
            try:
                body = j.encode(j.OpenClient(client=client_id, since=self.carrier.next_number(), uid=uid))
                answer = self._link.call(j.EngineCall.OPEN_CLIENT, body, fds=[kept], timeout_s=timeout_s)
                answer.close_fds()
                opened = j.decode_call(answer.body, j.ClientOpened)
            except BaseException as error:
                slots.close()
                if isinstance(error, CompletionTimeout):  # it may come to it later, all the same
                    with suppress(DevIPCError):
                        self._link.notify(j.EngineCall.CLOSE_CLIENT, j.encode(j.CloseClient(client=client_id)))
                raise
        finally:
            os.close(kept)
        client = RemoteClient(self.carrier, client_id, opened.path, slots)
        with self._lock:
            self._clients[client_id] = client
        return client

    def close_client(self, client: RemoteClient, *, timeout_s: float = 10.0) -> None:
        """Have the process unmap a client's pools and hang up; nothing of the client may be open. Blocks.

        When it returns, nothing of its memory is mapped: the process says so, or is gone.

        Raises
        ------
        CompletionTimeout
            With code ``still_mapped`` while that is not known; may be called again.
        """
        deadline = deadline_after(timeout_s)
        with self._lock:
            if self._clients.get(client.id) is client:
                del self._clients[client.id]
        client.slots.close()  # in this process
        body = j.encode(j.CloseClient(client=client.id))
        while not self._child.ended:
            try:
                self._link.call(j.EngineCall.CLOSE_CLIENT, body, timeout_s=max(remaining(deadline), _ASK_S)).close_fds()
                return
            except DevIPCError as error:  # also of one that is dying: it unmaps when it is gone, and not before
                _log.debug("a client is not let go yet: %s", error)
                self._child.wait(min(_ASK_S, remaining(deadline)))
            if not remaining(deadline) and not self._child.ended:
                text = f"the engine process {self.pid} may still map memory of the client after {timeout_s:g} s"
                raise CompletionTimeout(text, code="still_mapped", remedy="free none of it yet, and try again")

    # --- watching ---

    def status(self, *, timeout_s: float = 2.0) -> dict[str, object]:
        """Ask the process what it does; JSON-ready. Blocks. Raises PeerGone or CompletionTimeout."""
        answer = self._link.call(j.EngineCall.STATUS, timeout_s=timeout_s)
        answer.close_fds()
        found: dict[str, object] = json.loads(answer.body)
        return found

    def stuck(self) -> dict[str, float]:
        """Return for how many seconds each thread of it has been in the driver, and ``process`` without a beat.

        Never blocks. ``process`` is as exact as this is asked often; a healthy one stays below half a second.
        """
        return self._pulse.stuck() if self._pulse is not None else {}

    def on_end(self, callback: Callable[[DevIPCError], None]) -> None:
        """Call ``callback`` when the process is dying, with the cause, then when it is gone, with a DeviceLostError.

        What was told before is told at once. Not called for an end that :meth:`close` brings. It must not block.
        """
        with self._lock:
            self._listeners.append(callback)
            told = list(self._told)
        for error in told:
            callback(error)

    @property
    def ended(self) -> bool:
        """True once nothing of the process is left."""
        return self._child.ended

    def wait_ended(self, *, timeout_s: float) -> bool:
        """Block until nothing of the process is left; False when the time is up."""
        return self._child.wait(timeout_s)

    def kill(self) -> None:
        """End the process at once; what follows is as if it had died. Again does nothing."""
        self._child.kill()

    def _on_lost(self, message: Message) -> None:
        self._dying(decode_error(message.body, "the engine process"))

    def _on_state(self, state: PeerState) -> None:
        if state is PeerState.CONNECTED:
            return
        self._dying(
            PeerGone("the engine process is dying", code="engine", retryable=True, remedy="wait for the next one")
        )

    def _dying(self, error: DevIPCError) -> None:
        """Say that it is dying, once, and make sure that it does."""
        if isinstance(error, DeviceLostError):  # which would say that nothing moves any more
            error = DriverError(error.message, code=error.code, remedy=error.remedy, retryable=True)
        with self._lock:
            first, self._cause = self._cause is None, self._cause or error
        if first and not self._closing:
            _log.error("the engine process %d ends: %s", self.pid, error)
        if first:
            self._tell(error)
        if not self._closing:
            self.kill()

    def _gone(self, code: int) -> None:
        cause = self._cause or PeerGone(
            f"the engine process ended ({meaning(code)})", code="engine", retryable=True, remedy="see its log"
        )
        self._dying(cause)
        remove_leftovers(self._spawn.folder)  # its sockets, whose names never come again
        self._tell(
            DeviceLostError(
                f"the engine process ended ({meaning(code)}): {cause.message}",
                code="engine_gone",
                retryable=True,
                remedy="submit it again when the daemon has started another engine",
            )
        )

    def _tell(self, error: DevIPCError) -> None:
        with self._lock:
            self._told.append(error)
            listeners = [] if self._closing else list(self._listeners)
        if self._carrier is not None:
            self._carrier.end(error)
        for listener in listeners:
            try:
                listener(error)
            except Exception:
                _log.exception("who was told of an engine's end failed")

    # --- the end ---

    def close(self, timeout_s: float = 30.0) -> bool:
        """Stop the process in good order, at the end of the time by force, and give everything back. Blocks.

        To be called when the engine's lanes have stopped. Again does nothing.

        Returns
        -------
        bool
            False when even a killed process was not gone in time: the arena stays in use. Call it again.
        """
        deadline = deadline_after(timeout_s)
        first, self._closing = not self._closing, True
        if first and not self._child.ended and self._cause is None:
            body = j.encode(j.Stop(timeout_s=max(0.0, remaining(deadline) - _GRACE_S)))
            try:
                self._link.call(j.EngineCall.STOP, body, timeout_s=remaining(deadline)).close_fds()
                self._child.wait(max(remaining(deadline), _GRACE_S))
            except DevIPCError as error:
                _log.warning("the engine process does not stop: %s", error)
        if not self._child.ended:
            self.kill()
        if not self._child.wait(max(remaining(deadline), _GRACE_S)):
            return False
        self._child.join(_KILLED_S)
        self._link.close()
        self.carrier.close_rings()
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.slots.close()
        if self._pulse is not None:
            self._pulse.close()
        return True
