"""Strategy ``polling``: the producer looks at its own markers and publishes how far they are.

Owns the markers of one fence and the thread that looks at them, one for each device and process. Needs nothing of a
device but markers, so it exists wherever streams do.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque

from devipc.absence import need_transfer
from devipc.completion.half import WordProducer, give_back
from devipc.completion.page import FencePage
from devipc.completion.ticker import IDLE, ticker
from devipc.errors import ClosedError, DevIPCError
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import Marker, Stream
from devipc.types import PoisonReason

__all__ = ["KICKED_PAUSE_S", "PollingProducer"]

KICKED_PAUSE_S = 5e-3
"""Longest sleep of a waiter that is kicked when something happens, and only looks again for safety."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 0.5e-3
_MAX_PENDING = 256


class PollingProducer(WordProducer):
    """Signals by recording a local marker; a thread stores the number when the marker is done."""

    slots = _MAX_PENDING
    pause_s = KICKED_PAUSE_S

    def __init__(self, device: Device, page: FencePage) -> None:
        self._page = page
        self._transfer = need_transfer(device)
        self._ticker = ticker(f"devipc-poll-{device.info.uuid}")
        self._lock = threading.Lock()
        self._pending: deque[tuple[int, Marker]] = deque()
        self._unused: list[Marker] = []
        self._pause_s = _FIRST_PAUSE_S
        self._closed = False
        try:
            self._ticker.wake(self._tick)  # now: a signal whose marker is recorded must not fail for want of a thread
        except BaseException:
            self._ticker.remove(self._tick)
            raise

    def room(self) -> bool:
        """Return True when another marker may be pending."""
        return len(self._pending) < _MAX_PENDING

    def signal(self, stream: Stream, n: int) -> None:
        """Record a marker and let the thread look at it."""
        with self._lock:
            marker = self._unused.pop() if self._unused else self._transfer.create_marker()
            try:
                self._transfer.record(marker, stream)
            except BaseException:
                self._unused.append(marker)
                raise
            self._pending.append((n, marker))
            self._pause_s = _FIRST_PAUSE_S
        self._ticker.wake(self._tick)

    def look(self) -> int:
        """Look at the markers now, and load the word."""
        self._advance()
        return self._page.value

    def drained(self) -> bool:
        """Return True when all markers are done, or cannot be asked any more."""
        try:
            self._advance()
        except DevIPCError:
            return True
        return not self._pending

    def close(self) -> None:
        """Give the markers back and stop looking."""
        with self._lock:
            self._closed = True
            markers = [*self._unused, *(marker for _, marker in self._pending)]
            self._unused.clear()
            self._pending.clear()
        self._ticker.remove(self._tick)
        for marker in markers:
            give_back(self._transfer.destroy_marker, marker)

    def _advance(self) -> None:
        reached = 0
        with self._lock:
            while self._pending and self._transfer.query_marker(self._pending[0][1]):
                reached = self._pending[0][0]
                if self._page.status is None:
                    self._page.value = reached  # first: behind an interrupt nobody would look at it again
                self._unused.append(self._pending.popleft()[1])
        if reached:
            self._page.kick()

    def _tick(self) -> float | None:
        try:
            self._advance()
        except DevIPCError:  # device or fence are lost or closed; whatever it is, nobody else would tell the consumers
            with contextlib.suppress(ClosedError):
                self._page.poison(PoisonReason.DEVICE_LOST)
            return None
        if self._closed:
            return None
        if not self._pending:
            return IDLE
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return self._pause_s
