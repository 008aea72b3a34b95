"""What a plan may touch: pages of the pool and places in host memory, refused before anything is planned.

Owns those refusals, for few pages one by one and for many by arrays. It knows neither a geometry nor a copy.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from devipc.errors import BoundsError
from devipc.hicache.few import FEW

__all__ = ["check_pages", "check_places"]

U64 = npt.NDArray[np.uint64]


def check_pages(ids: U64 | npt.NDArray[np.int64], *, first_page: int, page_count: int, distinct: bool) -> None:
    """Refuse pages outside of ``[first_page, page_count)``, and with ``distinct`` those that are named twice.

    Raises
    ------
    BoundsError
        For the list as a whole.
    """
    if len(ids) <= FEW:
        ordered = sorted(ids.tolist())
        low, high, twice = ordered[0], ordered[-1], len(set(ordered)) < len(ordered)
    elif not distinct:
        low, high, twice = int(ids.min()), int(ids.max()), False
    else:
        array = np.sort(ids)
        low, high = int(array[0]), int(array[-1])
        twice = bool(np.count_nonzero(array[1:] == array[:-1]))
    if low < first_page or high >= page_count:
        raise BoundsError(
            f"pages {low} .. {high}, the pool moves {first_page} .. {page_count - 1}",
            code="page",
            remedy="pass page ids, not token slots; reserved pages are never moved",
        )
    if distinct and twice:
        raise BoundsError(
            "a page is the destination of two restores", code="duplicate", remedy="pass every destination once"
        )


def check_places(
    base: U64, span: U64 | None, index: U64 | None, *, page_nbytes: int, arena: tuple[int, int], shared: bool
) -> None:
    """Refuse host places that leave the arena, or overlap.

    Parameters
    ----------
    base, span, index : numpy.ndarray
        As :class:`~devipc.hicache.planning.planner.HostPages` has them; both None for blocks.
    page_nbytes : int
        Bytes of a page.
    arena : tuple of (int, int)
        Address and length.
    shared : bool
        The same place may be named twice: it is only read.

    Raises
    ------
    BoundsError
        For the list as a whole.
    """
    if span is None or index is None:
        overlaps = _blocks_overlap(base, page_nbytes, arena, shared=shared)
    elif len(base) <= FEW:
        overlaps = _few_overlap(base.tolist(), span.tolist(), index.tolist(), page_nbytes, arena, shared=shared)
    else:
        overlaps = _many_overlap(base, span, index, page_nbytes, arena, shared=shared)
    if overlaps:
        raise BoundsError(
            "host places overlap", code="overlap", remedy="give every page of an operation a place of its own"
        )


def _blocks_overlap(base: U64, page_nbytes: int, arena: tuple[int, int], *, shared: bool) -> bool:
    if len(base) <= FEW:
        ordered = sorted(base.tolist())
        _check_arena(ordered[0], ordered[-1] + page_nbytes, arena)
        return any(this - last < page_nbytes and not (shared and this == last) for last, this in pairwise(ordered))
    places = np.sort(base)
    _check_arena(int(places[0]), int(places[-1]) + page_nbytes, arena)
    distance = places[1:] - places[:-1]
    overlap = distance < np.uint64(page_nbytes)
    if shared:
        overlap &= distance != np.uint64(0)
    return bool(np.count_nonzero(overlap))


def _few_overlap(
    base: list[int], span: list[int], index: list[int], page: int, arena: tuple[int, int], *, shared: bool
) -> bool:
    low = min(base)
    for start, pages, at in zip(base, span, index, strict=True):
        _check_arena(low, start + pages * page if at < pages else 2**64, arena)
    # Base plus index is distinct for distinct pages of extents that do not overlap, and lies inside the extent.
    places = sorted((start + at, start, pages) for start, pages, at in zip(base, span, index, strict=True))
    return any(
        (mine == last and not shared) or ((start, pages) != (before, many) and start < before + many * page)
        for (last, before, many), (mine, start, pages) in pairwise(places)
    )


def _many_overlap(base: U64, span: U64, index: U64, page_nbytes: int, arena: tuple[int, int], *, shared: bool) -> bool:
    low, page = int(base.min()), np.uint64(page_nbytes)
    if int(span.max()) > arena[1] // page_nbytes or np.count_nonzero(index >= span):
        _check_arena(low, 2**64, arena)
    _check_arena(low, int(base.max()), arena)  # first alone: only then can the ends not overflow
    _check_arena(low, int((base + span * page).max()), arena)
    order = np.argsort(base + index, kind="stable")
    bases, spans, places = base[order], span[order], (base + index)[order]
    same = (bases[1:] == bases[:-1]) & (spans[1:] == spans[:-1])
    overlap = ~same & (bases[1:] < bases[:-1] + spans[:-1] * page)
    if not shared:
        overlap |= places[1:] == places[:-1]
    return bool(np.count_nonzero(overlap))


def _check_arena(low: int, end: int, arena: tuple[int, int]) -> None:
    address, nbytes = arena
    if low < address or end > address + nbytes:
        raise BoundsError(
            f"host places from {low:#x} on leave the {nbytes} bytes of host memory",
            code="host_bounds",
            remedy="pass addresses inside the arena, and indices below the extent's length",
        )
