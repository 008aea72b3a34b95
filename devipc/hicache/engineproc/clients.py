"""What the engine process holds for each client: a session of its own, two timelines, ready fences, mapped pools.

Owns the mappings of clients' memory and the rule that none goes while a copy uses it. Each client has a socket of its
own, which only its user can reach, so that no client sees or opens what is another's.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from devipc.channel.link import PeerState
from devipc.completion import Fence
from devipc.deadline import deadline_after, remaining
from devipc.errors import BoundsError, ClosedError, CompletionTimeout, DevIPCError, PeerGone, StaleError, UsageError
from devipc.hicache.engine.localcopies import LocalCarrier
from devipc.hicache.engineproc.exporter import ClientExporter
from devipc.hicache.engineproc.timeline import Timeline
from devipc.hicache.layout import PoolLayout
from devipc.hicache.planning.planner import Direction, Planner
from devipc.hicache.results import defect, fresh
from devipc.hicache.wire.pulse import Pulse
from devipc.hicache.wire.slots import Slots
from devipc.interfaces.backend import Backend
from devipc.mappings import MappingCache
from devipc.session import RemoteMemory
from devipc.session.events import PeerEvent
from devipc.session.peer import Peer

__all__ = ["Clients", "EngineClient", "MappedPool"]

FACT = "hicache_client"
"""Name of the fact by which a client's session says whose it is."""

_log = logging.getLogger("devipc.hicache")
_MAX_READY_FENCES = 1024  # far more than a client's streams and its operations can name at a time
_ARRIVE_S = 10.0
_OPEN_S = 10.0


@dataclass(slots=True, eq=False)
class MappedPool:
    """A pool's memory, mapped; unmapped when it is closed and no job uses it."""

    key: tuple[int, int]
    number: int  # of the order to open it
    planner: Planner
    memories: list[RemoteMemory]
    users: int = 0
    closing: bool = False
    closed: bool = False
    told: list[Callable[[], None]] = field(default_factory=list)  # to be called when nothing of it is mapped


class EngineClient:
    """One client. Any thread.

    Parameters
    ----------
    client_id : bytes
        16 bytes.
    slots : Slots
        Owned.
    carrier : LocalCarrier
        Plans for its pools.
    pulse : Pulse
        Where its calls of the driver show, however long they last.
    since : int
        Orders of smaller numbers are for an older attachment of it.
    backend, device_uuid, strategy, folder, uid
        For its session.
    """

    def __init__(
        self,
        client_id: bytes,
        slots: Slots,
        carrier: LocalCarrier,
        pulse: Pulse,
        *,
        since: int,
        backend: Backend,
        device_uuid: str,
        strategy: str,
        folder: str,
        uid: int,
    ) -> None:
        self.id = client_id
        self.slots = slots
        self.timelines: dict[Direction, Timeline] = {}
        self._since = since
        self._carrier = carrier
        self.pulse = pulse
        self._calls = 0  # of the driver, or about to be made
        self._changed = threading.Condition()
        self._opening = threading.Lock()  # of a ready fence
        self._peer: Peer | None = None
        self._failure: DevIPCError | None = None
        self._pools: dict[tuple[int, int], MappedPool] = {}  # those that are being closed included
        self._ended = False
        self._ready: dict[int, Fence] = {}
        self._closing = self._maps_no_more = False
        self._exporter = ClientExporter(
            os.path.join(folder, f"engine-{os.getpid()}-{secrets.token_hex(4)}.sock"),
            self,
            backend=backend,
            device=device_uuid,
            strategy=strategy or None,
            allow_uids=() if uid == os.geteuid() else (uid,),
        )
        self._exporter.on_event(self._on_event)

    @property
    def path(self) -> str:
        """Where its session connects."""
        return self._exporter.path

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Count, and show in the pulse, a call of the driver."""
        with self.pulse.beside():
            with self._changed:
                self._calls += 1
            try:
                yield
            finally:
                with self._changed:
                    self._calls -= 1
                    self._changed.notify_all()

    def _on_event(self, event: PeerEvent) -> None:
        """Greet the client's session: the first that knows its id. On the session's thread for events."""
        if event.state is not PeerState.CONNECTED:
            with self._changed:
                if event.peer is self._peer:
                    self._failure = self._failure or PeerGone("the client's session ended", remedy="attach again")
                    self._changed.notify_all()
            return
        with self._changed:
            if self._peer is not None or event.peer.facts.get(FACT) != self.id.hex():
                _log.warning("a session that is not the client's is passed over")
                return
            self._peer = event.peer
        event.peer.mappings.set_idle_limit(0)  # what a client takes back, it takes back now
        try:
            made = {one: event.peer.create_fence(f"done/{self.id.hex()}/{one.value}") for one in Direction}
        except DevIPCError as error:
            _log.warning("a client's session has no fences: %s", error)
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
            return
        with self._changed:
            self.timelines = {one: Timeline(fence) for one, fence in made.items()}
            self._changed.notify_all()

    def _arrived(self, deadline: float) -> Peer:
        """Wait until the session is there, and its fences are."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._failure is not None or self._closing or bool(self.timelines), remaining(deadline)
            )
            if self._failure is not None:
                raise fresh(self._failure)
            if self._closing:
                raise ClosedError("the client is being closed", remedy="attach again")
            if not done or self._peer is None:
                raise CompletionTimeout(
                    "the client's session with the engine did not come", remedy="connect where WELCOME said"
                )
            return self._peer

    # --- pools ---

    def open_pool(self, key: tuple[int, int], number: int, layout: PoolLayout) -> None:
        """Map a pool, or raise what is wrong with it. Blocks for the client's answers and the driver."""
        if number < self._since:
            raise StaleError("the client has attached again", remedy="register the pool there")
        peer = self._arrived(deadline_after(_ARRIVE_S))
        names = [f"pool/{key[0]}/{key[1]}/{chunk}" for chunk in range(len(layout.chunks))]
        memories = peer.open_all(names, timeout_s=_OPEN_S)
        try:
            pool = MappedPool(key, number, self._plan(layout, memories), memories)
            with self._changed:
                if self._closing or key in self._pools:
                    raise UsageError("the pool is open already, or its client leaves", code="duplicate")
                self._pools[key] = pool
        except BaseException:
            self._close_all(memories)
            raise

    def _plan(self, layout: PoolLayout, memories: list[RemoteMemory]) -> Planner:
        addresses, regions = [], []
        for number, (chunk, memory) in enumerate(zip(layout.chunks, memories, strict=True)):
            if memory.meta.offset + chunk.nbytes > memory.nbytes:
                raise BoundsError(
                    f"chunk {number} has {chunk.nbytes} bytes in the layout, {memory.nbytes} are shared",
                    remedy="share every chunk whole",
                )
            if not memory.meta.writable:
                raise UsageError(f"chunk {number} is shared for reading", remedy="share it writable: pages come back")
            addresses.append(memory.ptr)
            regions.append(memory.region)
        return self._carrier.planner(layout, addresses, regions)

    def close_pool(self, key: tuple[int, int], number: int, done: Callable[[], None]) -> None:
        """Unmap a pool, now or behind the last job that uses it; then call ``done``, on whichever thread did it.

        Of a pool that is not open, or was not opened by order ``number``, nothing is mapped.
        """
        with self._changed:
            pool = self._pools.get(key)
            if pool is not None and pool.number != number:
                pool = None
            if pool is not None:
                pool.closing = True
                pool.told.append(done)
        if pool is not None:
            self._unmap_unused(pool)
        else:
            done()

    def use(self, key: tuple[int, int]) -> MappedPool:
        """Return a pool for one job, which gives it to :meth:`unuse`. Raises StaleError when it is not mapped."""
        with self._changed:
            pool = self._pools.get(key)
            if pool is None or pool.closing:
                raise StaleError(f"pool {key[0]} of generation {key[1]} is not mapped", remedy="register it again")
            pool.users += 1
            return pool

    def unuse(self, pool: MappedPool) -> None:
        """End the use of one job whose copies are over."""
        with self._changed:
            pool.users -= 1
        if pool.closing:
            self._unmap_unused(pool)

    def _unmap_unused(self, pool: MappedPool) -> None:
        with self._changed:
            if pool.users or pool.closed:
                return
            pool.closed = True  # by this thread
        self._close_all(pool.memories)
        with self._changed:
            del self._pools[pool.key]
            self._changed.notify_all()
        for tell in pool.told:
            tell()

    def _close_all(self, memories: Sequence[RemoteMemory | MappingCache]) -> None:
        for memory in memories:
            try:
                memory.close()
            except Exception as error:  # whoever waits for it would wait for ever
                self.lose(error)

    def lose(self, error: Exception) -> None:
        """End the engine: what the driver does not unmap, only the end of the process does."""
        _log.error("memory of a client was not unmapped", exc_info=error)
        self._carrier.lose(defect(error))

    # --- ready fences ---

    def ready_fence(self, number: int) -> Fence:
        """Open a fence that the client signals, at its first use; blocks for the client's answer."""
        with self._opening:
            fence = self.known_ready_fence(number)
            if fence is None:
                fence = self._arrived(deadline_after(_ARRIVE_S)).open_fence(f"ready/{number}", timeout_s=_OPEN_S)
                with self._changed:
                    self._ready[number] = fence
                    spent = [self._ready.pop(next(iter(self._ready)))] if len(self._ready) > _MAX_READY_FENCES else []
                for one in spent:
                    one.close(0.0)
            return fence

    def known_ready_fence(self, number: int) -> Fence | None:
        """Return such a fence when it is open already. Those that are not asked for are closed, the oldest first."""
        with self._changed:
            fence = self._ready.pop(number, None)
            if fence is not None:
                self._ready[number] = fence  # the last one now
            return fence

    # --- the end ---

    def begins_to_close(self) -> bool:
        """Return True for the first one who asks: who is to close it."""
        with self._changed:
            first, self._ended = not self._ended, True
        return first

    def close_pools(self) -> None:
        """Map nothing more; unmap all pools that no job uses, and the others behind those."""
        with self._changed:
            self._closing, peer = True, self._peer
            pools = list(self._pools.values())
            for pool in pools:
                pool.closing = True
            self._changed.notify_all()
        if peer is not None:  # which may be asked for a pool just now, and not answer
            self._close_all([peer.mappings])
        with self._changed:
            self._maps_no_more = True
            self._changed.notify_all()
        for pool in pools:
            self._unmap_unused(pool)

    def wait_unmapped(self, timeout_s: float | None) -> bool:
        """Block until no pool is mapped any more, nor can be; False when the time is up."""

        def unmapped() -> bool:
            mapped = self._peer is not None and self._peer.mappings.stats()["open"]
            return self._maps_no_more and not (self._pools or self._calls or mapped)

        with self._changed:
            return self._changed.wait_for(unmapped, timeout_s)

    def close(self, *, timeout_s: float) -> None:
        """Hang up and give everything back. Blocks for a client that does not let go of fences."""
        self.close_pools()
        for timeline in self.timelines.values():
            timeline.forget()
        try:
            self._exporter.close(timeout_s=timeout_s)
        finally:
            self.slots.close()

    def status(self) -> dict[str, object]:
        """Return what is held, JSON-ready."""
        with self._changed:
            pools = {f"{number}/{generation}": pool.users for (number, generation), pool in self._pools.items()}
            connected = self._peer is not None and self._failure is None
        return {"connected": connected, "pools": pools, "ready_fences": len(self._ready)}


class Clients:
    """All clients by id. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[bytes, EngineClient] = {}

    def add(self, client: EngineClient) -> None:
        """Keep a client; raises UsageError when its id is taken."""
        with self._lock:
            self.check_free(client.id)
            self._clients[client.id] = client

    def check_free(self, client_id: bytes) -> None:
        """Raise UsageError when a client of this id is open."""
        if client_id in self._clients:
            raise UsageError("the client is open", code="duplicate", remedy="close it first")

    def get(self, client_id: bytes) -> EngineClient:
        """Return a client; raises StaleError for one that is not open."""
        client = self.find(client_id)
        if client is None:
            raise StaleError("the client is not open", remedy="open it first")
        return client

    def find(self, client_id: bytes) -> EngineClient | None:
        """Return a client, or None when it is not open."""
        with self._lock:
            return self._clients.get(client_id)

    def forget(self, client: EngineClient) -> None:
        """Forget a client of which nothing is mapped. Again does nothing, whoever has its id by then."""
        with self._lock:
            if self._clients.get(client.id) is client:
                del self._clients[client.id]

    def all(self) -> list[EngineClient]:
        """Return all of them."""
        with self._lock:
            return list(self._clients.values())
