"""One end of a ring: how it sleeps, wakes the other, and how it ends.

Owns the rule that no sleep is longer than the interval of a re-check, and that no memory is unmapped under a call. It
does not know what a slot is.
"""

from __future__ import annotations

import copy
import os
import select
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NoReturn

from devipc.channel.identity import close_in_child
from devipc.deadline import remaining
from devipc.errors import ClosedError, CompletionTimeout, DevIPCError, ForkError, HandleError, ProtocolError
from devipc.memfd import SharedMap

__all__ = ["RECHECK_S", "RingEnd"]

RECHECK_S = 0.05
"""A sleeper looks at the memory at least this often, whether somebody kicked or not."""


class RingEnd(ABC):
    """What both ends have. Any thread, one call at a time.

    Parameters
    ----------
    ring : SharedMap
        The memory; owned once this has returned.
    fds : sequence of int
        The bell of this end and that of the other, then whatever else is to be closed; owned once this has returned.
    my_nap, their_nap : int
        Words that say who sleeps.
    """

    def __init__(self, ring: SharedMap, fds: Sequence[int], *, my_nap: int, their_nap: int) -> None:
        self._map = ring
        self._words = ring.view.cast("Q")
        self._bytes = ring.view
        self._fds = list(fds)
        self._my_nap, self._their_nap = my_nap, their_nap
        self._naps = self._kicked = 0
        self._ended: DevIPCError | None = None
        self._pid = os.getpid()
        self._turn = threading.Lock()
        self._barrier = threading.Lock()
        self._closing = threading.Lock()  # of the descriptors, which end() may use at any time
        # Edge-triggered, so that a bell need not be silenced: one system call to sleep, one to wake.
        self._sleeper = select.epoll()
        try:
            self._sleeper.register(fds[0], select.EPOLLIN | select.EPOLLET)
        except OSError as error:
            self._sleeper.close()
            raise HandleError(f"descriptor cannot wake anybody ({error.strerror})", code="not_an_eventfd") from error
        close_in_child(self)

    # --- sleeping and waking -----------------------------------------------------------------------------------------

    def _fence(self) -> None:
        self._barrier.acquire()  # an atomic instruction: no later load passes an earlier store
        self._barrier.release()

    def _kick(self) -> None:
        """Wake the other side if it sleeps; once for each of its sleeps."""
        self._fence()
        nap = self._words[self._their_nap]
        if nap and nap != self._kicked:
            self._kicked = nap
            self._ring(self._fds[1])

    def _ring(self, bell: int) -> None:
        # Nobody but a peer that makes the bell blocking and fills it could hold this up; no flag of one call forbids
        # that, so peers that are not trusted that far get messages instead.
        try:
            os.eventfd_write(bell, 1)
        except BlockingIOError:  # nobody empties it: a counter that is full is a kick that is there already
            pass

    def _sleep(self, deadline: float) -> bool:
        """Sleep until kicked, at most until it is time to look again; False when the deadline has passed."""
        left = remaining(deadline)
        if not left:
            return False
        self._naps += 1
        self._words[self._my_nap] = self._naps
        self._fence()
        if not self._awaited() and self._ended is None:
            self._sleeper.poll(min(left, RECHECK_S), 1)
        self._words[self._my_nap] = 0
        return True

    @abstractmethod
    def _awaited(self) -> bool:
        """Return True when what this side sleeps for may be there."""

    # --- the end -----------------------------------------------------------------------------------------------------

    def _enter(self, deadline: float) -> None:
        """Begin a call, which ends with ``self._turn.release()``. No context manager: it would cost a fifth of it."""
        if os.getpid() != self._pid:
            raise ForkError("this ring belongs to the process that forked")
        if not self._turn.acquire(False) and not self._turn.acquire(timeout=remaining(deadline)):
            raise CompletionTimeout("another thread uses this end of the ring")
        if self._ended is not None:
            self._turn.release()
            self._check()

    def _check(self) -> None:
        if self._ended is not None:
            raise copy.copy(self._ended)

    def _refuse(self, what: str) -> NoReturn:
        """End the ring: nothing that comes after a broken rule can be trusted."""
        error = ProtocolError(f"ring: {what}", remedy="close the connection; the peer breaks the ring's rules")
        self._ended = self._ended or error
        raise copy.copy(error)

    def end(self, error: DevIPCError) -> None:
        """Let every call on this end raise ``error``, those that wait included: the peer is dying. The first one stays.

        Never blocks. What was published and nobody took is dropped. Close it all the same.
        """
        self._ended = self._ended or error
        with self._closing:
            if self._fds:
                self._ring(self._fds[0])

    def _close(self, closed_word: int) -> bool:
        """End it, tell the peer, and give everything back; False when that was done before."""
        if os.getpid() != self._pid:
            return False
        self.end(ClosedError("the ring is closed", remedy="make a new one"))
        with self._turn:
            if self._map.closed:
                return False
            self._words[closed_word] = 1
            self._kick()
            self._words.release()
            self._map.close()
            with self._closing:
                self.close_in_child()
        return True

    def close_in_child(self) -> None:
        """Close this process's descriptors."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)
        self._sleeper.close()
