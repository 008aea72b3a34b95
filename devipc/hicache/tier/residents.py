"""Pages that can be found: as the tier knows them, in the columns of their slots, and in the index.

Owns that the three agree, and what can be done of an entry before the page's bytes are in place, so that little is
left to do behind them. What the index says of a page is its size. Not thread-safe: the tier's lock is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from devipc.hicache.results import PageResult, Results
from devipc.hicache.tier.blocks import Slots
from devipc.hicache.tier.index import IndexWriter
from devipc.hicache.tier.indexwords import Draft
from devipc.hicache.tier.records import Reservation

__all__ = ["Prepared", "Residents"]

I64 = npt.NDArray[np.int64]
_WORTH_IT = 4  # pages; fewer are entered as quickly as they are prepared


class Prepared(NamedTuple):
    """What is known of a reservation's pages beforehand: the slot of each, their entries in the index, the results.

    ``entered`` is how many times pages had been entered by then: while that stays, none of these can be there.
    """

    slots: dict[bytes, int]
    draft: Draft
    results: Results
    entered: int


class Residents:
    """See the module.

    Parameters
    ----------
    slots : Slots
        Of the blocks.
    index : IndexWriter
        Stays the caller's.

    Attributes
    ----------
    counts : dict
        How many were published so far, and for how many of those the index had no room.
    """

    def __init__(self, slots: Slots, index: IndexWriter) -> None:
        self._slot_of: dict[bytes, int] = {}
        self._late: list[Prepared] = []  # whose pages can be found, and are not among the others yet
        self.counts = {"published": 0, "unindexed": 0}
        self._columns = slots
        self._index = index
        self._entered = 0
        self._prepared: dict[Reservation, Prepared] = {}

    @property
    def slot_of(self) -> dict[bytes, int]:
        """Slot of each page. To look at, not to change."""
        if self._late:
            self.tidy()
        return self._slot_of

    @property
    def untidy(self) -> bool:
        """True when :meth:`tidy` has something to do."""
        return bool(self._late)

    def tidy(self) -> None:
        """Do what was put off when pages were entered, since somebody waited. Any other call does it, too."""
        while self._late:
            slots, draft, _, _ = self._late.pop()
            self._slot_of.update(slots)
            self._index.keep_draft(draft)

    def slots(self, names: Sequence[bytes], page_nbytes: int | None = None) -> I64:
        """Return the slot of each page, -1 for those that are not here, or have another size than this."""
        slot_of = self.slot_of
        found = np.fromiter(map(slot_of.get, names, repeat(-1)), np.int64, len(names))
        if page_nbytes is not None and slot_of:
            found[self._columns.page_nbytes[found] != page_nbytes] = -1  # what is not here stays that
        return found

    def prepare(self, reservation: Reservation) -> None:
        """Do what can be done before the bytes are in place. Nobody finds any of it."""
        names = reservation.names
        if len(names) < _WORTH_IT or reservation in self._prepared:
            return
        slots = dict(zip(names, reservation.slots.tolist(), strict=True))
        if len(slots) < len(names) or not self.slot_of.keys().isdisjoint(slots):
            return
        draft = self._index.draft(names, reservation.page_nbytes)
        self._columns.name[reservation.slots] = names
        results = np.full(len(names), PageResult.STORED, np.uint8)
        self._prepared[reservation] = Prepared(slots, draft, results, self._entered)

    def drop(self, reservation: Reservation) -> None:
        """Undo :meth:`prepare`, if that did anything."""
        prepared = self._prepared.pop(reservation, None)
        if prepared is not None:
            self._index.drop_draft(prepared.draft)
            self._columns.name[reservation.slots] = None

    def enter(self, reservation: Reservation, invalidated: Mapping[bytes, int], *, stale: bool) -> Results:
        """Let the pages of a reservation be found, of which every byte is in place; return what became of each.

        Parameters as for :meth:`~devipc.hicache.tier.records.Reservation.outcome`.
        """
        prepared = self._prepared.get(reservation)
        if prepared is not None and not (stale or invalidated):
            slots = prepared.slots
            if prepared.entered == self._entered or self.slot_of.keys().isdisjoint(slots):
                del self._prepared[reservation]
                self._index.publish_draft(prepared.draft)  # first: others wait for it
                self._count(len(slots), len(prepared.draft.places))
                self._late.append(prepared)
                self._columns.visible[reservation.slots] = True
                self._columns.live[reservation.heads] = self._columns.span[reservation.heads]
                return prepared.results
        self.drop(reservation)
        results, names = reservation.outcome(self.slot_of, self._columns.page_nbytes, invalidated, stale=stale)
        self._count(len(names), self._index.publish_all(names, reservation.page_nbytes, step=0))
        self._store(reservation, results, names)
        return results

    def _count(self, stored: int, published: int) -> None:
        self._entered += 1
        self.counts["published"] += stored
        self.counts["unindexed"] += stored - published

    def _store(self, reservation: Reservation, results: Results, names: Sequence[bytes]) -> None:
        slots, columns = reservation.slots, self._columns
        if len(names) < len(slots):
            slots = slots[results == PageResult.STORED]
        self._slot_of.update(zip(names, slots.tolist(), strict=True))
        columns.visible[slots] = True
        columns.name[slots] = names
        if len(slots) == len(reservation.slots):
            columns.live[reservation.heads] = columns.span[reservation.heads]
        else:
            np.add.at(columns.live, columns.head[slots], 1)

    def take_away(self, slots: I64, names: Sequence[bytes], whole: I64 | None = None) -> I64:
        """Let nobody find these pages any more; return their extents, each once.

        Parameters
        ----------
        slots, names : array and sequence
            The pages.
        whole : array or None
            Their extents, where they are all that these have.
        """
        slot_of = self.slot_of
        for name in names:
            del slot_of[name]
        self._index.evict_all(names)
        columns = self._columns
        columns.visible[slots] = False
        columns.name[slots] = None
        if whole is None:
            whole, counts = np.unique(columns.head[slots], return_counts=True)
            columns.live[whole] -= counts
        else:
            columns.live[whole] = 0
        return whole
