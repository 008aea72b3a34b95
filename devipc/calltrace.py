"""A trace of the calls that matter: driver calls of backends and channel operations of the core.

Owns the list of observers. Each backend's ``driver.py`` and the channel report a call just *before* it is made, so
that a test can prove which mechanism was really used, count calls, or end the process at the N-th of them. With no
observer a report costs one global read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["observe", "report"]

Observer = Callable[[str], None]
_observers: tuple[Observer, ...] = ()
_lock = threading.Lock()


def report(call: str) -> None:
    """Tell all observers that ``call`` is about to be made.

    Never blocks by itself. Observers run on the calling thread and may raise; what they raise reaches the caller.
    """
    for observer in _observers:
        observer(call)


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Call ``observer(name)`` before each traced call of this process, on any thread, until the block ends."""
    global _observers
    with _lock:
        _observers = (*_observers, observer)
    try:
        yield
    finally:
        with _lock:
            remaining = list(_observers)
            remaining.remove(observer)
            _observers = tuple(remaining)
