"""Many copies of one form in a few calls of numpy, each of which lets go of the interpreter for all of its rows.

Owns when that is possible, and the calls: rows that are scattered on one side, and lie one behind the other on the
other. Everything else stays with :mod:`devipc.host.copies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from devipc.host.maps import view_at
from devipc.host.ranges import Range

__all__ = ["move_rows"]

_NARROWEST, _WIDEST = 256, 16 << 10
"""Widths of rows in bytes: of narrower ones the list of places is long, wider ones keep a call of their own busy."""
_AT_ONCE = 32 << 10
"""Rows whose places are listed at a time: 256 KiB of numbers."""


def move_rows(np: Any, table: Any, held: Sequence[Range]) -> bool:
    """Run all copies of ``table`` and return True, or return False with nothing done.

    Parameters
    ----------
    np : module
        numpy.
    table : numpy.ndarray
        uint64 ``(n, 6)`` as for ``copy_strided``, n > 0, checked; no copy is empty.
    held : sequence of Range
        What the copies lie in. All of a side must lie in one of them: no array reaches over anything else.
    """
    *pitches, width, height = table[0, 2:].tolist()
    form = 2 if height > 1 else 4  # the pitch of a single row means nothing
    if not _NARROWEST <= width <= _WIDEST or (table[:, form:] != table[0, form:]).any():
        return False
    if height == 1:
        pitches = [width, width]
    if width not in pitches:
        return False
    flat = pitches.index(width)
    pitch = pitches[1 - flat]
    dense = _items(np, table[:, flat], width, width, height, held)
    loose = _items(np, table[:, 1 - flat], pitch, width, height, held)
    # numpy would copy an array that may overlap the other as a whole, and back.
    if dense is None or loose is None or np.may_share_memory(dense[0], loose[0]):
        return False
    (beside, first), (apart, places) = dense, loose
    behind = np.arange(height) * (pitch // width)
    breaks = np.flatnonzero(first[1:] != first[:-1] + height) + 1
    edges = {0, *breaks.tolist(), *range(0, len(table), max(_AT_ONCE // height, 1)), len(table)}
    for begin, end in pairwise(sorted(edges)):
        at = (places[begin:end, None] + behind).reshape(-1)
        together = beside[int(first[begin]) :][: len(at)]
        if flat == 0:
            apart.take(at, out=together, mode="clip")
        else:
            apart.put(at, together, mode="clip")
    return True


def _items(
    np: Any, addresses: Any, pitch: int, width: int, height: int, held: Sequence[Range]
) -> tuple[Any, Any] | None:
    """Return one side of copies as an array with one item a row, and at which item each copy begins.

    None unless all rows are whole widths apart, and in one range.
    """
    start = int(addresses.min())
    nbytes = int(addresses.max()) - start + (height - 1) * pitch + width
    if pitch % width or not any(one.start <= start and start + nbytes <= one.end for one in held):
        return None
    first, between = np.divmod((addresses - np.uint64(start)).astype(np.int64), width)
    if between.any():
        return None
    return np.ndarray((nbytes // width,), np.dtype((np.void, width)), view_at(start, nbytes)), first
