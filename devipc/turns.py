"""Turns: calls about one thing come one after the other, and those about others are not held up.

Owns the locks, by identity, for as long as somebody holds one, and how a turn is taken that an interrupt cannot keep.
Knows no driver: a call that hangs keeps its own turn and no other.
"""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import WeakValueDictionary

from devipc.deadline import bounded

__all__ = ["Turns", "take_turn"]


class _Lock(Protocol):
    """A lock of :mod:`threading`, reentrant or not."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...  # noqa: FBT001, FBT002


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


def take_turn(turn: _Lock, mine: list[bool], timeout_s: float = 0.0) -> bool:
    """Take a lock and note it in ``mine``, so that an interrupt finds either both or neither; True when it was taken.

    Interrupts come between two calls, never inside one: what takes the lock must be the call that notes it. The caller
    releases it in a ``finally`` that this call is under, if ``mine`` says so::

        mine: list[bool] = []
        try:
            if take_turn(turn, mine):
                ...
        finally:
            if mine and mine[0]:
                turn.release()

    Blocks for ``timeout_s`` at most; 0 does not.
    """
    if timeout_s > 0:
        mine[:] = map(turn.acquire, (True,), (bounded(timeout_s),))
    else:
        mine[:] = map(turn.acquire, (False,))
    return mine[0]
