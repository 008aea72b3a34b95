"""Sleeping until an operation has changed: a lock for each thread that waits.

Owns that form of waiting and nothing else; cheaper than a condition, of which each operation would need one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection

from devipc.deadline import bounded

__all__ = ["Wait", "Waiters", "baton", "park", "wake"]

Waiters = list[threading.Lock]
"""Threads that wait for one thing: each sleeps on a lock of its own, which is released to wake it."""
Wait = Callable[[Callable[[], bool], Waiters, float], bool]
"""A way to wait, with the arguments of :func:`park`."""


def baton() -> threading.Lock:
    """Return a lock that is held."""
    made = threading.Lock()
    made.acquire()
    return made


def park(done: Callable[[], bool], waiters: Waiters, deadline: float) -> bool:
    """Sleep until ``done``, looking whenever woken through ``waiters``; False at the deadline (monotonic seconds)."""
    mine = baton()
    try:
        waiters.append(mine)
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return done()
            mine.acquire(timeout=bounded(left))
    finally:
        with contextlib.suppress(ValueError):
            waiters.remove(mine)
    return True


def wake(waiters: Collection[threading.Lock]) -> None:
    """Wake all of them."""
    for one in tuple(waiters):
        with contextlib.suppress(RuntimeError):  # woken already
            one.release()
