"""Records of the host tier: extents with their pages, holds, reservations.

Owns no rule; the tier changes them under its lock, and hands out copies of numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from devipc.hicache.blocks import Extent

__all__ = ["Hold", "Holder", "Page", "Places", "Reservation", "Run"]

I64 = npt.NDArray[np.int64]
Holder = tuple[bytes, int]
"""Instance of the owner, and its operation."""


@dataclass(slots=True, eq=False)
class Run:
    """An extent with the names of its pages: none while it is being filled, and none after all were taken away."""

    extent: Extent
    namespace: bytes
    block_nbytes: int
    pages: set[bytes] = field(default_factory=set)
    holds: int = 0
    filling: bool = True
    last_use: int = 0


@dataclass(slots=True, eq=False)
class Page:
    """A visible page: its extent, and its place there."""

    run: Run
    index: int


@dataclass(slots=True, eq=False)
class Hold:
    """What one holder needs, an entry for each page that it asked for, and when that ends by itself."""

    runs: list[Run]
    expires: float | None


@dataclass(frozen=True, slots=True)
class Places:
    """Where pages lie, one entry a page: what a planner's host pages are made of.

    Parameters
    ----------
    offset : numpy.ndarray
        int64 ``(n,)``: bytes from the start of the arena to the page's extent.
    span, index : numpy.ndarray
        int64 ``(n,)``: pages in the extent, and which of them it is.
    """

    offset: I64
    span: I64
    index: I64

    @classmethod
    def of(cls, pages: Sequence[Page]) -> Places:
        """Return the places of ``pages``, in order."""
        rows = [(page.run.extent.offset, page.run.extent.span, page.index) for page in pages]
        table = np.array(rows, np.int64).reshape(len(rows), 3)
        return cls(*(np.ascontiguousarray(table[:, column]) for column in range(3)))

    @classmethod
    def filling(cls, extents: Sequence[Extent]) -> Places:
        """Return the places of all pages of ``extents``, in order."""
        offset = np.array([extent.offset for extent in extents], np.int64)
        span = np.array([extent.span for extent in extents], np.int64)
        first = np.cumsum(span) - span
        return cls(np.repeat(offset, span), np.repeat(span, span), np.arange(int(span.sum())) - np.repeat(first, span))


class Reservation:
    """Blocks that one operation fills. Ends once, by a commit or an abort.

    Attributes
    ----------
    places : Places
        One entry a page, in the order of the names.
    """

    __slots__ = ("flushes", "holder", "names", "places", "runs", "started")

    def __init__(self, holder: Holder, names: Sequence[bytes], runs: list[Run], started: int, flushes: int) -> None:
        self.holder = holder
        self.names = list(names)
        self.runs = runs
        self.started = started
        self.flushes = flushes
        self.places = Places.filling([run.extent for run in runs])
