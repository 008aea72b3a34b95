"""What a strategy has to supply: a producer's half and a consumer's half of a fence.

Owns the two protocols and what several strategies need to fulfil them: knowing when the own device work on a page has
drained, and a consumer that only looks at the page. It knows no strategy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from devipc.completion.page import FencePage
from devipc.errors import ClosedError, DeviceLostError, DevIPCError, DriverError, UsageError
from devipc.interfaces.transfer import DeviceTransfer, HostRegistration, Marker, Stream

__all__ = [
    "WORD_PAUSE_S",
    "ConsumerHalf",
    "Drain",
    "Half",
    "LookingConsumer",
    "ProducerHalf",
    "WordProducer",
    "give_back",
    "unregister",
]

WORD_PAUSE_S = 0.5e-3
"""Longest sleep between two looks at a word that a device stores: devices wake nobody."""

_T = TypeVar("_T")
_log = logging.getLogger("devipc.completion")


class Half(Protocol):
    """Common to both halves. ``look`` and ``drained`` may be called from any thread at any time until ``close``."""

    @property
    def pause_s(self) -> float:
        """Longest sleep between two looks of a host waiter."""
        ...

    def look(self) -> int:
        """Return the page's value as this side knows it after looking now; poison values pass through."""
        ...

    def drained(self) -> bool:
        """Return True when no device work of this process can touch the page any more."""
        ...

    def close(self) -> None:
        """Give all primitives back. Called once, after :meth:`drained` was true, before the page is unmapped."""
        ...


class ProducerHalf(Half, Protocol):
    """How a value gets from a stream to the page. ``room`` and ``signal`` are called by one thread at a time."""

    @property
    def slots(self) -> int:
        """Signals that can be pending at a time; 0 for any number."""
        ...

    @property
    def refuses_capture(self) -> bool:
        """True where :meth:`signal` refuses a capturing stream by its primitive's contract: nobody asks before."""
        ...

    @property
    def payloads(self) -> tuple[bytes, ...]:
        """Vendor bytes that a consumer needs besides the page."""
        ...

    def room(self) -> bool:
        """Return True when :meth:`signal` would not overwrite what somebody still needs."""
        ...

    def signal(self, stream: Stream, n: int) -> None:
        """Enqueue whatever lets consumers learn that ``stream`` came this far."""
        ...

    def start(self) -> tuple[int, int]:
        """Return for a new consumer: how many signals it need not look at, and the value of the last of them."""
        ...

    def released(self) -> bool:
        """Return True when no consumer holds a primitive of this half."""
        ...


class ConsumerHalf(Half, Protocol):
    """How a consumer learns what the value is."""

    def wait(self, stream: Stream, n: int) -> None:
        """Enqueue a device wait; only where the strategy waits on the device."""
        ...


class WordProducer:
    """What all producers share whose value arrives in the page: their consumers look at the word alone."""

    payloads: tuple[bytes, ...] = ()
    refuses_capture = False

    def start(self) -> tuple[int, int]:
        """There are no signals to be told apart."""
        return 0, 0

    def released(self) -> bool:
        """Consumers hold nothing but the page."""
        return True


class LookingConsumer:
    """The consumer of every strategy that brings the value to the page: it loads the word."""

    def __init__(self, page: FencePage, *, pause_s: float) -> None:
        self._page = page
        self.pause_s = pause_s

    def look(self) -> int:
        """Load the word."""
        return self._page.value

    def drained(self) -> bool:
        """Nothing of this side is ever on a device."""
        return True

    def wait(self, stream: Stream, n: int) -> None:
        """Refuse: there is no device wait here."""
        raise UsageError("this strategy has no device wait", remedy="use Fence.wait, which blocks the host instead")

    def close(self) -> None:
        """Nothing to give back."""


class Drain:
    """Markers behind the last operation that this process put on each stream, to know when all of them are over.

    Not by the fence's own word: a poison lets the word look reached while a store or a wait is still queued.
    """

    __slots__ = ("_lock", "_markers", "_spare", "_transfer", "_unmarked")

    def __init__(self, transfer: DeviceTransfer) -> None:
        self._transfer = transfer
        self._lock = threading.Lock()  # of what is recorded
        self._markers: dict[int, Marker] = {}
        self._spare: list[Marker] = []  # apart: a marker that was never recorded is never done
        self._unmarked: dict[int, Stream] = {}  # whose marker is not behind the last operation

    def enqueue(self, stream: Stream, call: Callable[[], None]) -> None:
        """Put something on ``stream`` that touches the page, by ``call``, and remember that until it is done.

        Behind an error or an interrupt, too: the stream may have it all the same, unless the caller broke a rule.
        """
        self.prepare(stream)
        known = stream.handle in self._unmarked
        self._unmarked[stream.handle] = stream
        try:
            call()
        except UsageError:
            if not known:
                self._unmarked.pop(stream.handle, None)
            raise
        except BaseException:
            self._unmarked[stream.handle] = stream  # again: whoever asked meanwhile may have marked what was before
            raise
        self.mark(stream)

    def prepare(self, stream: Stream) -> None:
        """Make what :meth:`mark` needs, before anything is enqueued that could then not be marked."""
        if stream.handle not in self._markers and not self._spare:
            self._spare.append(self._transfer.create_marker())

    def mark(self, stream: Stream) -> None:
        """Remember that the page is in use until everything on ``stream`` so far is done, also when this raises."""
        with self._lock:
            self._unmarked[stream.handle] = stream
            self._record(stream)

    def _record(self, stream: Stream) -> None:
        self.prepare(stream)
        if stream.handle not in self._markers:
            self._markers[stream.handle] = self._spare.pop()
        self._transfer.record(self._markers[stream.handle], stream)
        self._unmarked.pop(stream.handle, None)

    def _all_marked(self) -> bool:
        """Mark what could not be before; False while it still cannot."""
        with self._lock:
            for stream in list(self._unmarked.values()):
                try:
                    if self._transfer.is_capturing(stream):
                        return False
                    self._record(stream)
                except DeviceLostError:
                    raise
                except UsageError:  # destroyed meanwhile, which waited for its work
                    self._unmarked.pop(stream.handle, None)
                except DevIPCError as error:
                    _log.debug("a stream cannot be marked now: %s", error)
                    return False
        return True

    def done(self) -> bool:
        """Return True when all of it is over. A device that is lost or closed has nothing pending."""
        try:
            if self._unmarked and not self._all_marked():
                return False
            return all(self._transfer.query_marker(marker) for marker in list(self._markers.values()))
        except (DriverError, ClosedError) as error:
            _log.warning("a marker cannot be asked any more, its work counts as ended: %s", error)
            return True
        except DevIPCError as error:  # no proof of anything: what the device may still reach is kept
            _log.debug("a marker cannot be asked now: %s", error)
            return False

    def close(self) -> None:
        """Give the markers back."""
        markers = [*self._markers.values(), *self._spare]
        self._markers.clear()
        self._spare.clear()
        for marker in markers:
            give_back(self._transfer.destroy_marker, marker)


def give_back(action: Callable[[_T], None], thing: _T) -> None:
    """Run one step of a clean-up that goes on when a step fails; the failure is logged."""
    try:
        action(thing)
    except DevIPCError as error:
        _log.warning("while a fence was closed: %s", error)


def unregister(transfer: DeviceTransfer, registration: HostRegistration) -> None:
    """Undo the registration of a page whose device work has drained."""
    give_back(transfer.unregister_host, registration)
