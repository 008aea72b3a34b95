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
from devipc.hicache.blocks import ALIGN_NBYTES, BlockSpace
from devipc.hicache.eviction import IdleRuns, no_room, obstacles
from devipc.hicache.index import IndexWriter
from devipc.hicache.records import Hold, Holder, Page, Places, Reservation, Run
from devipc.hicache.results import PageResult, Results
from devipc.memfd import round_up

__all__ = ["HostTier"]


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
        self._index = index
        self.extent_pages = extent_pages
        self._clock = clock
        self._lock = threading.Lock()
        self._pages: dict[bytes, Page] = {}
        self._idle = IdleRuns(self._space)
        self._holds: dict[Holder, Hold] = {}
        self._open: set[Reservation] = set()
        self._next_expiry = math.inf  # or earlier than any lease: then expire() looks for nothing
        self._changes = 0
        self._flushes: dict[bytes, int] = {}
        self._invalidated: OrderedDict[bytes, int] = OrderedDict()  # while somebody could bring them back; oldest first
        self._counts = dict.fromkeys(("published", "unindexed", "evicted", "flushed", "invalidated", "expired"), 0)
        self.on_room: Callable[[], None] = lambda: None

    # --- reserving ---------------------------------------------------------------------------------------------------

    @staticmethod
    def block_of(page_nbytes: int) -> int:
        """Return the size of a block that holds a page of this many bytes."""
        return round_up(page_nbytes, ALIGN_NBYTES)

    def capacity(self, block_nbytes: int) -> int:
        """Return how many pages of this size fit when no other size is there."""
        return self._space.capacity(block_nbytes)

    def reserve(
        self, holder: Holder, names: Sequence[bytes], *, namespace: bytes, block_nbytes: int, runs: Sequence[int]
    ) -> Reservation:
        """Take blocks for pages that are about to be written: for all of them, or for none.

        Evicts what nobody needs, the least recently used first, and only when that is enough.

        Parameters
        ----------
        holder : Holder
            Whose operation it is; named when the blocks are in somebody's way.
        names : sequence of bytes
            The pages.
        runs : sequence of int
            Lengths of neighbouring pages, which are stored as extents.

        Raises
        ------
        ResourceExhausted
            With code ``too_large`` when it can never fit, else ``no_room``, saying what is in the way.
        """
        lengths = [min(self.extent_pages, n - at) for n in runs for at in range(0, n, self.extent_pages)]
        if sum(lengths) != len(names):
            raise UsageError(f"runs of {sum(lengths)} pages for {len(names)} names", remedy="count every page once")
        with self._lock:
            self._make_room(block_nbytes, len(names))
            extents = self._space.allocate(block_nbytes, lengths)
            made = [Run(extent, namespace, block_nbytes) for extent in extents]
            for extent in extents:
                extent.slab.busy += 1
            reservation = Reservation(holder, names, made, self._changes, self._flushes.get(namespace, 0))
            self._open.add(reservation)
        return reservation

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
            namespace = reservation.runs[0].namespace if reservation.runs else b""
            stale = self._flushes.get(namespace, 0) != reservation.flushes
            results: list[PageResult] = []
            stored: list[bytes] = []
            at = 0
            for run in reservation.runs:
                self._idle.use(run)
                for index in range(run.extent.span):
                    name = reservation.names[at]
                    results.append(self._store(run, index, name, reservation.started, stale=stale))
                    if results[-1] is PageResult.STORED:
                        stored.append(name)
                    at += 1
                self._idle.settle(run)
            self._publish(stored)
            self._forget_invalidated()
        self.on_room()
        return np.array(results, np.uint8)

    def abort(self, reservation: Reservation) -> None:
        """Give the blocks of a reservation back; to be called when nothing can write to them any more."""
        with self._lock:
            self._end(reservation)
            for run in reservation.runs:
                self._idle.settle(run)
            self._forget_invalidated()
        self.on_room()

    def _end(self, reservation: Reservation) -> None:
        if reservation not in self._open:
            raise UsageError("the reservation has ended", code="double_free", remedy="commit or abort it once")
        self._open.discard(reservation)
        for run in reservation.runs:
            run.filling = False
            run.extent.slab.busy -= 1

    def _store(self, run: Run, index: int, name: bytes, started: int, *, stale: bool) -> PageResult:
        if stale or self._invalidated.get(name, -1) > started:
            return PageResult.DROPPED
        if name in self._pages:
            return PageResult.PRESENT
        self._pages[name] = Page(run, index)
        run.pages.add(name)
        return PageResult.STORED

    def _publish(self, names: list[bytes]) -> None:
        """Let readers find pages that are here, each with a number of its own."""
        self._counts["published"] += len(names)
        self._counts["unindexed"] += len(names) - self._index.publish_all(names, self._changes + 1)
        self._changes += len(names)

    def _forget_invalidated(self) -> None:
        oldest = min((reservation.started for reservation in self._open), default=self._changes)
        while self._invalidated and next(iter(self._invalidated.values())) <= oldest:
            self._invalidated.popitem(last=False)

    # --- room --------------------------------------------------------------------------------------------------------

    def _make_room(self, block_nbytes: int, needed: int) -> None:
        capacity = self._space.capacity(block_nbytes)
        if needed > capacity:
            raise ResourceExhausted(
                f"{needed} pages of {block_nbytes} bytes, the whole host tier holds {capacity}",
                code="too_large",
                retryable=False,
                remedy="move fewer pages at once, or give the host tier more memory",
            )
        missing = needed - self._space.free_blocks(block_nbytes)
        if missing <= 0:
            return
        victims = self._idle.victims(block_nbytes, missing)
        if victims is None:
            why = obstacles(self._holds, self._open, self._idle.counts(), now=self._clock())
            raise no_room(needed, block_nbytes, why)
        for run in victims:
            self._counts["evicted"] += len(run.pages)
            for name in list(run.pages):
                self._detach(name)

    # --- holding -----------------------------------------------------------------------------------------------------

    def hold(
        self, holder: Holder, names: Sequence[bytes], *, lease_s: float | None = None, partial: bool = True
    ) -> tuple[npt.NDArray[np.bool_], Places]:
        """Keep the pages among ``names`` that are here from being evicted, until :meth:`release`.

        Parameters
        ----------
        holder : Holder
            In use by no other hold.
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
            pages = [self._pages.get(name) for name in names]
            hit = np.array([page is not None for page in pages], np.bool_)
            found = [page for page in pages if page is not None]
            if found and (partial or len(found) == len(pages)):
                for page in found:
                    self._grab(page.run)
                expires = None if lease_s is None else self._clock() + lease_s
                self._holds[holder] = Hold([page.run for page in found], expires)
                self._next_expiry = min(self._next_expiry, math.inf if expires is None else expires)
            places = Places.of(found)
        return hit, places

    def _grab(self, run: Run) -> None:
        run.holds += 1
        self._idle.use(run)
        if run.holds == 1:
            run.extent.slab.busy += 1
            self._idle.settle(run)

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
        for run in hold.runs:
            run.holds -= 1
            if not run.holds:
                run.extent.slab.busy -= 1
                self._idle.settle(run)
        return True

    def release_owner(self, owner: bytes) -> int:
        """Give back everything that ``owner`` holds; it is gone. Returns how many holds there were."""
        with self._lock:
            holders = [holder for holder in self._holds if holder[0] == owner]
            for holder in holders:
                self._release(holder)
        if holders:
            self.on_room()
        return len(holders)

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

    def present(self, names: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return which pages are here now, and count that as a use."""
        with self._lock:
            pages = [self._pages.get(name) for name in names]
            for page in pages:
                if page is not None:
                    self._idle.use(page.run)
        return np.array([page is not None for page in pages], np.bool_)

    def invalidate(self, names: Sequence[bytes]) -> int:
        """Let nobody find these pages any more, those that are being written included. Returns how many were here."""
        with self._lock:
            gone = sum(self._detach(name) for name in names)
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
            gone = [name for name, page in self._pages.items() if page.run.namespace == namespace]
            for name in gone:
                self._detach(name)
            self._counts["flushed"] += len(gone)
        self.on_room()
        return len(gone)

    def _detach(self, name: bytes) -> bool:
        page = self._pages.pop(name, None)
        if page is None:
            return False
        self._index.evict(name)
        page.run.pages.discard(name)
        if not page.run.pages:
            self._idle.settle(page.run)
        return True

    # --- looking -----------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Return what is there and what happened so far, as JSON-ready values."""
        with self._lock:
            held = {run for hold in self._holds.values() for run in hold.runs}
            return {
                "pages": len(self._pages),
                "capacity_nbytes": sum(slab.nbytes for slab in self._space.slabs),
                "slabs": dict(Counter(str(slab.block_nbytes) for slab in self._space.slabs)),
                "holds": len(self._holds),
                "held_extents": len(held),
                "reservations": len(self._open),
                "idle_extents": sum(self._idle.counts().values()),
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
            self._space.audit()
            holds = Counter(run for hold in self._holds.values() for run in hold.runs)
            filling = {run for reservation in self._open for run in reservation.runs}
            resident = {page.run for page in self._pages.values()}
            known = {run.extent: run for run in (*holds, *filling, *resident)}
            checks = {
                "extents without anybody": set(self._space.extents()) == set(known),
                "holds": all(run.holds == holds[run] for run in known.values()),
                "filling": all(run.filling == (run in filling) for run in known.values()),
                "idle": all((run in self._idle) == (run not in filling and not holds[run]) for run in resident),
                "pages": sum(len(run.pages) for run in resident) == len(self._pages),
                "busy": sum(slab.busy for slab in self._space.slabs) == len(filling) + len(holds),
            }
        wrong = [name for name, holds_true in checks.items() if not holds_true]
        if wrong:
            raise UsageError(f"the host tier miscounts: {', '.join(wrong)}", code="audit", remedy="a defect: report it")
