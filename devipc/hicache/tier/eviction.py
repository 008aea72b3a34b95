"""What can be evicted, in which order, and what is in the way when that is not enough.

Owns when each extent was used, and the choice of victims. Evicting itself, which takes pages from the index, is the
host tier's. Not thread-safe: the tier's lock is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from devipc.errors import ResourceExhausted
from devipc.hicache.tier.blocks import BlockSpace
from devipc.hicache.tier.records import Hold, Holder, Reservation

__all__ = ["IdleExtents", "no_room", "obstacles"]

_REPORTED = 8
_AHEAD = 16_384
_FIRST = 60

I64 = npt.NDArray[np.int64]


class IdleExtents:
    """Extents that nobody fills or holds, the least recently used first.

    Parameters
    ----------
    space : BlockSpace
        Where they lie; gets back those without pages.
    """

    def __init__(self, space: BlockSpace) -> None:
        self._space = space
        self._slots = space.slots
        self._now = 0
        # Of each size the coldest ones, sorted, with when they were used; what was used since is among them no more.
        self._coldest: dict[int, tuple[I64, I64]] = {}

    def counts(self) -> dict[int, int]:
        """Return how many there are of each size."""
        sizes, counts = np.unique(self._slots.size[self.all()], return_counts=True)
        return dict(zip(sizes.tolist(), counts.tolist(), strict=True))

    def all(self, block_nbytes: int | None = None) -> I64:
        """Return all of them, or those of one size, in no order."""
        slots = self._slots
        heads = np.flatnonzero((slots.live[: slots.count] > 0) & (slots.holds[: slots.count] == 0))
        heads = heads[(slots.span[heads] > 0) & ~slots.filling[heads]]
        return heads if block_nbytes is None else heads[slots.size[heads] == block_nbytes]

    def use(self, heads: I64) -> None:
        """Note that extents were used now, in this order."""
        self._slots.used[heads] = np.arange(self._now + 1, self._now + 1 + len(heads))
        self._now += len(heads)

    def settle(self, heads: I64) -> None:
        """Give extents, each named once, that nobody needs any more back to the free blocks."""
        slots = self._slots
        empty = slots.live[heads] == 0
        if not empty.any():
            return
        over = heads[empty & (slots.holds[heads] == 0) & ~slots.filling[heads]]
        if len(over):
            self._space.free(over)

    def victims(self, block_nbytes: int, missing: int) -> I64 | None:
        """Choose what to evict for ``missing`` blocks, the coldest first; None when all of it is not enough.

        Either extents of this size, or whole slabs of another size, whichever were used longest ago.
        """
        if any(size != block_nbytes for size in self._space.sizes()):
            return self._with_foreign(block_nbytes, missing)
        slots = self._slots
        for most in (4 * missing + _FIRST, _AHEAD + 2 * missing):  # mostly the first few are enough
            if (found := self._coldest_of(block_nbytes, missing, most)) is not None:
                return found
        heads = self.all(block_nbytes)  # whatever is not among those known was used later than all of them
        if int(slots.span[heads].sum()) < missing:
            return None
        ahead = max(2 * missing, _AHEAD)
        if len(heads) > ahead:
            heads = heads[np.argpartition(slots.used[heads], ahead)[:ahead]]
        heads = heads[np.argsort(slots.used[heads])]
        self._coldest[block_nbytes] = heads, slots.used[heads]
        return self._coldest_of(block_nbytes, missing, len(heads))

    def _coldest_of(self, block_nbytes: int, missing: int, most: int) -> I64 | None:
        """Take what is enough from the first ``most`` of those that are known to be the coldest; else nothing."""
        heads, used = self._coldest.get(block_nbytes, (np.zeros(0, np.int64),) * 2)
        first = heads[:most]
        fit = np.flatnonzero(self._is_idle(first) & (self._slots.used[first] == used[:most]))
        at = int(np.searchsorted(np.cumsum(self._slots.span[first[fit]]), missing))
        if at >= len(fit):
            return None
        behind = int(fit[at]) + 1
        self._coldest[block_nbytes] = heads[behind:], used[behind:]
        return first[fit[: at + 1]]

    def _is_idle(self, heads: I64) -> npt.NDArray[np.bool_]:
        slots = self._slots
        idle = (slots.live[heads] > 0) & (slots.holds[heads] == 0) & ~slots.filling[heads] & (slots.span[heads] > 0)
        return np.asarray(idle)

    def _with_foreign(self, block_nbytes: int, missing: int) -> I64 | None:
        slots = self._slots
        own = self.all(block_nbytes)
        own = own[np.argsort(slots.used[own])]
        following = iter(zip(own.tolist(), slots.used[own].tolist(), slots.span[own].tolist(), strict=True))
        foreign = self._foreign_slabs(block_nbytes)
        chosen: list[int] = []
        found: list[I64] = []
        one = next(following, None)
        while missing > 0:
            if foreign and (one is None or foreign[-1][0] < one[1]):
                _, nbytes, heads = foreign.pop()
                found.append(heads)
                missing -= nbytes // block_nbytes
            elif one is not None:
                chosen.append(one[0])
                missing -= one[2]
                one = next(following, None)
            else:
                return None
        return np.concatenate((*found, np.array(chosen, np.int64)))

    def _foreign_slabs(self, block_nbytes: int) -> list[tuple[int, int, I64]]:
        """Return slabs of other sizes that are idle as a whole, the least recently used last.

        Of each: when it was used, its bytes, and its extents.
        """
        slots, slabs = self._slots, self._space.slabs
        heads = slots.heads()
        heads = heads[slots.size[heads] != block_nbytes]
        heads = heads[np.argsort(slots.slab[heads], kind="stable")]
        idle = self._is_idle(heads)
        numbers, first = np.unique(slots.slab[heads], return_index=True)
        found = []
        for number, begin, end in zip(numbers.tolist(), first, [*first[1:], len(heads)], strict=True):
            if idle[begin:end].all() and slabs[number].nbytes >= block_nbytes:
                own = heads[begin:end]
                found.append((int(slots.used[own].max()), slabs[number].nbytes, own))
        return sorted(found, key=lambda slab: slab[0], reverse=True)


def obstacles(
    holds: Mapping[Holder, Hold], filling: Iterable[Reservation], idle: Mapping[int, int], *, now: float
) -> str:
    """Say why each candidate was passed over, by who is in the way."""

    def of(holder: Holder) -> str:
        return f"by operation {holder[1]} of {holder[0].hex()[:8]}"

    lines = []
    for holder, hold in holds.items():
        until = "" if hold.expires is None else f", for {max(0.0, hold.expires - now):.1f} s more unless it is released"
        lines.append(f"{len(hold.extents)} extents held {of(holder)}{until}")
    lines += [f"{len(one.heads)} extents being filled {of(one.holder)}" for one in filling]
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
