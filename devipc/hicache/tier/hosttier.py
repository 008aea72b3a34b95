"""The host tier: which pages are in host memory, who needs them to stay, and what makes room.

Owns residency: it is the one authority, what anybody else believes is a hint. It owns pins, leases, reservations,
eviction and the publication in the index. It moves no byte, knows no device, and sees host memory as offsets.

A page becomes visible when its reservation is committed, and never by parts: its block holds all of its planes. Pages
that were reserved together lie in *extents*; an extent is given back when none of its pages is left. A *hold* keeps
pages from being evicted; it has a holder (owner and operation), is given back once, and dies with its owner.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from devipc.errors import ResourceExhausted, UsageError
from devipc.hicache.few import distinct, total
from devipc.hicache.results import Results
from devipc.hicache.tier.audit import differences
from devipc.hicache.tier.blockruns import at_most, slots_of
from devipc.hicache.tier.blocks import ALIGN_NBYTES, BlockSpace
from devipc.hicache.tier.eviction import IdleExtents, no_room, obstacles
from devipc.hicache.tier.index import IndexWriter
from devipc.hicache.tier.overlaps import Overlaps
from devipc.hicache.tier.records import Hold, Holder, Places, Reservation
from devipc.hicache.tier.residents import Residents
from devipc.hicache.tier.shares import Shares
from devipc.memfd import round_up

__all__ = ["HostTier"]

I64 = npt.NDArray[np.int64]


class HostTier:
    """Residency of pages. All methods may be called from any thread; none waits for anything but the lock.

    Parameters
    ----------
    chunks : sequence of (int, int)
        Offset and length of each part of the arena that no block may straddle.
    index : IndexWriter
        Where pages are published; stays the caller's.
    slab_nbytes : int
        How much of the arena one page size takes at a time.
    extent_pages : int
        Longest run that is stored as one extent, and evicted as one; 1 where the arena is reached page by page.
    clock : callable
        Monotonic seconds.
    """

    def __init__(
        self,
        chunks: Sequence[tuple[int, int]],
        index: IndexWriter,
        *,
        slab_nbytes: int = 64 * 2**20,
        extent_pages: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._space = BlockSpace(chunks, slab_nbytes=slab_nbytes)
        self._residents = Residents(self._space.slots, index)
        self.extent_pages = extent_pages
        self._clock = clock
        self._lock = threading.Lock()
        self._slots = self._space.slots
        self._spaces: dict[bytes, int] = {}  # numbers of namespaces, from 1
        self._idle = IdleExtents(self._space)
        self._holds: dict[Holder, Hold] = {}
        self._overlaps = Overlaps(self._slots)
        self.shares = Shares(sum(slab.nbytes for slab in self._space.slabs))
        self._open: set[Reservation] = set()
        self._next_expiry = math.inf  # or earlier than any lease: then expire() looks for nothing
        self._changes = 0
        self._flushes: dict[bytes, int] = {}
        self._invalidated: OrderedDict[bytes, int] = OrderedDict()  # while somebody could bring them back; oldest first
        self._counts = dict.fromkeys(("evicted", "flushed", "invalidated", "expired"), 0)
        self.on_room: Callable[[], None] = lambda: None

    # --- reserving ---------------------------------------------------------------------------------------------------

    @staticmethod
    def block_of(page_nbytes: int) -> int:
        """Return the size of a block that holds a page of this many bytes."""
        return round_up(page_nbytes, ALIGN_NBYTES)

    def capacity(self, block_nbytes: int) -> int:
        """Return how many pages of this size fit when no other size is there."""
        return self._space.capacity(block_nbytes)

    def capacity_for(self, owner: bytes, block_nbytes: int) -> int:
        """Return how many pages of this size one client may fill at a time."""
        return min(self.capacity(block_nbytes), self.shares.ceiling(owner) // block_nbytes)

    def reserve(
        self,
        holder: Holder,
        names: Sequence[bytes],
        *,
        namespace: bytes,
        page_nbytes: int,
        runs: Sequence[int] | I64 | None = None,
    ) -> Reservation:
        """Take blocks for pages that are about to be written: for all of them, or for none.

        Evicts what nobody needs, the least recently used first, and only when that is enough.

        Parameters
        ----------
        holder : Holder
            Whose operation it is; named when the blocks are in somebody's way.
        names : sequence of bytes
            The pages.
        page_nbytes : int
            Size of each.
        runs : sequence or array of int, or None
            Lengths of neighbouring pages, which are stored as extents; None: each page is one by itself.

        Raises
        ------
        ResourceExhausted
            With code ``too_large`` when it can never fit, ``share`` when it is too much for one client, else
            ``no_room``, saying what is in the way.
        """
        lengths = None if runs is None else at_most(np.asarray(runs, np.int64), self.extent_pages)
        if lengths is not None and (pages := total(lengths)) != len(names):
            raise UsageError(f"runs of {pages} pages for {len(names)} names", remedy="count every page once")
        with self._lock:
            block_nbytes = self.block_of(page_nbytes)
            nbytes = block_nbytes * len(names)
            self.shares.check(holder[0], nbytes, lambda: self._overlaps.nbytes(holder[0]))
            self._make_room(block_nbytes, len(names))
            heads, slots = self._space.allocate(block_nbytes, len(names) if lengths is None else lengths)
            columns = self._slots
            columns.filling[heads] = True
            columns.page_nbytes[slots] = page_nbytes
            columns.space[heads] = self._spaces.setdefault(namespace, len(self._spaces) + 1)
            flushes = self._flushes.get(namespace, 0)
            places = Places.of(slots, columns.head[slots] if slots is not heads else slots, columns)
            reservation = Reservation(
                holder, names, namespace, page_nbytes, heads, slots, places, self._changes, flushes, nbytes
            )
            self._open.add(reservation)
            self.shares.take(holder[0], nbytes)
        return reservation

    def prepare(self, reservation: Reservation) -> None:
        """Do already what :meth:`commit` would have to do; to be called while the bytes move. It can be left out."""
        with self._lock:
            if reservation in self._open:
                self._residents.prepare(reservation)

    def commit(self, reservation: Reservation) -> Results:
        """Let the pages of a reservation be found; to be called when all of their bytes are in place.

        Returns
        -------
        numpy.ndarray
            :class:`PageResult` ``(n,)``: ``stored``; ``present`` when the page was there meanwhile; ``dropped`` when
            it was invalidated or flushed since the reservation.
        """
        with self._lock:
            self._end(reservation)
            stale = self._flushes.get(reservation.namespace, 0) != reservation.flushes
            results = self._residents.enter(reservation, self._invalidated, stale=stale)
            self._idle.use(reservation.heads)
            self._idle.settle(reservation.heads)
            self._forget_invalidated()
        self.on_room()
        return results

    def tidy(self) -> None:
        """Do what :meth:`commit` has put off because others wait for it. It can be left out."""
        if self._residents.untidy:
            with self._lock:
                self._residents.tidy()

    def abort(self, reservation: Reservation) -> None:
        """Give the blocks of a reservation back; to be called when nothing can write to them any more."""
        with self._lock:
            self._end(reservation)
            self._residents.drop(reservation)
            self._idle.settle(reservation.heads)
            self._forget_invalidated()
        self.on_room()

    def _end(self, reservation: Reservation) -> None:
        if reservation not in self._open:
            raise UsageError("the reservation has ended", code="double_free", remedy="commit or abort it once")
        self._open.discard(reservation)
        self.shares.give_back(reservation.holder[0], reservation.nbytes)
        self._slots.filling[reservation.heads] = False

    def _forget_invalidated(self) -> None:
        oldest = min((reservation.started for reservation in self._open), default=self._changes)
        while self._invalidated and next(iter(self._invalidated.values())) <= oldest:
            self._invalidated.popitem(last=False)

    # --- room --------------------------------------------------------------------------------------------------------

    def _make_room(self, block_nbytes: int, needed: int) -> None:
        if (missing := self._space.lacks(block_nbytes, needed)) <= 0:
            return
        if needed > (capacity := self._space.capacity(block_nbytes)):
            raise ResourceExhausted(
                f"{needed} pages of {block_nbytes} bytes, the whole host tier holds {capacity}",
                code="too_large",
                retryable=False,
                remedy="move fewer pages at once, or give the host tier more memory",
            )
        victims = self._idle.victims(block_nbytes, missing)
        if victims is None:
            why = obstacles(self._holds, self._open, self._idle.counts(), now=self._clock())
            raise no_room(needed, block_nbytes, why)
        slots = slots_of(victims, self._slots.span[victims])
        slots = slots[self._slots.visible[slots]]
        self._counts["evicted"] += len(slots)
        self._take_away(slots, self._slots.name[slots].tolist(), victims)

    # --- holding -----------------------------------------------------------------------------------------------------

    def hold(
        self,
        holder: Holder,
        names: Sequence[bytes],
        *,
        page_nbytes: int,
        lease_s: float | None = None,
        partial: bool = True,
    ) -> tuple[npt.NDArray[np.bool_], Places]:
        """Keep the pages among ``names`` that are here from being evicted, until :meth:`release`.

        Parameters
        ----------
        holder : Holder
            In use by no other hold.
        page_nbytes : int
            Size of the pages that are asked for: one of another size under such a name is not here.
        lease_s : float or None
            Seconds after which :meth:`expire` releases them, should nobody do it; None: never.
        partial : bool
            False holds nothing unless every page is here.

        Returns
        -------
        hit : numpy.ndarray
            bool ``(n,)``: which pages are here.
        places : Places
            Of those, in order.
        """
        with self._lock:
            if holder in self._holds:
                raise UsageError(f"operation {holder[1]} holds pages already", code="duplicate", remedy="count ids up")
            slots = self._residents.slots(names, page_nbytes)
            hit = slots >= 0
            if np.count_nonzero(hit) < len(hit):
                slots = slots[hit]
            heads = self._slots.head[slots]
            places = Places.of(slots, heads, self._slots)
            if len(slots) and (partial or len(slots) == len(names)):
                extents = distinct(heads)
                nbytes = self._slots.nbytes_of(extents)
                self.shares.check(holder[0], nbytes, lambda: self._overlaps.nbytes(holder[0], extents))
                self.shares.take(holder[0], nbytes)
                self._slots.holds[extents] += 1
                self._idle.use(heads)
                expires = None if lease_s is None else self._clock() + lease_s
                hold = self._holds[holder] = Hold(heads, extents, expires, nbytes)
                self._overlaps.add(holder[0], hold)
                self._next_expiry = min(self._next_expiry, math.inf if expires is None else expires)
        return hit, places

    def release(self, holder: Holder) -> bool:
        """Give back what ``holder`` has. False when it has nothing (any more)."""
        with self._lock:
            released = self._release(holder)
        if released:
            self.on_room()
        return released

    def _release(self, holder: Holder) -> bool:
        hold = self._holds.pop(holder, None)
        if hold is None:
            return False
        self.shares.give_back(holder[0], hold.nbytes)
        self._overlaps.remove(holder[0], hold)
        columns = self._slots
        columns.holds[hold.extents] -= 1
        # Behind everything that was used until now, as long as it was held.
        self._idle.use(hold.heads[columns.holds[hold.heads] == 0])
        self._idle.settle(hold.extents)
        return True

    def expire(self) -> tuple[list[Holder], float | None]:
        """Release leases whose time is over; return whose they were, and when the next one ends (monotonic)."""
        now = self._clock()
        if now < self._next_expiry:
            return [], None if self._next_expiry == math.inf else self._next_expiry
        with self._lock:
            due = [(hold.expires, holder) for holder, hold in self._holds.items() if hold.expires is not None]
            over = [holder for expires, holder in due if expires <= now]
            for holder in over:
                self._release(holder)
            self._counts["expired"] += len(over)
            self._next_expiry = min((expires for expires, _ in due if expires > now), default=math.inf)
        if over:
            self.on_room()
        return over, None if self._next_expiry == math.inf else self._next_expiry

    # --- asking and taking away --------------------------------------------------------------------------------------

    def present(self, names: Sequence[bytes], page_nbytes: int) -> npt.NDArray[np.bool_]:
        """Return which pages of this size are here now, and count that as a use."""
        with self._lock:
            if self._residents.slot_of.keys().isdisjoint(names):
                return np.zeros(len(names), np.bool_)
            slots = self._residents.slots(names, page_nbytes)
            self._idle.use(self._slots.head[slots[slots >= 0]])
        return np.asarray(slots >= 0)

    def invalidate(self, names: Sequence[bytes]) -> int:
        """Let nobody find these pages any more, those that are being written included. Returns how many were here."""
        with self._lock:
            here = [name for name in dict.fromkeys(names) if name in self._residents.slot_of]
            self._take_away(self._residents.slots(here), here)
            gone = len(here)
            if self._open:
                self._changes += 1
                for name in names:
                    self._invalidated[name] = self._changes
                    self._invalidated.move_to_end(name)
            self._counts["invalidated"] += gone
        self.on_room()
        return gone

    def flush(self, namespace: bytes) -> int:
        """Let nobody find any page of ``namespace``, those that are being written included; return how many there were.

        Memory that somebody holds is freed when it is released.
        """
        with self._lock:
            self._flushes[namespace] = self._flushes.get(namespace, 0) + 1
            columns = self._slots
            slots = np.flatnonzero(columns.visible[: columns.count])
            slots = slots[columns.space[columns.head[slots]] == self._spaces.get(namespace, 0)]
            gone: list[bytes] = columns.name[slots].tolist()
            self._take_away(slots, gone)
            self._counts["flushed"] += len(gone)
        self.on_room()
        return len(gone)

    def _take_away(self, slots: I64, names: list[bytes], whole: I64 | None = None) -> None:
        """Let nobody find these pages any more; their extents are given back unless somebody holds them."""
        self._idle.settle(self._residents.take_away(slots, names, whole))

    # --- looking -----------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Return what is there and what happened so far, as JSON-ready values."""
        with self._lock:
            return {
                "pages": len(self._residents.slot_of),
                "capacity_nbytes": sum(slab.nbytes for slab in self._space.slabs),
                "slabs": dict(Counter(str(slab.block_nbytes) for slab in self._space.slabs)),
                "holds": len(self._holds),
                "held_extents": int(np.count_nonzero(self._slots.holds)),
                "reservations": len(self._open),
                "pinned_nbytes": self.shares.pinned(),
                "idle_extents": sum(self._idle.counts().values()),
                **self._residents.counts,
                **self._counts,
            }

    def pins(self) -> str:
        """Return who keeps what from being evicted, as text, the first ones by name."""
        with self._lock:
            return obstacles(self._holds, self._open, self._idle.counts(), now=self._clock())

    def audit(self) -> None:
        """Compare all counters with what they count; for tests and for reports of defects.

        Raises
        ------
        UsageError
            With code ``audit``, for the first difference.
        """
        with self._lock:
            wrong = differences(self._space, self._residents.slot_of, self._holds.values(), self._open)
        if wrong:
            raise UsageError(f"the host tier miscounts: {', '.join(wrong)}", code="audit", remedy="a defect: report it")
