"""Strategy ``event``: a ring of K inter-process events, observed by consumers' host code and by nothing else.

Owns the ring: slot ``i mod K`` stands for the i-th signal and is recorded again only when every live consumer has seen
the one before. A device never waits for an imported event: such a wait could not be released when its maker dies. An
event that was never recorded is never asked, because vendors call it done.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from devipc.absence import need_events
from devipc.completion.half import give_back
from devipc.completion.page import MAX_CONSUMERS, RING_SLOTS, FencePage, LineState
from devipc.deadline import call_with_deadline
from devipc.errors import DevIPCError, UsageError
from devipc.interfaces.backend import Device
from devipc.interfaces.sync import InterprocessEvent, InterprocessEvents
from devipc.interfaces.transfer import Stream

__all__ = ["DEFAULT_RING", "EventConsumer", "EventProducer"]

DEFAULT_RING = 8
"""Events of one fence. They are a scarce resource of drivers, so this is no number to be generous with."""
OPEN_TIMEOUT_S = 10.0
_PAUSE_S = 0.5e-3
_LIVE = (LineState.GIVEN, LineState.OPEN)
_log = logging.getLogger("devipc.completion")
_kept: list[InterprocessEvent] = []


class _Ring:
    """Follows the ring in order: which signals are done, and the value of the last of them."""

    pause_s = _PAUSE_S

    def __init__(self, driver: InterprocessEvents, page: FencePage, events: list[InterprocessEvent]) -> None:
        self._driver = driver
        self._page = page
        self._events = events
        self._lock = threading.Lock()
        self._seen = 0
        self._reached = 0

    def _advance(self, recorded: int) -> bool:
        """Ask the events of signals seen .. recorded in order, with the lock held; True when any was newly done."""
        before = self._seen
        ring = len(self._events)
        while self._seen < recorded and self._driver.query(self._events[self._seen % ring]):
            self._reached = self._page.ring(self._seen % ring)
            self._seen += 1
        return self._seen > before

    def _destroy(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        for event in events:
            give_back(self._driver.destroy, event)


class EventProducer(_Ring):
    """Signals by recording the next event of the ring."""

    refuses_capture = False

    def __init__(self, device: Device, page: FencePage, *, ring: int = DEFAULT_RING) -> None:
        if not 1 <= ring <= RING_SLOTS:
            raise UsageError(f"a ring of {ring} events", remedy=f"use 1 to {RING_SLOTS}")
        super().__init__(need_events(device), page, [])
        self._count = 0
        try:
            for _ in range(ring):
                self._events.append(self._driver.create())
            self.payloads = tuple(self._driver.export(event) for event in self._events)
        except BaseException:
            self._destroy()
            raise
        self.slots = ring

    def room(self) -> bool:
        """Return True when everybody has seen the signal that the next slot holds."""
        needed = self._count - self.slots + 1
        if needed <= 0:
            return True
        self.look()
        return self._seen >= needed and all(self._page.ack(line) >= needed for line in self._live())

    def signal(self, stream: Stream, n: int) -> None:
        """Record the event, then publish which value it stands for."""
        slot = self._count % self.slots
        self._driver.record(self._events[slot], stream)
        self._page.set_ring(slot, n)
        self._count += 1
        self._page.count = self._count

    def look(self) -> int:
        """Ask the own events in order; publish the result for people who look at the page."""
        with self._lock:
            if self._events and self._advance(self._count) and self._page.status is None:
                self._page.value = self._reached
            return self._reached

    def start(self) -> tuple[int, int]:
        """A new consumer begins where the producer knows the ring to be done."""
        self.look()
        return self._seen, self._reached

    def drained(self) -> bool:
        """Return True when every recorded event is done, or cannot be asked any more."""
        try:
            self.look()
        except DevIPCError:
            return True
        return self._seen == self._count

    def released(self) -> bool:
        """Return True when no consumer can have an event open."""
        return not self._live()

    def close(self) -> None:
        """Destroy the events; those that a consumer may still have open are kept as long as this process."""
        if not self.released():
            _log.warning("a fence was closed before its consumers; its %d events stay in use", self.slots)
            _kept.extend(self._events)
            self._events = []
        self._destroy()

    def _live(self) -> list[int]:
        return [line for line in range(1, MAX_CONSUMERS + 1) if self._page.line_state(line) in _LIVE]


class EventConsumer(_Ring):
    """Asks imported events in order, and acknowledges them in its own line."""

    def __init__(self, device: Device, page: FencePage, *, line: int, payloads: Sequence[bytes]) -> None:
        driver = need_events(device)
        super().__init__(driver, page, [])
        self._line = line
        self._seen, self._reached = page.ack(line), page.start(line)
        self._acknowledged = self._seen
        self._slots = len(payloads)
        try:
            for payload in payloads:
                self._events.append(self._open(payload))
        except BaseException:
            self._destroy()
            raise

    def _open(self, payload: bytes) -> InterprocessEvent:
        """Open one event; some drivers are known to block for ever in that."""
        return call_with_deadline(
            lambda: self._driver.open(payload),
            timeout_s=OPEN_TIMEOUT_S,
            what="open an event",
            undo=lambda event: give_back(self._driver.destroy, event),
        )

    def look(self) -> int:
        """Ask the events that were recorded since, in order."""
        with self._lock:
            # A count that runs ahead of the ring can only be a lie; it must not make this loop long.
            recorded = min(self._page.count, self._seen + self._slots)
            try:
                if self._events and (self._advance(recorded) or self._acknowledged < self._seen):
                    self._page.set_ack(self._line, self._seen)
                    self._acknowledged = self._seen  # behind it: an interrupt comes between two calls
                    self._page.kick()
            except DevIPCError:  # the producer is gone or did not wait for us: the page says why
                if self._page.status is None:
                    raise
            return self._reached

    def drained(self) -> bool:
        """Nothing of this side is ever on a device."""
        return True

    def wait(self, stream: Stream, n: int) -> None:
        """Refuse: imported events are observed by the host only."""
        raise UsageError("this strategy has no device wait", remedy="use Fence.wait, which blocks the host instead")

    def close(self) -> None:
        """Close the imported events."""
        self._destroy()
