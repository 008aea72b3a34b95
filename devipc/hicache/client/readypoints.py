"""Ready points of a client whose engine is another process: values of shared fences, and points told by a word.

Owns the fences and markers that stand for the caller's streams, and the thread that looks at points which are no shared
fence. It knows neither the engine nor what waits for a point.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from weakref import WeakSet

from devipc.completion import ProducerFence
from devipc.deadline import start_thread
from devipc.errors import ClosedError, DevIPCError, UsageError
from devipc.hicache.handles import ready_failure
from devipc.hicache.moving.mover import MarkerPool
from devipc.hicache.requests import ReadyPoint
from devipc.hicache.wire.slots import Readiness, Slots
from devipc.interfaces.transfer import DeviceTransfer, Marker, Stream

__all__ = ["Forwarder", "MarkerPoint", "StreamPoint", "StreamPoints"]

_MAX_STREAMS = 64
_LOOK_S = 0.5e-3
_IDLE_S = 5.0


class StreamPoint:
    """All work of a stream so far. Fulfils :class:`~devipc.hicache.requests.ReadyPoint`.

    Parameters
    ----------
    owner : StreamPoints
        Whose fence it is a value of.
    stream : Stream
        The caller's.
    number, n : int
        Fence, and its value.
    fence : ProducerFence
        That fence.

    Attributes
    ----------
    used : int
        The largest value that was tried behind this one: what the driver refused may be reached all the same.
    """

    __slots__ = ("fence", "n", "number", "owner", "stream", "used")

    def __init__(self, owner: StreamPoints, stream: Stream, number: int, n: int, fence: ProducerFence) -> None:
        self.owner, self.stream = owner, stream
        self.number, self.n, self.used = number, n, n
        self.fence = fence

    def reached(self) -> bool:
        """See :class:`~devipc.hicache.requests.ReadyPoint`."""
        return self.owner.has_reached(self.fence) or self.fence.query(self.n)

    def over(self) -> bool:
        """Return True when it is reached, or never will be."""
        try:
            return self.reached()
        except DevIPCError:
            return True


class MarkerPoint:
    """All work of a stream so far, asked by this process. Fulfils :class:`~devipc.hicache.requests.ReadyPoint`."""

    _marker: Marker | None = None  # also of one whose making was interrupted

    def __init__(self, markers: MarkerPool, transfer: DeviceTransfer, stream: Stream) -> None:
        self._markers = markers
        self._transfer = transfer
        self._lock = threading.Lock()
        if self._transfer.is_capturing(stream):  # the marker would belong to the graph, and seem to be reached
            raise UsageError(
                "ready point on a capturing stream", code="capturing", remedy="make it behind the launch of the graph"
            )
        self._marker = markers.record(stream)

    def reached(self) -> bool:
        """See :class:`~devipc.hicache.requests.ReadyPoint`."""
        with self._lock:
            if self._marker is None:
                return True
            if not self._transfer.query_marker(self._marker):
                return False
            marker, self._marker = self._marker, None  # first: behind an interrupt it may be another point's
            self._markers.give_back(marker)
        return True

    def __del__(self) -> None:
        # Not reached, and nobody is left to ask: it may stand for something else from now on.
        if self._marker is not None:
            self._markers.give_back(self._marker)


class StreamPoints:
    """The ready fences of one attachment, one a stream. Any thread.

    Parameters
    ----------
    create : callable
        Makes a fence and shares it under a name.
    without : callable
        Makes a point that needs no fence.
    """

    def __init__(self, create: Callable[[str], ProducerFence], without: Callable[[Stream], MarkerPoint]) -> None:
        self._create, self._without = create, without
        self._lock = threading.Lock()
        self._by_stream: OrderedDict[int, StreamPoint] = OrderedDict()  # the last point of each
        self._reached = WeakSet[ProducerFence]()  # whole, and closed
        self._made = 0

    def has_reached(self, fence: ProducerFence) -> bool:
        """Return True for a fence that was forgotten when all of its points were reached."""
        return fence in self._reached

    def mark(self, stream: Stream) -> StreamPoint | MarkerPoint:
        """Return a point behind all work of ``stream`` so far. Does not wait for that work, nor for the engine.

        A fence holds few values that are not reached, or that the engine has not looked at; more points have a marker.

        Raises
        ------
        UsageError
            With code ``capturing`` on a capturing stream.
        DevIPCError
            What the stream, or the device, fails with.
        """
        with self._lock:
            last = self._by_stream.get(stream.handle)
            if last is None:
                self._make_room()
                self._made += 1
                fence = self._create(f"ready/{self._made}")
                last = StreamPoint(self, stream, self._made, 0, fence)
            last.used += 1  # never again, whatever comes of it: it would be reached before later work
            point = StreamPoint(self, stream, last.number, last.used, last.fence)
            try:
                last.fence.signal(stream, point.n, timeout_s=0.0)
            except DevIPCError as error:
                if not last.n:  # nobody knows it
                    last.fence.close(0.0)
                if error.code == "fence_ring":
                    return self._without(stream)
                if isinstance(error, UsageError) and not isinstance(error, ClosedError):
                    raise UsageError(error.message, code="capturing", remedy=error.remedy) from error
                raise
            self._by_stream[stream.handle] = point
            self._by_stream.move_to_end(stream.handle)
            return point

    def _make_room(self) -> None:
        """Forget streams that were not used for long: a caller may make and destroy any number of them.

        None of which a point is not reached: it would never be.
        """
        for handle, last in list(self._by_stream.items()):
            if len(self._by_stream) < _MAX_STREAMS:
                return
            if last.over():
                with contextlib.suppress(DevIPCError):
                    if last.reached():
                        self._reached.add(last.fence)
                del self._by_stream[handle]
                last.fence.close(0.0)  # whoever follows it keeps what was reached


class Forwarder:
    """Looks at ready points that are no shared fence, and writes the slot's word when one is reached. Any thread."""

    def __init__(self) -> None:
        self._markers: dict[DeviceTransfer, MarkerPool] = {}
        self._changed = threading.Condition()
        self._waiting: dict[tuple[Slots, int], tuple[ReadyPoint, Callable[[DevIPCError], None]]] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def point(self, transfer: DeviceTransfer, stream: Stream) -> MarkerPoint:
        """Return a point behind all work of ``stream`` so far, which :meth:`watch` can look at."""
        with self._changed:
            markers = self._markers.setdefault(transfer, MarkerPool(transfer))
        return MarkerPoint(markers, transfer, stream)

    def watch(self, slots: Slots, slot: int, point: ReadyPoint, failed: Callable[[DevIPCError], None]) -> None:
        """Look at ``point`` until it is reached, or :meth:`forget`; once at once, on this thread.

        ``failed`` is called with the reason when it never will be, before the word says so.

        Raises
        ------
        ResourceExhausted
            When no thread is to be had.
        """
        readiness = _ask(point, failed)
        if readiness is not Readiness.NOT_YET:
            slots.say_ready(slot, readiness)
            return
        with self._changed:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="devipc-hicache-ready", daemon=True)
                start_thread(thread, "look at ready points")
                self._thread = thread
            self._waiting[slots, slot] = point, failed
            self._changed.notify()

    def forget(self, slots: Slots, slot: int) -> None:
        """Look no more, before the slot becomes another operation's."""
        if self._waiting:
            with self._changed:
                self._waiting.pop((slots, slot), None)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting and not self._changed.wait_for(lambda: self._waiting or self._closed, _IDLE_S):
                    self._thread = None  # the next one starts another
                    return
                if self._closed:
                    return
                waiting = list(self._waiting.items())
            for key, entry in waiting:
                readiness = _ask(*entry, raised=BaseException)  # which would end the thread, and every point's watch
                with self._changed:
                    if readiness is not Readiness.NOT_YET and self._waiting.get(key) is entry:
                        with contextlib.suppress(DevIPCError):  # closed meanwhile
                            key[0].say_ready(key[1], readiness)
                        del self._waiting[key]  # last: who finds it gone gives the slot to another operation
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Look at nothing any more."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)
        for markers in self._markers.values():
            markers.close()


def _ask(
    point: ReadyPoint, failed: Callable[[DevIPCError], None], *, raised: type[BaseException] = Exception
) -> Readiness:
    try:
        return Readiness.REACHED if point.reached() else Readiness.NOT_YET
    except raised as error:  # poisoned, closed under us, or a caller's own trouble: it will never be reached
        failed(ready_failure(error))
        return Readiness.NEVER
