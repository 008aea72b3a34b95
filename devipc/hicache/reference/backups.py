"""Backups of a runtime: ordered by control, started as the throttle allows, and waited for when pages are short.

Owns the uses of pages that are being copied: an extent may be released meanwhile, its pages stay.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from devipc.errors import CompletionTimeout, DevIPCError
from devipc.hicache.api import HiCacheClient, PoolHandle
from devipc.hicache.client.ticket import Ticket
from devipc.hicache.keys import KEY_NBYTES
from devipc.hicache.operations import Event
from devipc.hicache.reference.handles import CacheExtentRef
from devipc.hicache.reference.pagetable import PageTable
from devipc.hicache.requests import ReadyPoint

__all__ = ["Backups", "keys_of"]

_log = logging.getLogger(__name__)
_TIMEOUT_S = 30.0


def keys_of(raw: bytes) -> npt.NDArray[np.uint8]:
    """Return keys as the client takes them, uint8 ``(n, 16)``."""
    return np.frombuffer(raw, np.uint8).reshape(-1, KEY_NBYTES)


class Backups:
    """See the module. One thread.

    Parameters
    ----------
    client, pool : HiCacheClient and PoolHandle, or None
        The cache below; without one, orders are forgotten.
    table : PageTable
        Of the runtime.
    page_nbytes : int
        Bytes of a page.
    ready : callable
        Returns a point behind everything that was computed so far.
    """

    def __init__(
        self,
        client: HiCacheClient | None,
        pool: PoolHandle | None,
        table: PageTable,
        page_nbytes: int,
        *,
        ready: Callable[[], ReadyPoint],
    ) -> None:
        self._client = client
        self._pool = pool
        self._table = table
        self._page_nbytes = page_nbytes
        self._ready = ready
        self._queued: deque[tuple[list[int], bytes]] = deque()
        self._running: list[tuple[Ticket, list[int]]] = []
        self.done_pages = 0

    @property
    def unfinished(self) -> int:
        """Backups that are queued, or whose pages are still read."""
        return len(self._queued) + len(self._running)

    def order(self, extent: CacheExtentRef, keys: bytes) -> None:
        """Queue a backup."""
        pages = self._table.pages_of(extent)
        self._table.use(pages)
        self._queued.append((pages, keys))

    def start(self, nbytes: int) -> None:
        """Start what was ordered, the oldest first, until ``nbytes`` are reached; at least one, if there is any."""
        started = 0
        while self._queued and started < nbytes:
            pages, keys = self._queued.popleft()
            if self._client is None or self._pool is None:
                self._table.drop(pages)
                continue
            physical = self._table.physical(pages)
            try:
                ticket = self._client.backup(
                    self._pool, physical, keys_of(keys), ready=self._ready(), partial=True, timeout_s=_TIMEOUT_S
                )
            except DevIPCError as error:
                _log.warning("the cache below refused a backup of %d pages: %s", len(pages), error)
                self._table.drop(pages)
                continue
            self._running.append((ticket, pages))
            started += len(pages) * self._page_nbytes

    def collect(self) -> None:
        """Let go of pages whose copies are over."""
        left = []
        for ticket, pages in self._running:
            if ticket.status is None and not _released(ticket):
                left.append((ticket, pages))
                continue
            self._table.drop(pages)
            self.done_pages += len(pages)
        self._running = left

    def wait_for_one(self) -> bool:
        """Block until pages of one more backup are free; False when there is none."""
        if not self._running:
            self.start(1)
        if not self._running:
            return False
        self._running[0][0].reached(Event.SOURCE_RELEASED, _TIMEOUT_S)
        self.collect()
        return True

    def finish(self) -> None:
        """Start everything, and block until all of it has ended."""
        self.start(2**63)
        for ticket, _ in self._running:
            ticket.wait(_TIMEOUT_S)
        self.collect()


def _released(ticket: Ticket) -> bool:
    try:
        return ticket.reached(Event.SOURCE_RELEASED, 0.0)
    except CompletionTimeout:
        return False
