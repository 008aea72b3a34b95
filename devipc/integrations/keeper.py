"""Counting the views of one mapping, so that memory is unmapped only after the last of them.

Owns the counter. It knows neither what a view is nor what happens at the end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from devipc.errors import ClosedError, ForkError, UsageError

__all__ = ["Hold", "ViewKeeper"]


class ViewKeeper:
    """Counts who still uses a mapping; starts at one, for whoever made it.

    The maker calls :meth:`release` when it closes; each view holds its own count. When the last is given back,
    ``on_last`` runs once, and nothing can be acquired any more. In a forked child nothing is ever given back: the
    mapping is the parent's. Any thread, and inside garbage collection.

    Parameters
    ----------
    on_last : callable
        Called without arguments, on the thread that gave back the last count. That can be a garbage collection inside
        any allocation of any thread, so it must not take a lock that its own callers hold while they allocate,
        unless that lock is reentrant. What it raises reaches whoever released, or is printed when a view died.
    """

    __slots__ = ("_count", "_lock", "_on_last", "_pid")

    def __init__(self, on_last: Callable[[], object]) -> None:
        self._on_last = on_last
        self._count = 1
        # Reentrant: a collection inside the block can destroy a view. No call is made between reading and writing the
        # count, so that such a visit falls before or after, never in between.
        self._lock = threading.RLock()
        self._pid = os.getpid()

    @property
    def count(self) -> int:
        """How many counts are out, the maker's included; 0 once it is over."""
        return self._count

    def acquire(self) -> None:
        """Take a count.

        Raises
        ------
        ClosedError
            When the last one was given back already.
        ForkError
            In a forked child.
        """
        self.check_process()
        with self._lock:
            closed = self._count == 0
            if not closed:
                self._count += 1
        if closed:
            raise ClosedError("the memory is unmapped", remedy="open it again")

    def check_process(self) -> None:
        """Raise :class:`~devipc.errors.ForkError` in a forked child, where no view of the parent's may be made."""
        if os.getpid() != self._pid:
            raise ForkError("this memory was mapped before a fork", remedy="open it again in the new process")

    def release(self) -> None:
        """Give a count back; the last one runs ``on_last``.

        Raises
        ------
        UsageError
            When more are given back than were taken.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            left = self._count - 1
            if left >= 0:
                self._count = left
        if left < 0:
            raise UsageError("given back more often than taken", remedy="release once per acquire")
        if left == 0:
            self._on_last()

    def hold(self) -> Hold:
        """Take a count that gives itself back when the returned object dies; raises as :meth:`acquire` does."""
        self.acquire()
        return Hold(self)


class Hold:
    """One count of a :class:`ViewKeeper`, already taken; given back when this object dies."""

    __slots__ = ("_keeper",)

    def __init__(self, keeper: ViewKeeper) -> None:
        self._keeper = keeper

    def __del__(self) -> None:
        self._keeper.release()
