"""Which form pages are copied in, and where a restore is cut: strided copies, a batch of plain ones, or some of each.

Owns the comparison by the cost model. A device takes longer for a strided copy than for its bytes, which a batch of
plain copies avoids, and cuts between layers cost a batch nothing; but a batch keeps several processors busy. So as many
pages go in batches as can be submitted well before the wire has taken all of them. Pure: it sees no address.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from devipc.hicache.planning.grouping import Load, cut, took_s

__all__ = ["LONG_PIECE", "Entries", "Part", "Submitting", "choose_parts"]

_SUBMITTING = 0.6
"""Share of the time that the bytes take in which batches may be submitted: the device is to find them when it comes to
them, and planning and the interpreter take their part too."""
_AROUND_S = 0.4e-3
"""What an operation is counted to take of them beside that: it is taken and planned, and they begin together. Of those
that take a bus 2.4 ms batches came late that could be submitted in .6 of it, of 5 ms in time (H200, 2026-12-01)."""
_LEAST_S = 0.2e-3
"""What batches must save of each list: several threads begin, and streams wait for each other."""
_SAME = 1e-6
"""What is so little longer is not: cuts between layers cost batches nothing."""
LONG_PIECE = 32 * 1024
"""Bytes from which an entry of a batch counts as a long one."""

Costs = Callable[[int, int], Load]


@dataclass(frozen=True, slots=True)
class Entries:
    """What an entry of a batch takes until it is submitted.

    Parameters
    ----------
    long_s, short_s : float
        One of :data:`LONG_PIECE` bytes or more, and a shorter one, which is never taken for less.
    """

    long_s: float = math.inf
    short_s: float = 0.0

    def each_s(self, mean_nbytes: float) -> float:
        """Return what an entry takes of a batch whose entries have so many bytes in the mean."""
        return self.long_s if mean_nbytes >= LONG_PIECE else max(self.long_s, self.short_s)


@dataclass(frozen=True, slots=True)
class Submitting:
    """How long batches are best submitted.

    Parameters
    ----------
    threads : int
        By how many threads.
    to_device, to_host : Entries
        What these then take.
    """

    threads: int = 1
    to_device: Entries = Entries()
    to_host: Entries = Entries()


@dataclass(frozen=True, slots=True)
class Part:
    """Layer groups that are submitted as one.

    Parameters
    ----------
    begin, end : int
        The first of them, and the one behind the last.
    plain : float
        Share of the runs of pages, from 0 to 1, that are copied in batches of plain copies where they could be strided
        too; rows with gaps are chosen for themselves.
    """

    begin: int
    end: int
    plain: float = 0.0


def choose_parts(
    page_count: int,
    layers: Sequence[int],
    strided: Costs,
    batch: Costs,
    *,
    by_layer_group: bool,
    batches: float,
    lists: int = 1,
) -> tuple[Part, ...]:
    """Return how ``page_count`` pages are best copied, in the order of layers.

    Parameters
    ----------
    page_count : int
        Pages that are moved.
    layers : sequence of int
        Layers of each group.
    strided, batch : callable
        Return what a page of groups ``begin .. end - 1`` costs: in the form that is cheapest for one thread, and in
        plain copies that several threads submit.
    by_layer_group : bool
        Whether to cut at all.
    batches : float
        How much of the driver several threads have for themselves, which is also the largest share that goes in
        batches: 1, less beside another direction, 0 where there is one thread.
    lists : int
        How many lists the pages are submitted in.
    """
    strided, batch = cache(strided), cache(batch)

    def ranges(costs: Costs) -> tuple[tuple[int, int], ...]:
        return cut(page_count, layers, costs) if by_layer_group else ((0, len(layers)),)

    whole = ranges(strided)
    if not batches:
        return tuple(Part(*one) for one in whole)
    allowed_s = batches * (_SUBMITTING * batch(0, len(layers)).move_s - _AROUND_S / page_count)
    if allowed_s <= 0:
        return tuple(Part(*one) for one in whole)

    def share(begin: int, end: int, left_s: float) -> float:
        """Return the share of batches of one range, when all of it may take so long to submit."""
        one, other = strided(begin, end), batch(begin, end)
        if other.move_s > one.move_s:  # where they are the same both are batches, which take their time too
            return 0.0
        return min(batches, left_s / other.submit_s) if other.submit_s else batches

    def mixed(begin: int, end: int, plain: float) -> Load:
        one, other = strided(begin, end), batch(begin, end)
        return Load(
            (1 - plain) * one.submit_s + plain * other.submit_s if plain else one.submit_s,
            (1 - plain) * one.move_s + plain * other.move_s,
        )

    def shared_out(cuts: Sequence[tuple[int, int]]) -> tuple[Part, ...]:
        """Give batches first to early layers, which are few: a strided copy costs as much for few as for many."""
        left_s, shares = allowed_s, dict[tuple[int, int], float]()
        for one in cuts:
            shares[one] = share(*one, left_s)
            left_s = max(left_s - shares[one] * batch(*one).submit_s, 0.0) if shares[one] else left_s
        return tuple(Part(*one, shares[one]) for one in cuts)

    def takes_s(parts: Sequence[Part]) -> float:
        return took_s([mixed(one.begin, one.end, one.plain) for one in parts])

    # Where few layers go in batches more cuts may be worth it; half of what is allowed is about what one range may use.
    others = shared_out(ranges(lambda begin, end: mixed(begin, end, share(begin, end, allowed_s / 2))))
    best, plain = shared_out(whole), tuple(Part(*one) for one in whole)
    if takes_s(others) <= takes_s(best) * (1 + _SAME):
        best = others
    return best if takes_s(best) + _LEAST_S * lists / page_count < takes_s(plain) else plain
