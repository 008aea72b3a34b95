"""A registered pool, on the engine's side: its geometry, its namespace, and who uses it.

Owns the refusal of pages and requests that do not belong to it, before anything is planned.
"""

from __future__ import annotations

import threading

import numpy as np

from devipc.errors import StaleError, UsageError
from devipc.hicache.keys import KEY_NBYTES
from devipc.hicache.layout import PoolLayout
from devipc.hicache.planning.bounds import check_pages
from devipc.hicache.requests import Keys, PageIds
from devipc.hicache.tier.hosttier import HostTier

__all__ = ["Pool", "page_names"]


def page_names(keys: Keys, namespace: bytes) -> Keys:
    """Return the names under which pages of a namespace are kept, uint8 ``(n, 16)``: the keys, told apart.

    Keys are digests, and so is the namespace; their difference is one that no other pair has.
    """
    named: Keys = keys ^ np.frombuffer(namespace, np.uint8)
    return named


class Pool:
    """One generation of a client's pool. Any thread.

    Parameters
    ----------
    number, generation : int
        The client's.
    layout : PoolLayout
        Its geometry.
    opened : object
        The pool as whoever moves its pages knows it.
    namespace : bytes
        Digest, 16 bytes.
    """

    def __init__(self, number: int, generation: int, layout: PoolLayout, opened: object, namespace: bytes) -> None:
        if len(namespace) != KEY_NBYTES:
            raise UsageError(f"namespace of {len(namespace)} bytes", remedy="pass Namespace.digest()")
        self.number = number
        self.generation = generation
        self.layout = layout
        self.opened = opened
        self.namespace = namespace
        self.page_nbytes = layout.page_nbytes
        self.block_nbytes = HostTier.block_of(self.page_nbytes)
        self.users = 0  # operations that have not ended; the session counts
        self._lock = threading.Lock()
        self._claimed = np.zeros(self.layout.page_count, np.bool_)

    def check_generation(self, generation: int) -> None:
        """Refuse a request that was made for another layout."""
        if generation != self.generation:
            raise StaleError(
                f"the request is of generation {generation} of the pool, {self.generation} is registered",
                remedy="use the pool that register_pool returned last",
            )

    def check_keys(self, keys: Keys, count: int | None = None) -> None:
        """Refuse keys of another shape, or another number than pages."""
        shape = keys.shape
        if keys.dtype != np.uint8 or keys.ndim != 2 or shape[1] != KEY_NBYTES or count not in (None, shape[0]):
            raise UsageError(
                f"keys {keys.dtype} of shape {shape} for {count} pages",
                code="shape",
                remedy=f"pass uint8 (n, {KEY_NBYTES}), a key for each page",
            )

    def check_pages(self, pages: PageIds, *, distinct: bool) -> None:
        """Refuse pages that are reserved or outside of the pool, and, when they are destinations, repeated ones."""
        if pages.ndim != 1 or pages.dtype != np.int64 or not len(pages):
            raise UsageError(
                f"pages {pages.dtype} of shape {pages.shape}", code="shape", remedy="pass int64 (n,), at least one"
            )
        check_pages(pages, first_page=self.layout.first_page, page_count=self.layout.page_count, distinct=distinct)

    def claim(self, pages: PageIds) -> None:
        """Note that a restore will write these pages.

        Raises
        ------
        UsageError
            With code ``page_busy`` when another one that has not ended writes any of them.
        """
        with self._lock:
            if self._claimed[pages].any():
                raise UsageError(
                    "a restore that has not ended writes to some of these pages",
                    code="page_busy",
                    remedy="a page belongs to its restore until that has its status, also after it was cancelled",
                )
            self._claimed[pages] = True

    def unclaim(self, pages: PageIds) -> None:
        """Note that the restore has ended."""
        with self._lock:
            self._claimed[pages] = False

    def names(self, keys: Keys) -> list[bytes]:
        """Return the name of each page in the host tier."""
        named = np.ascontiguousarray(page_names(keys, self.namespace))
        return named.view(f"V{KEY_NBYTES}").reshape(-1).tolist()  # bytes, all 16 of each
