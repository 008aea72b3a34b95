"""What can be evicted, in which order, and what is in the way when that is not enough.

Owns the idle extents, by page size and last use, and the choice of victims. Evicting itself, which takes pages from
the index, is the host tier's. Not thread-safe: the tier's lock is.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from devipc.errors import ResourceExhausted
from devipc.hicache.blocks import BlockSpace, Slab
from devipc.hicache.records import Hold, Holder, Reservation, Run

__all__ = ["IdleRuns", "no_room", "obstacles"]

_REPORTED = 8


class IdleRuns:
    """Extents that nobody fills or holds, by block size, the least recently used first.

    Parameters
    ----------
    space : BlockSpace
        Where they lie; gets back those without pages.
    """

    def __init__(self, space: BlockSpace) -> None:
        self._space = space
        self._by_size: dict[int, OrderedDict[Run, None]] = {}
        self._clock = itertools.count(1)

    def __contains__(self, run: Run) -> bool:
        return run in self._by_size.get(run.block_nbytes, ())

    def counts(self) -> dict[int, int]:
        """Return how many there are of each size."""
        return {size: len(runs) for size, runs in self._by_size.items() if runs}

    def use(self, run: Run) -> None:
        """Note that ``run`` was used now."""
        run.last_use = run.extent.slab.last_use = next(self._clock)
        idle = self._by_size.get(run.block_nbytes)
        if idle is not None and run in idle:
            idle.move_to_end(run)

    def settle(self, run: Run) -> None:
        """Put an extent where it belongs now: among the idle ones, or back to the free blocks, or neither."""
        idle = self._by_size.setdefault(run.block_nbytes, OrderedDict())
        if run.pages and not (run.holds or run.filling):
            idle[run] = None
            return
        idle.pop(run, None)
        if not (run.pages or run.holds or run.filling):
            self._space.free(run.extent)

    def victims(self, block_nbytes: int, missing: int) -> list[Run] | None:
        """Choose what to evict for ``missing`` blocks, the coldest first; None when all of it is not enough.

        Either extents of this size, or whole slabs of another size, whichever were used longest ago.
        """
        found: list[Run] = []
        own = iter(self._by_size.get(block_nbytes, ()))
        foreign = self._foreign_slabs(block_nbytes)
        runs = {run.extent: run for idle in self._by_size.values() for run in idle} if foreign else {}
        run = next(own, None)
        while missing > 0:
            if foreign and (run is None or foreign[-1].last_use < run.last_use):
                slab = foreign.pop()
                found += [runs[extent] for extent in slab.held]
                missing -= slab.nbytes // block_nbytes
            elif run is not None:
                found.append(run)
                missing -= run.extent.span
                run = next(own, None)
            else:
                return None
        return found

    def _foreign_slabs(self, block_nbytes: int) -> list[Slab]:
        """Return slabs of other sizes that are idle as a whole, the least recently used last."""
        if not any(runs for size, runs in self._by_size.items() if size != block_nbytes):
            return []
        slabs = [
            slab
            for slab in self._space.slabs
            if slab.held and not slab.busy and slab.block_nbytes != block_nbytes and slab.nbytes >= block_nbytes
        ]
        return sorted(slabs, key=lambda slab: slab.last_use, reverse=True)


def obstacles(
    holds: Mapping[Holder, Hold], filling: Iterable[Reservation], idle: Mapping[int, int], *, now: float
) -> str:
    """Say why each candidate was passed over, by who is in the way."""

    def of(holder: Holder) -> str:
        return f"by operation {holder[1]} of {holder[0].hex()[:8]}"

    lines = []
    for holder, hold in holds.items():
        until = "" if hold.expires is None else f", for {max(0.0, hold.expires - now):.1f} s more unless it is released"
        lines.append(f"{len(set(hold.runs))} extents held {of(holder)}{until}")
    lines += [f"{len(one.runs)} extents being filled {of(one.holder)}" for one in filling]
    lines += [f"{count} idle extents of {size}-byte blocks share slabs with these" for size, count in idle.items()]
    more = f"; and {len(lines) - _REPORTED} more" if len(lines) > _REPORTED else ""
    return "; ".join(lines[:_REPORTED]) + more if lines else "nothing is resident"


def no_room(needed: int, block_nbytes: int, why: str) -> ResourceExhausted:
    """Return the error for pages that fit only when somebody gives something back."""
    return ResourceExhausted(
        f"no room for {needed} pages of {block_nbytes} bytes: {why}",
        code="no_room",
        remedy="wait for running operations, release leases, or give the host tier more memory",
    )
