"""One direction of an engine: its copies, a thread, and the operations that wait for either.

Owns the order in which operations are looked at and how long the thread sleeps. What an operation does next is its
own business; all of its steps are taken here, by one thread at a time. That is the lane's own, or, where copies never
block and tell their ends by themselves, whichever thread brings news: an operation then costs no change of threads,
and the lane's own only looks after deadlines. A direction that stands still keeps no other back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from devipc.deadline import no_thread
from devipc.errors import DevIPCError
from devipc.hicache.engine.copies import Copies
from devipc.hicache.engine.turns import in_turn
from devipc.hicache.moving.pace import Pace
from devipc.hicache.results import defect

__all__ = ["Lane", "Work"]

_FIRST_PAUSE_S, _FLYING_PAUSE_S, _WAITING_PAUSE_S = 20e-6, 0.2e-3, 1e-3
_DEADLINES_PAUSE_S, _IDLE_PAUSE_S = 10e-3, 20e-3
T = TypeVar("T")
_log = logging.getLogger("devipc.hicache")


class Work(Protocol):
    """An operation, as its lane sees it."""

    @property
    def owner(self) -> bytes:
        """Whose it is."""
        ...

    @property
    def ended(self) -> bool:
        """True once it has its status."""
        ...

    @property
    def waits(self) -> bool:
        """True while its copies have not been started."""
        ...

    def advance(self, now: float) -> bool:
        """Take all steps that can be taken now (monotonic seconds); return True when any was."""
        ...

    def fail(self, error: DevIPCError) -> None:
        """End, as far as nothing else can happen any more: the device is lost, or the engine has a defect."""
        ...


class Lane:
    """See the module. All methods may be called from any thread.

    Parameters
    ----------
    name : str
        For the thread's name.
    copies : Copies
        Moves the pages; owned, also when this raises.
    pace : Pace
        How many bytes a second; its own.
    max_flying, max_flying_nbytes : int
        Operations, and their bytes, that may be in flight at a time; the rest waits here, where it can still be
        cancelled. One client has half of that at most while others have operations here.
    lost : callable
        Returns the error that ended the device, or None.
    lose : callable
        To be told of such an error.

    Attributes
    ----------
    chores : callable
        Called now and then, as operations are; returns when it wants to be called again at the latest, or None.
    """

    def __init__(
        self,
        name: str,
        copies: Copies,
        *,
        pace: Pace,
        max_flying: int,
        max_flying_nbytes: int,
        lost: Callable[[], DevIPCError | None],
        lose: Callable[[DevIPCError], None],
    ) -> None:
        self.copies = copies
        self._pace = pace
        self._inline = copies.wakes
        copies.wake = self._nudge if self._inline else self.wake
        self.lose = lose
        self._full = False  # nothing more takes off for now
        self._blocked: set[bytes] = set()  # whose operations wait for room: those behind must not overtake them
        self._several = False  # clients that have operations here
        self.moved_nbytes = 0
        self._busy_s = self._busy_since = 0.0
        self._lost = lost
        self.chores: Callable[[], float | None] = lambda: None
        self._due: float | None = None
        self._max_flying, self._max_flying_nbytes = max_flying, max_flying_nbytes
        self._flying, self._flying_nbytes = 0, 0
        self._ops_of: Counter[bytes] = Counter()  # of those in flight, by owner
        self._nbytes_of: Counter[bytes] = Counter()
        self._changed = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._work: list[Work] = []
        self._woken = False
        self._driven = False  # a thread is at it
        self._stopping = self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"devipc-hicache-{name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            copies.close()
            raise no_thread("move pages", error) from error

    # --- for everybody -----------------------------------------------------------------------------------------------

    def add(self, work: Work) -> None:
        """Look after ``work`` until it has ended. As for :meth:`post`, :meth:`drive` follows."""
        self.post(lambda: self._work.append(work))

    def post(self, action: Callable[[], None]) -> None:
        """Run ``action`` among the steps of operations, in order. :meth:`drive` follows, without any lock."""
        with self._changed:
            self._inbox.append(action)
            if not self._inline:
                self._changed.notify()

    def wake(self) -> None:
        """Look at everything again now, on another thread than this."""
        with self._changed:
            self._woken = True
            if not self._driven:
                self._changed.notify()

    def wake_for_room(self) -> None:
        """Look again at those who wait for room, if anybody does."""
        if self._full or self._blocked:
            self.wake()

    def drive(self) -> None:
        """Do what was posted, on this thread if copies never block; if another thread is at it, it goes on to this.

        To be called without any lock: operations of any client may take their steps here.
        """
        while self._inline:
            with self._changed:
                if self._driven or self._stopped or not (self._inbox or self._woken):
                    return
                inbox = self._begin()
            self._pass(inbox)
            with self._changed:
                self._driven = False

    def _nudge(self) -> None:
        with self._changed:
            self._woken = True
        self.drive()

    @property
    def flying(self) -> int:
        """Operations in flight."""
        return self._flying

    @property
    def busy_s(self) -> float:
        """Seconds in which any operation moved: from when it might, before its room is made, until it was seen over."""
        return self._busy_s + (time.monotonic() - self._busy_since if self._flying else 0.0)

    def share_of(self, floor_nbytes_per_s: float) -> float | None:
        """Return bytes moved in those seconds over what a contiguous copy would move; None when that is not known."""
        possible = self.busy_s * floor_nbytes_per_s
        return round(self.moved_nbytes / possible, 4) if possible else None

    @property
    def stopping(self) -> bool:
        """True once :meth:`stop` was called."""
        return self._stopping

    def stop(self, *, timeout_s: float) -> bool:
        """End the thread, and close the copies, once all work has ended. False when that took too long."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        with self._changed:
            stopped, self._stopped = self._stopped, True
        if stopped:
            return True
        self.copies.close()
        return True

    # --- for the operations, among their steps -----------------------------------------------------------------------

    def blocks(self, owner: bytes) -> bool:
        """Return True when nothing more of a client may begin for now: something in front of it waits for room."""
        return self._full or owner in self._blocked

    def block(self, owner: bytes) -> None:
        """Note that an operation waits for room: those of its client that came later must not overtake it."""
        self._blocked.add(owner)

    def takes(self, owner: bytes, nbytes: int) -> bool:
        """Return True when so many bytes may be moved now; an operation alone may be of any size.

        Else it is in front of all others, or of its client's own when that has its part of what may be in flight.
        """
        if self._pace.allows():
            if not self._flying:
                self._busy_since = time.monotonic()
                return True
            if self._several and not self._has_part(owner, nbytes):
                self._blocked.add(owner)
                return False
            if self._flying < self._max_flying and self._flying_nbytes + nbytes <= self._max_flying_nbytes:
                return True
        self._full = True
        return False

    def _has_part(self, owner: bytes, nbytes: int) -> bool:
        own = self._ops_of[owner]
        own_nbytes = self._nbytes_of[owner] + nbytes
        return not own or (own < self._max_flying // 2 and own_nbytes <= self._max_flying_nbytes // 2)

    def took_off(self, owner: bytes, nbytes: int) -> None:
        """Count an operation whose copies were started."""
        self._flying += 1
        self._flying_nbytes += nbytes
        self._ops_of[owner] += 1
        self._nbytes_of[owner] += nbytes
        self._pace.spend(nbytes)

    def landed(self, owner: bytes, nbytes: int) -> None:
        """Count an operation whose copies are over."""
        self._flying -= 1
        self._flying_nbytes -= nbytes
        self._nbytes_of[owner] -= nbytes
        self._ops_of[owner] -= 1
        if not self._ops_of[owner]:
            del self._ops_of[owner], self._nbytes_of[owner]
        self.moved_nbytes += nbytes
        if not self._flying:
            self._busy_s += time.monotonic() - self._busy_since

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            with self._changed:
                if self._driven or not (self._inbox or self._woken or (self._stopping and not self._work)):
                    self._changed.wait(self._sleep_s(pause))
                if self._driven:
                    continue
                woken, inbox = self._woken, self._begin()
            moved = self._pass(inbox) or woken
            pause = _FIRST_PAUSE_S if moved else min(2 * pause, 1.0)
            with self._changed:
                self._driven = False
                if self._stopping and not self._work and not self._inbox:
                    return

    def _begin(self) -> list[Callable[[], None]]:
        """Begin to drive, with the lock; return what was posted."""
        inbox, self._inbox = self._inbox, []
        self._driven, self._woken = True, False
        return inbox

    def _pass(self, inbox: list[Callable[[], None]]) -> bool:
        """Let everything take its steps; True when anything did."""
        moved = bool(inbox)
        for action in inbox:
            self._guarded(action, None)
        inbox.clear()  # a thread that sleeps next would keep the last operation, and with it a client that is gone
        moved |= self._advance_all()
        self._due = self._guarded(self.chores, None)
        return moved

    def _sleep_s(self, pause: float) -> float | None:
        """How long to sleep when nobody wakes us: devices wake nobody, so we look."""
        if self._inline:
            return _DEADLINES_PAUSE_S if self._work else _IDLE_PAUSE_S
        if self._work:
            return min(pause, _FLYING_PAUSE_S if self._flying else _WAITING_PAUSE_S)
        return None if self._due is None else max(0.0, self._due - time.monotonic())

    def _advance_all(self) -> bool:
        moved, self._full = False, False
        self._blocked.clear()
        self._several = len({work.owner for work in self._work}) > 1
        lost = self._lost()
        later: list[Work] = []
        for work in self._work:
            if lost is not None:
                self._guarded(partial(work.fail, lost), None)
            if self._several and work.waits:  # for what those in flight may just give back
                later.append(work)
            elif not work.ended:
                moved |= self._guarded(partial(work.advance, time.monotonic()), False)
        for work in in_turn(later, self._nbytes_of):
            if not work.ended:
                moved |= self._guarded(partial(work.advance, time.monotonic()), False)
        self._work = [work for work in self._work if not work.ended]
        return moved

    def _guarded(self, action: Callable[[], T], otherwise: T) -> T:
        """Run ``action``. Whatever it raises would end the thread, and leave everybody waiting: it ends the engine."""
        try:
            return action()
        except DevIPCError as error:
            _log.exception("the cache engine ends")
            self.lose(error)
        except BaseException as error:  # also those that would end a thread without a word
            _log.exception("a defect of the cache engine, which ends it")
            self.lose(defect(error))
        return otherwise
