"""A client's timeline of one direction: values for each job, and the signals that they are reached by.

Owns the order of values, and that a client which does not keep up delays nobody. It knows no page.
"""

from __future__ import annotations

import contextlib
import logging

from devipc.completion import Fence
from devipc.errors import ClosedError, DeviceLostError, DevIPCError, DriverError, ResourceExhausted
from devipc.hicache.wire.slots import Slots
from devipc.interfaces.transfer import Stream
from devipc.types import PoisonReason

__all__ = ["JobFence", "Timeline"]

_log = logging.getLogger("devipc.hicache")


class Timeline:
    """One fence of the session with a client. Used by one lane's thread.

    A signal that finds no room, because the client looks at nothing, is made up for by a later one: values are reached
    in order, so the last says what those before would have.
    """

    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        self._next = 1
        self._owed = 0
        self._dead = False

    def reserve(self, count: int) -> int:
        """Return the first of ``count`` values for a job."""
        base = self._next
        self._next += count
        return base

    def signal(self, stream: Stream, n: int) -> None:
        """Let ``n`` be reached once all work on ``stream`` so far is done, or a later value. Raises DeviceLostError."""
        if self._dead:
            return
        try:
            self._fence.signal(stream, n, timeout_s=0.0)
            self._owed = 0
        except DeviceLostError:
            raise
        except (ResourceExhausted, DriverError) as error:
            if not self._owed:
                _log.debug("value %d is not signalled yet: %s", n, error)
            self._owed = n
        except DevIPCError as error:  # poisoned or closed: who follows it has heard
            _log.debug("value %d is not signalled: %s", n, error)
            self.forget()

    def owe(self, n: int) -> None:
        """Leave the signal of ``n`` to the next :meth:`catch_up`, which follows at once."""
        if not self._dead:
            self._owed = n

    def catch_up(self, stream: Stream) -> bool:
        """Signal what is owed, if there is room now; return True when nothing is."""
        if self._owed:
            self.signal(stream, self._owed)
        return not self._owed

    def forget(self) -> None:
        """The client is leaving: nothing more is owed."""
        self._dead, self._owed = True, 0


class JobFence:
    """What a job's copies signal. Fulfils :class:`~devipc.hicache.requests.SignalledFence`.

    Parameters
    ----------
    timeline : Timeline
        The client's.
    count : int
        Layer groups.
    slots, slot : Slots and int
        Where the client learns of the first value.
    op : int
        The operation that the slot must be of.
    later : bool
        Signals are left to the timeline's next :meth:`Timeline.catch_up`: whoever waits for the end of the copies hears
        of that sooner.
    """

    def __init__(
        self, timeline: Timeline, count: int, slots: Slots, slot: int, op: int, *, later: bool = False
    ) -> None:
        self._timeline = timeline
        self._later = later
        self._base = timeline.reserve(count)
        self._last = self._base + count - 1
        self._signalled = 0
        self._slots, self._slot, self._op = slots, slot, op

    def signal(self, stream: Stream, n: int) -> None:
        """See :class:`~devipc.hicache.requests.SignalledFence`."""
        first = not self._signalled  # it may stand for several layer groups
        self._signalled = self._base + n - 1
        self._send(stream, self._signalled)
        if first:
            self._tell()

    def finish(self, stream: Stream) -> None:
        """Signal what a job that broke off has not: nobody waits for ever, and the slot's end says what is wrong."""
        if self._signalled < self._last:
            self._send(stream, self._last)
            if not self._signalled:
                self._tell()

    def _send(self, stream: Stream, n: int) -> None:
        if self._later:
            self._timeline.owe(n)
        else:
            self._timeline.signal(stream, n)

    def _tell(self) -> None:
        with contextlib.suppress(ClosedError):
            if self._slots.op(self._slot) == self._op:
                self._slots.submit(self._slot, self._base)

    def settle(self) -> None:
        """See :class:`~devipc.hicache.requests.SignalledFence`: the supervisor's."""

    def poison(self, reason: PoisonReason) -> None:
        """See :class:`~devipc.hicache.requests.SignalledFence`: the supervisor's."""
