"""Which layer groups of a restore are submitted apart: early layers are usable early, and each cut costs copies.

Owns the trade between the two, by the cost model alone. Pure: it sees no address and no page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from devipc.hicache.strips import CostModel, Strips

__all__ = ["Load", "cut"]

_FIRST_SHARE, _SHARE = 0.06, 0.02
"""How much longer the whole may take for the first cut, and for all when there are more."""
_ALLOWED_S = 10e-6
"""The same for few pages."""


@dataclass(frozen=True, slots=True)
class Load:
    """What copies of one page take, in seconds: of the processor that submits them, and of the device."""

    submit_s: float
    move_s: float

    @classmethod
    def of(cls, strips: Strips, cost: CostModel, runs_a_page: float) -> Load:
        """Return the load of ``strips``, for pages of which so many runs (at most 1 a page) are neighbours."""
        strided, cells = strips.pages
        calls, entries = (0 if one is None else len(one) for one in (strided, cells))
        rows = 0 if strided is None else int(strided.count.sum())
        nbytes = int((strips.table.width * strips.table.count).sum())
        submit_s = calls * cost.call_s + entries * min(cost.entry_s, cost.call_s + cost.row_s)
        beside_s = rows * cost.row_s + (calls + entries) * cost.copy_s
        return cls(submit_s * runs_a_page, nbytes * cost.byte_s + beside_s * runs_a_page)


def cut(page_count: int, groups: int, load: Callable[[int, int], Load]) -> tuple[tuple[int, int], ...]:
    """Return ranges of layer groups to submit one after the other, from the first group to the last.

    Parameters
    ----------
    page_count : int
        Pages that are moved; few may cost relatively more.
    groups : int
        How many there are.
    load : callable
        Returns the load of groups ``begin .. end - 1`` that are submitted as one.
    """
    least = _took_s([load(0, groups)])
    chosen: list[tuple[int, int]] = []
    begin = 0
    for end in range(1, groups):
        ranges = [*chosen, (begin, end), (end, groups)]
        share = _SHARE if chosen else _FIRST_SHARE
        if _took_s([load(*one) for one in ranges]) <= least * (1 + share) + _ALLOWED_S / page_count:
            chosen.append((begin, end))
            begin = end
    return (*chosen, (begin, groups))


def _took_s(loads: list[Load]) -> float:
    """Seconds until all is moved: no group ends before it was submitted, nor before those before it."""
    submitted = moved = 0.0
    for one in loads:
        submitted += one.submit_s
        moved = max(moved + one.move_s, submitted)
    return moved
