"""Turns: calls about one thing come one after the other, and those about others are not held up.

Owns the locks, by identity, for as long as somebody holds one. Knows no driver: a call that hangs keeps its own turn
and no other.
"""

from __future__ import annotations

import threading
from weakref import WeakValueDictionary

__all__ = ["Turns"]


class Turns:
    """Locks by identity. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: WeakValueDictionary[bytes, threading.Lock] = WeakValueDictionary()

    def of(self, identity: bytes) -> threading.Lock:
        """Return the lock of ``identity``, to be held around calls about it."""
        with self._lock:
            turn = self._turns.get(identity)
            if turn is None:
                turn = self._turns[identity] = threading.Lock()
            return turn
