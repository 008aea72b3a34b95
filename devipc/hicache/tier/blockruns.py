"""Runs of blocks: their slots, their pieces, and where among the free ones they fit.

Owns arithmetic over slot numbers, and no block. It does not know who holds what.
"""

from __future__ import annotations

from bisect import insort

import numpy as np
import numpy.typing as npt

from devipc.hicache.few import largest

__all__ = ["at_most", "fit", "slots_of"]

I64 = npt.NDArray[np.int64]


def slots_of(heads: I64, spans: I64) -> I64:
    """Return all slots of extents, in order."""
    if len(spans) == 1:
        head, span = int(heads[0]), int(spans[0])
        return heads if span == 1 else np.arange(head, head + span)
    if largest(spans) <= 1:
        return heads
    ends = np.cumsum(spans)
    return np.repeat(heads - (ends - spans), spans) + np.arange(int(ends[-1]))


def at_most(lengths: I64, most: int) -> I64:
    """Cut runs into pieces of at most ``most``."""
    if largest(lengths) <= most:
        return lengths
    pieces = -(-lengths // most)
    cut = np.full(int(pieces.sum()), most, np.int64)
    cut[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * most
    return cut


def fit(free: I64, lengths: I64) -> tuple[I64, I64]:
    """Find neighbouring ones among the ``free`` slots, which are sorted, for each of ``lengths``: the longest first.

    What finds no whole run is cut into the longest pieces that are left.
    """
    edges = np.flatnonzero(np.diff(free) != 1) + 1
    starts = free[np.concatenate(((0,), edges))]
    sizes = np.diff(np.concatenate(((0,), edges, (len(free),))))
    which: list[I64] = []
    heads: list[I64] = []
    spans: list[I64] = []
    rest: list[tuple[int, int]] = []
    for length in np.unique(lengths)[::-1].tolist():
        wanted = np.flatnonzero(lengths == length)
        if length == 1 and not rest:  # the last, and mostly the most
            left = slots_of(starts[sizes > 0], sizes[sizes > 0])[: len(wanted)]
            which.append(wanted)
            heads.append(left)
            spans.append(np.ones(len(wanted), np.int64))
            break
        fits = sizes // length
        ends = np.cumsum(fits)
        count = min(len(wanted), int(ends[-1]))
        used = np.minimum(fits, np.maximum(count - (ends - fits), 0))
        run = np.repeat(np.arange(len(used)), used)
        nth = np.arange(count) - np.repeat(np.cumsum(used) - used, used)
        which.append(wanted[:count])
        heads.append(starts[run] + nth * length)
        spans.append(np.full(count, length, np.int64))
        starts, sizes = starts + used * length, sizes - used * length
        rest += [(number, length) for number in wanted[count:].tolist()]
    if rest:
        pieces = np.array(_pieces(rest, sorted(zip(sizes.tolist(), starts.tolist(), strict=True))), np.int64)
        which, heads, spans = [*which, pieces[:, 0]], [*heads, pieces[:, 1]], [*spans, pieces[:, 2]]
    order = np.argsort(np.concatenate(which), kind="stable")
    return np.concatenate(heads)[order], np.concatenate(spans)[order]


def _pieces(wanted: list[tuple[int, int]], left: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Cut runs that found no place: ``(number, head, span)`` from what is ``left``, sorted by size."""
    found = []
    for number, length in wanted:
        missing = length
        while missing:
            size, start = left.pop()
            span = min(size, missing)
            found.append((number, start, span))
            missing -= span
            if size > span:
                insort(left, (size - span, start + span))
    return found
