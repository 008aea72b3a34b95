"""Records of the host tier: places, holds, reservations.

Owns one rule, what becomes of a reservation's pages; the tier changes records under its lock, and hands out copies of
numbers only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from devipc.hicache.few import largest
from devipc.hicache.results import PageResult, Results
from devipc.hicache.tier.blocks import Slots

__all__ = ["Hold", "Holder", "Places", "Reservation"]

I64 = npt.NDArray[np.int64]
Holder = tuple[bytes, int]
"""Instance of the owner, and its operation."""


@dataclass(slots=True, eq=False)
class Hold:
    """What one holder needs, and when that ends by itself.

    Parameters
    ----------
    heads : numpy.ndarray
        int64: the extent of each page that it asked for, in order.
    extents : numpy.ndarray
        int64: the same, each once.
    expires : float or None
        Monotonic seconds.
    nbytes : int
        What it keeps from being evicted.
    """

    heads: I64
    extents: I64
    expires: float | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Places:
    """Where pages lie, one entry a page: what a planner's host pages are made of.

    Parameters
    ----------
    offset : numpy.ndarray
        int64 ``(n,)``: bytes from the start of the arena to the page's extent.
    span, index : numpy.ndarray or None
        int64 ``(n,)``: pages in the extent, and which of them it is. None when every extent has one page.
    """

    offset: I64
    span: I64 | None = None
    index: I64 | None = None

    @classmethod
    def of(cls, slots: I64, heads: I64, columns: Slots) -> Places:
        """Return the places of pages by their slots and those of their extents, in order."""
        if heads is slots or (np.array_equal(heads, slots) and largest(columns.span[heads]) <= 1):
            return cls(columns.offset[slots])
        return cls(columns.offset[heads], columns.span[heads], slots - heads)


@dataclass(slots=True, eq=False)
class Reservation:
    """Blocks that one operation fills. Ends once, by a commit or an abort.

    Attributes
    ----------
    names : sequence of bytes
        The pages.
    heads, slots : numpy.ndarray
        int64: the extents, and a slot for each page.
    places : Places
        One entry a page, in the order of the names.
    page_nbytes, nbytes : int
        Size of each page, and of all blocks.
    """

    holder: Holder
    names: Sequence[bytes]
    namespace: bytes
    page_nbytes: int
    heads: I64
    slots: I64
    places: Places
    started: int
    flushes: int
    nbytes: int

    def outcome(
        self, pages: Mapping[bytes, int], sizes: I64, invalidated: Mapping[bytes, int], *, stale: bool
    ) -> tuple[Results, Sequence[bytes]]:
        """Return what becomes of each page, and those that are stored: what is there already is not entered again.

        A page whose name is that of one of another size is dropped.

        Parameters
        ----------
        pages, sizes : mapping and array
            Slots of the pages that are there, and the bytes of a page in each slot.
        invalidated : mapping
            When those that nobody may find any more were invalidated.
        stale : bool
            The namespace was flushed meanwhile.
        """
        names = self.names
        results = np.empty(len(names), np.uint8)
        results.fill(PageResult.DROPPED if stale else PageResult.STORED)
        if stale:
            return results, ()
        if not (invalidated or len(set(names)) != len(names) or not pages.keys().isdisjoint(names)):
            return results, names
        met: dict[bytes, None] = {}  # in order
        for at, name in enumerate(names):
            if invalidated.get(name, -1) > self.started:
                results[at] = PageResult.DROPPED
            elif name in pages:
                fits = sizes[pages[name]] == self.page_nbytes
                results[at] = PageResult.PRESENT if fits else PageResult.DROPPED
            elif name in met:
                results[at] = PageResult.PRESENT
            else:
                met[name] = None
        return results, tuple(met)
