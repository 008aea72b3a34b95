"""Who takes a client's answers: the thread that waits for one, or, when nobody waits, a thread in the background.

Owns the turn to take. A thread that waits takes by itself, so that an answer costs no change of threads; those that
come meanwhile are told when it leaves. The background thread sees to callbacks, asyncio and those who only look: it
takes over when something is open and nobody has waited for a moment. It knows neither frames nor operations.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from devipc.deadline import bounded, start_thread
from devipc.errors import CompletionTimeout, DevIPCError, PeerGone
from devipc.hicache.wire.transport import Transport
from devipc.hicache.wire.waiting import Waiters, baton, park, wake
from devipc.turns import take_turn

__all__ = ["Pump"]

_LOOK_S = 2e-3  # how long nobody may have waited before the background takes over
_SLICE_S = 0.02  # how long to take before looking what other threads did
_TURN_S = 0.25  # how long the background takes before it looks whether there is anything to take
_LOOKS_BEFORE_SLEEP = 50
_log = logging.getLogger("devipc.hicache")


class Pump:
    """See the module. Any thread.

    Parameters
    ----------
    transport : Transport
        What is taken from; stays the caller's.
    deliver : callable
        Called with each frame, on whichever thread took it. A devipc error that it raises ends the pump.
    is_open : callable
        Returns True while an answer may come.
    on_end : callable
        Called once, with the reason, when nothing more can be taken.

    Raises
    ------
    ResourceExhausted
        When no thread is to be had.
    """

    def __init__(
        self,
        transport: Transport,
        deliver: Callable[[bytes], None],
        *,
        is_open: Callable[[], bool],
        on_end: Callable[[DevIPCError], None],
    ) -> None:
        self._transport = transport
        self._take = transport.take
        self._deliver = deliver
        self._is_open = is_open
        self._on_end = on_end
        self._turn = threading.Lock()
        self._queue: deque[threading.Lock] = deque()  # those who would take, but for another that does
        self._delivered = self._drives = 0
        self._ended = False
        self._called = threading.Event()
        self._asleep = False
        self._thread = threading.Thread(target=self._background, name="devipc-hicache-answers", daemon=True)
        start_thread(self._thread, "take answers")

    # --- for those who wait ------------------------------------------------------------------------------------------

    def wait(self, done: Callable[[], bool], waiters: Waiters, deadline: float) -> bool:
        """Take answers until ``done``, or sleep while another thread takes; False at the deadline.

        Parameters
        ----------
        done : callable
            True when what is waited for has happened.
        waiters : list
            Of the operation; whoever changes it wakes them.
        deadline : float
            Monotonic seconds.
        """
        while not done():
            if time.monotonic() >= deadline:
                return done()
            if self._ended:
                return park(done, waiters, deadline)
            mine: list[bool] = []
            try:
                if take_turn(self._turn, mine):
                    self._drives += 1
                    self._drive(done, deadline)
            finally:
                if mine and mine[0]:
                    self._turn.release()
                    self._hand_on()
            if not mine[0]:
                self._stand_by(done, waiters, deadline)
        return True

    def _stand_by(self, done: Callable[[], bool], waiters: Waiters, deadline: float) -> None:
        """Sleep until this thread may take, the operation has changed, or the deadline has passed."""
        mine = baton()
        try:
            waiters.append(mine)
            self._queue.append(mine)
            # Again, now that whoever leaves sees this thread.
            if self._turn.locked() and not self._ended and not done():
                mine.acquire(timeout=bounded(deadline - time.monotonic()))
        finally:
            with contextlib.suppress(ValueError):
                waiters.remove(mine)
            with contextlib.suppress(ValueError):
                self._queue.remove(mine)
            if done():  # perhaps it was woken to take, and does not
                self._hand_on()

    def _hand_on(self) -> None:
        """Wake one of those who would take, when nobody does."""
        if self._queue and not self._turn.locked():
            with contextlib.suppress(IndexError, RuntimeError):
                self._queue.popleft().release()

    def _drive(self, done: Callable[[], bool], deadline: float, *, spin: bool = True) -> None:
        """Take, with the turn, until ``done`` or the deadline."""
        try:
            while not done():
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                try:
                    frame = self._take(timeout_s=min(left, _SLICE_S), spin=spin)
                except CompletionTimeout:  # another thread may have changed what is waited for
                    continue
                self._deliver(frame)
                self._delivered += 1
        except DevIPCError as error:
            self._finish(error)
        except BaseException:
            # An interrupt between two instructions: an answer that was taken, and not delivered, is missed for ever.
            if self._transport.taken != self._delivered:
                self._finish(PeerGone("an answer was lost to an interrupt", code="interrupted", retryable=True))
            raise

    def submitted(self) -> None:
        """Note that something is open now: the background begins to look again."""
        if self._asleep:
            self._called.set()

    def attend(self) -> None:
        """Note that somebody wants to be called: the background takes at once, unless another thread does."""
        self._called.set()

    # --- the background ----------------------------------------------------------------------------------------------

    def _background(self) -> None:
        while not self._ended:
            self._rest()
            mine: list[bool] = []
            try:
                taken = take_turn(self._turn, mine)
                while taken and self._is_open() and not self._gives_way():
                    # Whoever computes meanwhile has more use for the interpreter than this thread for 50 us.
                    self._drive(self._gives_way, time.monotonic() + _TURN_S, spin=False)
            except BaseException:
                _log.exception("a defect of the cache client, which ends its connection")
                self._finish(DevIPCError("a defect while answers were taken", code="defect", remedy="report it"))
            finally:
                if mine and mine[0]:
                    self._turn.release()
                    self._hand_on()

    def _gives_way(self) -> bool:
        return self._ended or bool(self._queue)

    def _rest(self) -> None:
        """Return when the background should take: it was called, or something is open and nobody waits."""
        drives, idle = -1, 0
        while not self._ended and not self._called.wait(_LOOK_S):
            if self._is_open():
                if drives == self._drives and not self._turn.locked():
                    return
                drives, idle = self._drives, 0
                continue
            idle += 1
            if idle > _LOOKS_BEFORE_SLEEP:
                self._asleep = True
                if not self._is_open():  # again: whoever submitted just now did not see it asleep
                    self._called.wait()
                self._asleep = False
                idle = 0
        self._called.clear()

    # --- the end -----------------------------------------------------------------------------------------------------

    def _finish(self, error: DevIPCError) -> None:
        if self._ended:
            return
        self._ended = True
        self._transport.end(error)
        self._called.set()
        self._on_end(error)
        wake(self._queue)

    def end(self, error: DevIPCError) -> None:
        """Take nothing more: whoever takes now is told ``error`` by the transport, and leaves. Never blocks."""
        self._ended = True
        self._transport.end(error)
        self._called.set()
        wake(self._queue)

    def join(self, timeout_s: float) -> None:
        """Wait for the background to end, after :meth:`end`; not on that thread itself."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
