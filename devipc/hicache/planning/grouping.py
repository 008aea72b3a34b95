"""Which layer groups of a restore are submitted apart: early layers are usable early, and each cut costs copies.

Owns the trade between the two, by the cost model alone. Pure: it sees no address and no page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise

from devipc.hicache.planning.strips import CostModel, Strips

__all__ = ["Load", "cut", "took_s"]

_SHARE = 0.06
"""How much longer the whole may take for being cut."""
_ALLOWED_S = 10e-6
"""The same for few pages."""
_FIRST_PART = 1 / 12
"""The first layers are early when they can be used after so much of the whole."""
_SPEEDS = (0.5, 1.0, 2.0)
"""How long models take for a layer, of what its copies take."""


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
        beside_s = rows * cost.row_s + calls * cost.strided_s + entries * cost.copy_s
        return cls(submit_s * runs_a_page, nbytes * cost.byte_s + beside_s * runs_a_page)


def cut(page_count: int, layers: Sequence[int], load: Callable[[int, int], Load]) -> tuple[tuple[int, int], ...]:
    """Return ranges of layer groups to submit one after the other, from the first group to the last.

    One cut after the other is made where it helps most, as long as all of them cost little enough: the first so that
    the first layers are early, and all so that passes are over early, of models that take half as long for a layer as
    its copies, as long, and twice as long.

    Parameters
    ----------
    page_count : int
        Pages that are moved; few may cost relatively more.
    layers : sequence of int
        Layers of each group.
    load : callable
        Returns the load of groups ``begin .. end - 1`` that are submitted as one.
    """
    load = cache(load)
    groups = len(layers)
    whole = _ends_s([load(0, groups)])[0]
    most, layer_s = whole * (1 + _SHARE) + _ALLOWED_S / page_count, whole / sum(layers)

    def rank(ranges: tuple[tuple[int, int], ...]) -> tuple[bool, float]:
        """Say how good a choice is, the smaller the better."""
        ends = _ends_s([load(*one) for one in ranges])
        if len(ranges) > 1 and ends[-1] > most:
            return True, math.inf
        counts = [sum(layers[begin:end]) for begin, end in ranges]
        return ends[0] > ends[-1] * _FIRST_PART, sum(_pass_s(counts, ends, speed * layer_s) for speed in _SPEEDS)

    chosen: tuple[tuple[int, int], ...] = ((0, groups),)
    best = rank(chosen)
    while len(chosen) < groups:
        others = [set(chain(*chosen, (at,))) for at in range(1, groups)]
        found, ranges = min((rank(one), one) for one in (tuple(pairwise(sorted(cuts))) for cuts in others))
        if found >= best:
            break
        best, chosen = found, ranges
    return chosen


def took_s(loads: Sequence[Load]) -> float:
    """Return the seconds until all of ``loads`` are moved, submitted one behind the other."""
    return _ends_s(loads)[-1]


def _pass_s(counts: Sequence[int], ends: Sequence[float], layer_s: float) -> float:
    """Return when a pass is over that takes so long for a layer, and for each range waits until it is moved."""
    passed = 0.0
    for count, moved in zip(counts, ends, strict=True):
        passed = max(passed, moved) + count * layer_s
    return passed


def _ends_s(loads: Sequence[Load]) -> list[float]:
    """Return the seconds until each is moved: none ends before it was submitted, nor before those before it."""
    ends, submitted, moved = list[float](), 0.0, 0.0
    for one in loads:
        submitted += one.submit_s
        moved = max(moved + one.move_s, submitted)
        ends.append(moved)
    return ends
