"""HiCacheClient: the one interface to the cache, wherever its engine runs.

Owns what a scheduler sees: pools, operations, tickets. Which deployment serves it is decided by a URL, once; behind
that stands an :class:`EngineLink`, and nothing here knows which one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from devipc.deadline import bounded, deadline_after, remaining
from devipc.errors import DevIPCError
from devipc.hicache.builders import BuiltPool
from devipc.hicache.client.desk import CALL_TIMEOUT_S, Desk, check_tickets, confirm_after
from devipc.hicache.client.links import EngineLink
from devipc.hicache.client.registry import Registry
from devipc.hicache.client.ticket import OperationFence, Ticket
from devipc.hicache.deployments import open_link
from devipc.hicache.engine.pools import page_names
from devipc.hicache.engine.transferengine import EngineConfig
from devipc.hicache.handles import UNFENCED, FencePoint, PoolHandle, check_keys, check_pages, check_ready
from devipc.hicache.keys import Namespace
from devipc.hicache.local import LocalEngine
from devipc.hicache.operations import Event
from devipc.hicache.policy import WritePolicy
from devipc.hicache.requests import (
    Backup,
    Flush,
    Invalidate,
    Keys,
    Lookup,
    Ping,
    Prefetch,
    ReadyPoint,
    Request,
    Restore,
    StatusRequest,
)
from devipc.hicache.tier.search import Search
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import Stream

__all__ = ["UNFENCED", "FencePoint", "HiCacheClient", "PoolHandle", "connect"]

DEFAULT_TIMEOUT_S = DEFAULT_LEASE_S = 30.0
_GRACE_S = 0.1  # for callbacks that are about to return


class HiCacheClient:
    """One scheduler's way to the cache; made by :func:`connect`. Any thread; ``match`` and submitting never wait.

    The scheduler owns its pools, pages and keys, and decides; the engine owns what is in host memory. A page belongs
    to its operation from the call until the ticket has a status. Operations answer through their :class:`Ticket`, a
    refusal too; only what is wrong in the calling code raises at once.

    Every transfer names its *ready* point: a stream (all its work so far), what :meth:`ready` returned, a
    :class:`FencePoint`, or :data:`UNFENCED`. The engine asks it; no stream of the engine ever waits for it.

    Parameters
    ----------
    link : EngineLink
        The deployment; closed with the client.
    """

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._search = Search(link.reader())
        self._desk = Desk(link, on_dying=self._search.expire, on_reader=self._search.use)
        self._registry = Registry(link, self._desk)

    @property
    def write_policy(self) -> WritePolicy:
        """When pages should be backed up, where the caller has no opinion of its own."""
        return self._link.write_policy

    # --- pools -------------------------------------------------------------------------------------------------------

    def register_pool(self, built: BuiltPool, *, namespace: Namespace) -> PoolHandle:
        """Make a pool known to the engine. Its memory must stay allocated until :meth:`unregister` has returned.

        Parameters
        ----------
        built : BuiltPool
            Layout, and the memory behind each chunk, as the builders return it.
        namespace : Namespace
            What decides the pages' content beside tokens; made for this very layout.

        Raises
        ------
        UsageError
            For a namespace of another layout, or a pool that cannot be moved here.
        BoundsError
            When a chunk leaves the allocation that the driver reports.
        CompletionTimeout
            When no answer came in time; with code ``still_mapped``, its memory must stay until :meth:`close` returned.
        """
        return self._registry.register(built, namespace)

    def unregister(self, pool: PoolHandle, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Block until the engine does not touch the pool any more. Content in the host tier stays.

        Raises
        ------
        CompletionTimeout
            When an operation still uses it: its memory must stay. Call again to go on waiting.
        """
        self._registry.unregister(pool, timeout_s)

    # --- finding -----------------------------------------------------------------------------------------------------

    def match(self, pool: PoolHandle, keys: Keys) -> int:
        """Return how many pages, from the first on without a gap, are in the host tier: a hint, without any call.

        Parameters
        ----------
        keys : numpy.ndarray
            uint8 ``(n, 16)``, as :func:`~devipc.hicache.keys.page_keys` makes them.
        """
        missing = np.flatnonzero(~self.find(pool, keys))
        return int(missing[0]) if len(missing) else len(keys)

    def find(self, pool: PoolHandle, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return which pages are in the host tier, bool ``(n,)``: a hint, as :meth:`match`."""
        names = page_names(check_keys(keys), pool.namespace)
        self._desk.check_process()
        return self._search.find(names, pool.page_nbytes)

    def lookup(self, pool: PoolHandle, keys: Keys, *, lease_s: float = DEFAULT_LEASE_S) -> Ticket:
        """Find pages and keep them for a restore: :attr:`Ticket.hit` once it was ``leased``.

        The lease ends with :meth:`release`, with a restore that is given it, or with the client; ``lease_s`` is a
        backstop. A lookup that finds nothing is completed at once.
        """
        chosen = check_keys(keys)
        return self._desk.submit(
            lambda op: Lookup(
                op=op, pool=pool.number, generation=pool.generation, keys=chosen, lease_s=bounded(lease_s)
            ),
            page_count=len(chosen),
        )

    def release(self, lease: Ticket) -> bool:
        """End the lease of a lookup. False when it has ended already."""
        return lease.happen(Event.RELEASE_LEASE)

    # --- moving ------------------------------------------------------------------------------------------------------

    def backup(
        self,
        pool: PoolHandle,
        pages: npt.ArrayLike,
        keys: Keys,
        *,
        ready: ReadyPoint | Stream,
        after: Sequence[Ticket] = (),
        confirm: bool = True,
        partial: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Ticket:
        """Copy pages to the host tier.

        The ticket tells ``source_released`` when the pages may be reused, and ``visible`` when others find them.

        Parameters
        ----------
        pages : array of integers
            Page ids, ``(n,)``.
        keys : numpy.ndarray
            uint8 ``(n, 16)``.
        ready : ReadyPoint or Stream
            When the pages hold what they shall.
        after : sequence of Ticket
            Restores whose pages the content was computed from: nothing is published before all are completed, and
            nothing at all when one of them is not.
        confirm : bool
            False leaves it to the caller to :meth:`Ticket.confirm` or :meth:`Ticket.discard`.
        partial : bool
            Store as many pages as the host tier can hold, instead of refusing more than that.
        timeout_s : float
            When the engine gives up.
        """
        chosen, named, restores = check_pages(pages), check_keys(keys), check_tickets(after)
        point, fence = self._point(ready), self._link.fence()
        cancel = self._link.word(fence)
        confirmed = confirm and not restores
        ticket = self._desk.submit(
            lambda op: Backup(
                op=op,
                pool=pool.number,
                generation=pool.generation,
                pages=chosen,
                keys=named,
                ready=point,
                fence=fence,
                cancel=cancel,
                timeout_s=bounded(timeout_s),
                confirmed=confirmed,
                partial=partial,
            ),
            page_count=len(chosen),
            fence=OperationFence(fence, ((),)),
            cancel=cancel,
        )
        if confirm and restores:
            confirm_after(ticket, restores)
        return ticket

    def restore(
        self,
        pool: PoolHandle,
        keys: Keys,
        pages: npt.ArrayLike,
        *,
        ready: ReadyPoint | Stream,
        lease: Ticket | None = None,
        partial: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Ticket:
        """Copy pages to the device. ``ticket.fence`` tells by layer group when; the status, whether to trust it.

        Parameters
        ----------
        keys : numpy.ndarray
            uint8 ``(n, 16)``.
        pages : array of integers
            Destinations, ``(n,)``, distinct.
        ready : ReadyPoint or Stream
            When the destinations may be overwritten.
        lease : Ticket, optional
            A lookup whose lease ends with this; one that has expired does no harm if the pages are still there.
        partial : bool
            Restore the pages that are there, and say which were missing, instead of refusing.
        timeout_s : float
            When the engine gives up.
        """
        chosen, named, leases = check_pages(pages), check_keys(keys), check_tickets(() if lease is None else (lease,))
        point, fence = self._point(ready), self._link.fence()
        ticket = self._desk.submit(
            lambda op: Restore(
                op=op,
                pool=pool.number,
                generation=pool.generation,
                pages=chosen,
                keys=named,
                ready=point,
                fence=fence,
                timeout_s=bounded(timeout_s),
                partial=partial,
            ),
            page_count=len(chosen),
            fence=OperationFence(fence, pool.groups),
        )
        for one in leases:
            one.happen(Event.USE_LEASE)  # behind the restore, which holds the pages by now
        return ticket

    def prefetch(self, pool: PoolHandle, keys: Keys) -> Ticket:
        """Bring pages from the storage tier to the host tier; refused, with ``no_storage``, where there is none."""
        chosen = check_keys(keys)
        return self._desk.submit(
            lambda op: Prefetch(op=op, pool=pool.number, generation=pool.generation, keys=chosen),
            page_count=len(chosen),
        )

    def ready(self, stream: Stream) -> ReadyPoint:
        """Return a ready point behind all work of ``stream`` so far, for any number of operations."""
        self._desk.check_open()
        return self._link.ready(stream)

    def cancel(self, ticket: Ticket) -> bool:
        """Give an operation up; see :meth:`Ticket.cancel`."""
        return ticket.cancel()

    # --- taking away, asking, leaving --------------------------------------------------------------------------------

    def invalidate(self, pool: PoolHandle, keys: Keys) -> int:
        """Let nobody find these pages any more, those on their way included. Returns how many there were."""
        chosen = check_keys(keys)
        return self._count(lambda op: Invalidate(op=op, pool=pool.number, generation=pool.generation, keys=chosen))

    def flush(self, pool: PoolHandle) -> int:
        """Let nobody find any page of the pool's namespace, those on their way included. Returns how many there were.

        Others who share the namespace lose them too. Transfers that run go on; what they bring is dropped.
        """
        return self._count(lambda op: Flush(op=op, pool=pool.number, generation=pool.generation))

    def status(self) -> dict[str, object]:
        """Return what the engine and this client do, as JSON-ready values; in degraded mode, what is missing."""
        link, detail = self._link.status(), {}
        if not link["degraded"]:
            try:
                detail = self._desk.ask(lambda op: StatusRequest(op=op)).detail
            except DevIPCError as error:
                link = self._link.status()
                if not link["degraded"] and error.code != "degraded":
                    raise
                link = {"degraded": str(error)} | {name: value for name, value in link.items() if value}
        own = {"open_tickets": len(self._desk.open_tickets()), "quarantined_pages": self._desk.quarantined_pages}
        return {**detail, **link, **own}

    def ping(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Block until whoever takes requests has answered. Raises what the ticket of any operation raises."""
        self._desk.submit(_ping).result(timeout_s)

    def close(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Give up what has not ended, and leave. Content in the host tier stays for others of the namespace.

        Raises
        ------
        CompletionTimeout
            When copies still run on the client's pages: their memory must stay. Call again to go on waiting.
        """
        if self._desk.forked:
            return  # nothing of it is this process's
        deadline = deadline_after(timeout_s)
        self._desk.closed = True
        for ticket in self._desk.open_tickets():
            if not ticket.happen(Event.RELEASE_LEASE):
                ticket.cancel()
        self._link.close(remaining(deadline))
        self._desk.engine_dying()
        self._desk.engine_gone()
        self._search.close()
        self._desk.close(max(remaining(deadline), _GRACE_S))

    def __enter__(self) -> HiCacheClient:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    # --- within -----------------------------------------------------------------------------------------------------

    def _count(self, request: Callable[[int], Request]) -> int:
        pages = self._desk.ask(request).detail["pages"]
        assert isinstance(pages, int)
        return pages

    def _point(self, ready: ReadyPoint | Stream) -> ReadyPoint:
        # Asked last: to look whether an object fulfils a protocol takes longer than all the rest.
        if not hasattr(ready, "reached") and isinstance(ready, Stream):
            return self.ready(ready)
        return check_ready(ready)  # type: ignore[arg-type]


def _ping(op: int) -> Ping:
    return Ping(op=op)


def connect(
    url: str,
    *,
    device: Device | None = None,
    config: EngineConfig | None = None,
    engine: LocalEngine | None = None,
    wait_s: float = 0.0,
    allow_uids: Collection[int] = (),
) -> HiCacheClient:
    """Connect to a cache engine.

    Parameters
    ----------
    url : str
        ``inproc:`` for an engine in this process, ``unix:/path`` for the daemon that listens there.
    device : Device, optional
        ``inproc:`` makes an engine on it, which is closed with the client. Of a daemon, the device must be the same;
        None takes the daemon's.
    config : EngineConfig, optional
        Of the engine that ``inproc:`` makes.
    engine : LocalEngine, optional
        ``inproc:`` shares this one instead; it stays the caller's.
    wait_s : float
        How long to wait for a daemon that does not listen yet.
    allow_uids : collection of int
        Users other than this one whose daemon is trusted, for containers.

    Raises
    ------
    PeerGone
        When no daemon listens at the path.
    CapabilityError
        When it serves another device.
    UsageError
        For another URL, and for arguments that do not belong to it.
    """
    link = open_link(url, device=device, config=config, engine=engine, wait_s=wait_s, allow_uids=allow_uids)
    try:
        return HiCacheClient(link)
    except BaseException:
        link.close(DEFAULT_TIMEOUT_S)
        raise
