"""DeviceTransfer on worker threads: streams, copies, host registration and markers.

Owns the stream objects and what may be done with them. The host device reads any memory of the process, so
registration is the identity, but for pages that are entered beforehand; it is checked all the same, because callers
are tested here. Nothing is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from devipc.host.copies import (
    Rect,
    column_of,
    rects_of,
    run_batch,
    run_rects,
    run_table,
    spans_of,
    table_of,
    words_of,
)
from devipc.host.driver import HostDriver, Queue, whole
from devipc.host.maps import map_now, move, view_at, writable_until
from devipc.host.meminfo import memory_info
from devipc.host.ranges import Range, Rows, next_identity
from devipc.spi import (
    PAGE_NBYTES,
    ClosedError,
    HostRegistration,
    Marker,
    MemoryInfo,
    MemoryKind,
    Stream,
    UsageError,
    undo,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    U64Array = npt.NDArray[np.uint64]

__all__ = ["HostMarker", "HostStream", "HostTransfer", "queue_of"]

_BRIEF_NBYTES, _BRIEF_COPIES = 256 << 10, 64
"""What is copied sooner than a thread is woken for it."""


class HostStream:
    """A stream of the host device, made here or borrowed. Fulfils :class:`devipc.spi.Stream`.

    :meth:`stall`, :meth:`resume`, :meth:`call` and the capture calls exist for tests only: the reference backend's way
    to hold back work, to watch it and to make it fail.
    """

    __slots__ = ("_driver", "_queue", "borrowed", "closed")

    def __init__(self, driver: HostDriver, queue: Queue, *, borrowed: bool) -> None:
        self._driver = driver
        self._queue = queue
        self.borrowed = borrowed
        self.closed = False

    @property
    def handle(self) -> int:
        """Number of the stream in this process; 0 is the default stream."""
        return self._queue.handle

    @property
    def priority(self) -> int:
        """As asked for. The threads of this backend share the processor as equals."""
        return self._queue.priority

    def stall(self) -> None:
        """Start no further work until :meth:`resume`. Work that runs already goes on."""
        queue_of(self._driver, self).stall()

    def resume(self) -> None:
        """Go on after :meth:`stall`."""
        queue_of(self._driver, self).resume()

    def call(self, function: Callable[[], object]) -> None:
        """Enqueue a Python call. What it raises loses the device, as a fault of a kernel does."""

        def run() -> None:
            function()

        self._driver.enter("host_call")
        queue_of(self._driver, self).submit(run)

    def begin_capture(self) -> None:
        """Refuse all work from now on, as a stream that records a graph refuses work that cannot be recorded."""
        queue_of(self._driver, self).capturing = True

    def end_capture(self) -> None:
        """Take work again."""
        queue_of(self._driver, self).capturing = False


class HostMarker:
    """A point in a stream. Fulfils :class:`devipc.spi.Marker`."""

    __slots__ = ("closed", "driver", "point")

    def __init__(self, driver: HostDriver) -> None:
        self.driver = driver
        self.point: tuple[Queue, int] | None = None
        self.closed = False


def queue_of(driver: HostDriver, stream: object) -> Queue:
    """Return the queue behind ``stream``; raise UsageError for anybody else's, ClosedError for a destroyed one."""
    if not isinstance(stream, HostStream) or stream._driver is not driver:
        raise UsageError(
            f"this {type(stream).__name__} is no stream of this device", remedy="use create_stream or wrap_stream"
        )
    driver.check(giving_back=True)
    if stream.closed:
        raise ClosedError("the stream is destroyed", remedy="make a new stream")
    return stream._queue


def _rows(rects: Sequence[Rect] | None, pitch: int) -> Callable[[int], Rows] | None:
    """Return what tells the rows of a copy, whose pitch is in the column ``pitch``."""
    if rects is None:
        return None
    return lambda index: (int(rects[index][pitch]), int(rects[index][4]), int(rects[index][5]))


class HostTransfer:
    """Streams and copies of the host device. Fulfils :class:`devipc.spi.DeviceTransfer`."""

    def __init__(self, driver: HostDriver) -> None:
        self._driver = driver

    def create_stream(self, *, priority: int = 0) -> HostStream:
        """Make a stream; its thread starts with its first work."""
        number = whole("priority", priority, low=-(2**31), high=2**31)
        self._driver.enter("host_create_stream")
        return HostStream(self._driver, self._driver.create_queue(priority=number), borrowed=False)

    def wrap_stream(self, handle: object) -> HostStream:
        """Borrow a stream of this device: its handle (0: the default stream), or an object with such a ``handle``."""
        number = whole("handle", getattr(handle, "handle", handle))
        self._driver.enter("host_wrap_stream")
        queue = self._driver.create_queue(handle=0) if number == 0 else self._driver.find_queue(number)
        if queue is None:
            raise UsageError(f"this device has no stream {number}", remedy="pass the handle of a live stream")
        return HostStream(self._driver, queue, borrowed=True)

    def destroy_stream(self, stream: Stream) -> None:
        """Destroy a stream after its work; refuses one that is stalled with work queued, which would never return."""
        self._driver.enter("host_destroy_stream", giving_back=True)
        queue = queue_of(self._driver, stream)
        assert isinstance(stream, HostStream)
        if not stream.borrowed:
            self._driver.destroy_queue(queue)
        stream.closed = True

    def synchronize_stream(self, stream: Stream) -> None:
        """Block until all work submitted so far is done, the device is lost, or it is closed."""
        self._driver.enter("host_synchronize_stream")
        queue_of(self._driver, stream).synchronize()

    def is_capturing(self, stream: Stream) -> bool:
        """Return True between ``begin_capture`` and ``end_capture``."""
        self._driver.check()
        return queue_of(self._driver, stream).capturing

    def copy(self, stream: Stream, dst: int, src: int, nbytes: int) -> None:
        """Copy ``nbytes``; both ranges must lie inside live memory of this device."""
        queue = queue_of(self._driver, stream)
        dst, src, nbytes = whole("dst", dst), whole("src", src), whole("nbytes", nbytes)
        self._driver.enter("host_copy")
        if nbytes:
            ranges = self._driver.ranges
            target = ranges.hold(dst, nbytes, what="dst")
            try:
                source = ranges.hold(src, nbytes, what="src")
            except BaseException:
                undo(ranges.drop, (target,))
                raise
            queue.submit(lambda: move(dst, src, nbytes), (target, source), brief=nbytes <= _BRIEF_NBYTES)

    def copy_batch(self, stream: Stream, dst: U64Array, src: U64Array, nbytes: U64Array) -> None:
        """Copy ``n`` ranges, checked before the first is enqueued."""
        queue = queue_of(self._driver, stream)
        dsts, srcs, sizes = column_of(dst, name="dst"), column_of(src, name="src"), column_of(nbytes, name="nbytes")
        if not len(dsts) == len(srcs) == len(sizes):
            raise UsageError(f"{len(dsts)} dst, {len(srcs)} src, {len(sizes)} nbytes", remedy="pass equal lengths")
        self._driver.enter("host_copy_batch")
        held = self._hold(dsts, srcs, sizes, sizes)
        if held:
            brief = len(sizes) <= _BRIEF_COPIES and sum(sizes) <= _BRIEF_NBYTES
            queue.submit(lambda: run_batch(zip(dsts, srcs, sizes, strict=True)), held, brief=brief)

    def copy_strided(self, stream: Stream, copies: U64Array) -> None:
        """Do ``n`` two-dimensional copies, checked before the first is enqueued."""
        queue = queue_of(self._driver, stream)
        words = words_of(copies, name="copies", width=6)
        if (many := table_of(words)) is not None:
            table, dst_reach, src_reach = many
            self._driver.enter("host_copy_strided")
            together = self._hold(table[:, 0], table[:, 1], dst_reach, src_reach, table)
            queue.submit(lambda: run_table(table, together), together)
            return
        rects = rects_of(words)
        dst_spans, src_spans = spans_of(rects)
        self._driver.enter("host_copy_strided")
        held = self._hold([rect[0] for rect in rects], [rect[1] for rect in rects], dst_spans, src_spans, rects)
        if held:
            brief = len(rects) <= _BRIEF_COPIES and sum(rect[4] * rect[5] for rect in rects) <= _BRIEF_NBYTES
            queue.submit(lambda: run_rects(rects), held, brief=brief)

    def _hold(
        self,
        dst: Sequence[int],
        src: Sequence[int],
        dst_nbytes: Sequence[int],
        src_nbytes: Sequence[int],
        rects: Sequence[Rect] | None = None,
    ) -> tuple[Range, ...]:
        ranges = self._driver.ranges
        held = ranges.hold_many(dst, dst_nbytes, what="dst", rows=_rows(rects, 2))
        try:
            held += ranges.hold_many(src, src_nbytes, what="src", rows=_rows(rects, 3))
        except BaseException:
            undo(ranges.drop, held)
            raise
        return tuple(held)

    def register_host(self, address: int, nbytes: int) -> HostRegistration:
        """Let device work reach ``[address, address + nbytes)`` at the same address.

        Raises
        ------
        UsageError
            When the address is not on a page, the memory is not mapped readable and writable, or any of it is
            registered, allocated or opened already.
        """
        start, length = whole("address", address), whole("nbytes", nbytes, low=1, high=2**47)
        if start % PAGE_NBYTES:
            raise UsageError(f"{start:#x} is not on a page of {PAGE_NBYTES} bytes", remedy="align the memory")
        self._driver.enter("host_register_host")
        if (end := writable_until(start)) < start + length:
            raise UsageError(
                f"[{start:#x}, {start + length:#x}) is readable and writable only up to {end:#x}",
                code="not_mapped",
                remedy="map the memory first, and keep it mapped until it is unregistered",
            )
        map_now(start, length)
        new = Range(start, start + length, MemoryKind.HOST, next_identity())
        new.owner = view_at(start, length - length % 8).cast("Q")
        self._driver.ranges.add(new)
        return HostRegistration(start, length, start, new)

    def unregister_host(self, registration: HostRegistration) -> None:
        """Undo it. Blocks while queued work uses the memory, because the caller unmaps it next."""
        self._driver.enter("host_unregister_host", giving_back=True)
        token = getattr(registration, "token", None)
        if not isinstance(token, Range) or token.kind is not MemoryKind.HOST:
            raise UsageError("this is no registration of the host backend", remedy="pass what register_host returned")
        if not self._driver.ranges.retire(token):
            raise ClosedError("the memory was unregistered already, or by another device", remedy="unregister once")
        self._driver.ranges.wait_until_idle(token, used=self._driver.uses)

    def create_marker(self) -> HostMarker:
        """Make a marker, which is not done before it was recorded and passed."""
        self._driver.enter("host_create_marker")
        return HostMarker(self._driver)

    def record(self, marker: Marker, stream: Stream) -> None:
        """Set the marker behind all work of ``stream`` so far."""
        ours = self._marker(marker)
        queue = queue_of(self._driver, stream)
        self._driver.enter("host_record_marker")
        ours.point = (queue, queue.mark())

    def query_marker(self, marker: Marker) -> bool:
        """Return True when the recorded point is passed."""
        ours = self._marker(marker)
        self._driver.enter("host_query_marker")
        point = ours.point
        return point is not None and point[0].completed >= point[1]

    def wait_marker(self, stream: Stream, marker: Marker) -> None:
        """Let later work of ``stream`` run after the point that is recorded now; recording again changes nothing.

        Raises
        ------
        UsageError
            For a marker that was never recorded: there is nothing that could end the wait.
        """
        ours = self._marker(marker)
        queue = queue_of(self._driver, stream)
        self._driver.enter("host_wait_marker")
        if ours.point is None:
            raise UsageError("a stream cannot wait for a marker that was never recorded", remedy="record it first")
        source, target = ours.point
        queue.submit(lambda: queue.wait_until(lambda: source.completed >= target))

    def destroy_marker(self, marker: Marker) -> None:
        """Give a marker back; waits that were enqueued on it stay valid."""
        self._driver.enter("host_destroy_marker", giving_back=True)
        self._marker(marker).closed = True

    def _marker(self, marker: object) -> HostMarker:
        if not isinstance(marker, HostMarker) or marker.driver is not self._driver:
            raise UsageError(f"this {type(marker).__name__} is no marker of this device", remedy="use create_marker")
        if marker.closed:
            raise ClosedError("the marker is destroyed", remedy="make a new marker")
        return marker

    def memory_info(self) -> MemoryInfo:
        """Return what the machine, or the process's control group where that is tighter, has free and in total."""
        self._driver.enter("host_memory_info")
        return memory_info()
