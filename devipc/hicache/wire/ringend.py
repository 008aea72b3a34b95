"""One end of a ring: how it sleeps, wakes the other, and how it ends.

Owns the rule that no sleep is longer than the interval of a re-check, and that no memory is unmapped under a call. It
does not know what a slot is.
"""

from __future__ import annotations

import contextlib
import copy
import os
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NoReturn

from devipc.channel.datagram import no_descriptors
from devipc.channel.identity import close_in_child
from devipc.deadline import remaining
from devipc.errors import ClosedError, CompletionTimeout, DevIPCError, ForkError, HandleError, ProtocolError
from devipc.memfd import SharedMap
from devipc.turns import take_turn

__all__ = ["RECHECK_S", "RingEnd", "adopt_bell", "make_bells"]

RECHECK_S = 0.05
"""A sleeper looks at the memory at least this often, whether somebody kicked or not."""

_KICKS = 4096
_AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_ANNOUNCED_S = 0.4e-3


class RingEnd(ABC):
    """What both ends have. Any thread, one call at a time.

    Parameters
    ----------
    ring : SharedMap
        The memory; owned once this has returned.
    bell : socket.socket
        This end of the pair by which both wake each other; owned once this has returned.
    fds : sequence of int
        Whatever else is to be closed; owned once this has returned.
    my_nap, their_nap : int
        Words that say who sleeps.
    """

    def __init__(
        self, ring: SharedMap, bell: socket.socket, fds: Sequence[int], *, my_nap: int, their_nap: int
    ) -> None:
        self._map = ring
        self._words = ring.view.cast("Q")
        self._bytes = ring.view
        self._bell, self._fds = bell, list(fds)
        self._my_nap, self._their_nap = my_nap, their_nap
        self._naps = self._kicked = 0
        self._ended: DevIPCError | None = None
        self._pid = os.getpid()
        self._turn = threading.Lock()
        self._barrier = threading.Lock()
        self._closing = threading.Lock()  # of the descriptors, which end() may use at any time
        # Edge-triggered: what a peer leaves in the bell, or its end, wakes nobody twice.
        try:
            self._sleeper = select.epoll()
        except OSError as error:
            raise no_descriptors("epoll_create", error) from error
        self._sleeper.register(bell, select.EPOLLIN | select.EPOLLET)
        close_in_child(self)

    # --- sleeping and waking -----------------------------------------------------------------------------------------

    def _fence(self) -> None:
        # An atomic instruction: no later load passes an earlier store. No two calls: an interrupt between them would
        # leave it locked for ever.
        with self._barrier:
            pass

    def _kick(self) -> None:
        """Wake the other side if it sleeps; once for each of its sleeps."""
        self._fence()
        nap = self._words[self._their_nap]
        if nap and nap != self._kicked:
            self._kicked = nap
            self._ring()

    def announce(self) -> None:
        """Wake the other side if it sleeps: what it sleeps for is about to come, and it looks for that a moment.

        Never blocks, raises nothing, and need not be kept to. Waking takes as long as what comes first.
        """
        mine: list[bool] = []
        try:
            if take_turn(self._turn, mine) and self._ended is None:
                self._kick()
        finally:
            if mine and mine[0]:
                self._turn.release()

    def _ring(self) -> None:
        # Each call says that it does not wait: the flag of an eventfd would be the peer's to change, and whoever
        # answers has others to look after.
        with contextlib.suppress(OSError):  # full of kicks already, or the peer is gone
            self._bell.send(b"\0", _AT_ONCE)

    def _sleep(self, deadline: float) -> bool:
        """Sleep until kicked, at most until it is time to look again; False when the deadline has passed."""
        left = remaining(deadline)
        if not left:
            return False
        self._naps += 1
        self._words[self._my_nap] = self._naps
        self._fence()
        if not self._awaited() and self._ended is None and self._sleeper.poll(min(left, RECHECK_S), 1):
            with contextlib.suppress(OSError):
                self._bell.recv(_KICKS, socket.MSG_DONTWAIT)
            self._words[self._my_nap] = 0
            self._expect(time.monotonic() + _ANNOUNCED_S)
        self._words[self._my_nap] = 0
        return True

    def _expect(self, until: float) -> None:
        """Look for what was announced: sleeping once more would cost another wake-up."""
        while not self._awaited() and self._ended is None and time.monotonic() < until:
            os.sched_yield()

    @abstractmethod
    def _awaited(self) -> bool:
        """Return True when what this side sleeps for may be there."""

    # --- the end -----------------------------------------------------------------------------------------------------

    def _enter(self, deadline: float, mine: list[bool]) -> None:
        """Begin a call, which releases ``self._turn`` when ``mine`` says so; see :func:`take_turn`.

        No context manager: it would cost a fifth of the call.
        """
        if os.getpid() != self._pid:
            raise ForkError("this ring belongs to the process that forked")
        if not take_turn(self._turn, mine) and not take_turn(self._turn, mine, remaining(deadline)):
            raise CompletionTimeout("another thread uses this end of the ring")
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
        with self._closing, contextlib.suppress(OSError):
            self._bell.shutdown(socket.SHUT_RD)  # who sleeps here is woken by that

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
        self._bell.close()
        self._sleeper.close()


def adopt_bell(fd: int) -> socket.socket:
    """Return the bell that a received descriptor is; owned, also when this raises."""
    bell: socket.socket | None = None
    try:
        bell = socket.socket(fileno=fd)
        bell.settimeout(None)  # whatever the default of this process is
        kind = (bell.family, bell.type)
    except OSError:
        kind = None
    if bell is not None and kind == (socket.AF_UNIX, socket.SOCK_STREAM):
        return bell
    if bell is not None:
        bell.close()
    else:
        os.close(fd)
    raise HandleError("a descriptor of a ring wakes nobody: it is no stream socket of this machine", code="bell")


def make_bells() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a bell."""
    try:
        bells = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise no_descriptors("socketpair", error) from error
    for bell in bells:
        bell.settimeout(None)
    return bells
