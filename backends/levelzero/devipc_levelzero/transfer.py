"""Streams, copies, host memory and markers of one device: copy engines only, no kernel is launched.

Owns the submission of copies, and the barrier behind each submission that makes a stream of a list. Knows nothing of
other processes.

Sources: regions count their sides and pitches in 32 bits, and a depth of 0 means two dimensions (Level Zero core
specification, ``ze_copy_region_t``). A list is not to be used by two threads at once, so each call holds its lock.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from devipc.spi import PIN_STEP_NBYTES, HostRegistration, Marker, MemoryInfo, Pins, Rectangle, Stream, UsageError
from devipc_levelzero import driver
from devipc_levelzero.abi import Region
from devipc_levelzero.context import Context, LevelZeroStream
from devipc_levelzero.events import Event, is_set
from devipc_levelzero.host_memory import ImportedPages
from devipc_levelzero.streams import native, wrap
from devipc_levelzero.sysman import Management

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    U64Array = npt.NDArray[np.uint64]

__all__ = ["LevelZeroMarker", "LevelZeroTransfer"]

_MOST = 2**32 - 1


class LevelZeroMarker:
    """The event of the last record, None before the first."""

    __slots__ = ("event", "live", "lock")

    def __init__(self) -> None:
        self.event: Event | None = None
        self.live = True
        self.lock = threading.Lock()


class LevelZeroTransfer:
    """Transfer by immediate command lists.

    Parameters
    ----------
    context : Context
        The device's context.
    management : Management
        Tells how much memory is free.
    pin_step_nbytes : int
        Host memory imported by one driver call.
    """

    def __init__(self, context: Context, management: Management, *, pin_step_nbytes: int = PIN_STEP_NBYTES) -> None:
        self._context = context
        self._management = management
        self._host = Pins(ImportedPages(context), backend="levelzero", step_nbytes=pin_step_nbytes)
        self._lock = threading.Lock()

    # --- streams ---

    def create_stream(self, *, priority: int = 0) -> LevelZeroStream:
        """Make a list on the next copy engine; there are three priorities: below 0, 0 and above 0."""
        return self._context.new_list(priority)

    def wrap_stream(self, handle: object) -> LevelZeroStream:
        """Borrow an immediate command list by its integer handle; see :func:`devipc_levelzero.streams.wrap`."""
        return wrap(handle)

    def destroy_stream(self, stream: Stream) -> None:
        """Wait for the stream's work and destroy it; a borrowed one is only forgotten."""
        own = native(stream)
        with self._lock:
            if not own.live:
                raise UsageError("the stream was destroyed before", remedy="destroy it once", backend="levelzero")
            own.live = False
        if own.made_here:
            self._context.finish(own)

    def synchronize_stream(self, stream: Stream) -> None:
        """Block until all work submitted to ``stream`` so far is done; the GIL is released."""
        self._context.synchronize(native(stream))

    def is_capturing(self, stream: Stream) -> bool:
        """Return False: lists made here never capture, and those that do are not to be borrowed."""
        native(stream)
        return False

    # --- copies ---

    def copy(self, stream: Stream, dst: int, src: int, nbytes: int) -> None:
        """Enqueue one copy; zero bytes do nothing."""
        if nbytes < 0:
            raise UsageError(f"copy of {nbytes} bytes", remedy="lengths are not negative", backend="levelzero")
        if nbytes:
            self._submit(native(stream), [(dst, src, nbytes, nbytes, nbytes, 1)])

    def copy_batch(self, stream: Stream, dst: U64Array, src: U64Array, nbytes: U64Array) -> None:
        """Enqueue ``n`` copies in any order, one barrier behind all. Ranges of zero bytes are passed over.

        The arrays are copied before the call returns.
        """
        _check_arrays((dst, src, nbytes), shape=(len(dst),))
        ranges = zip(dst.tolist(), src.tolist(), nbytes.tolist(), strict=True)
        self._submit(native(stream), [(d, s, n, n, n, 1) for d, s, n in ranges])

    def copy_strided(self, stream: Stream, copies: U64Array) -> None:
        """Enqueue ``n`` two-dimensional copies; see the interface for the columns.

        What a region cannot describe is served row by row, contiguous rows as one flat copy.
        """
        _check_arrays((copies,), shape=(len(copies), 6))
        rows: list[Rectangle] = [tuple(row) for row in copies.tolist()]
        for _, _, dst_pitch, src_pitch, width, height in rows:
            if height > 1 and width > min(dst_pitch, src_pitch):
                raise UsageError(
                    f"rows of {width} bytes overlap at pitches {dst_pitch} and {src_pitch}",
                    remedy="a row may not be wider than the distance to the next",
                    backend="levelzero",
                )
        self._submit(native(stream), rows)

    def _uncrossed(self, copies: Iterable[Rectangle]) -> Iterable[Rectangle]:
        """Split at the borders between imports, of which there usually are none."""
        if not self._host.borders:
            return copies
        return (part for copy in copies for part in self._host.split(copy))

    def _submit(self, stream: LevelZeroStream, copies: Iterable[Rectangle]) -> None:
        self._context.check_open()
        flat = driver.bound("zeCommandListAppendMemoryCopy", self._context.uuid)
        strided = driver.bound("zeCommandListAppendMemoryCopyRegion", self._context.uuid)
        handle, submitted = stream.handle, False
        with stream.lock:
            try:
                for dst, src, dst_pitch, src_pitch, width, height in self._uncrossed(copies):
                    if not (width and height):
                        continue
                    if height == 1 or dst_pitch == src_pitch == width:
                        flat(handle, dst, src, width * height, None, 0, None)
                    elif max(dst_pitch, src_pitch, width, height) > _MOST:
                        for row in range(height):
                            flat(handle, dst + row * dst_pitch, src + row * src_pitch, width, None, 0, None)
                            submitted = True
                    else:
                        region = Region(0, 0, 0, width, height, 0)
                        strided(handle, dst, region, dst_pitch, 0, src, region, src_pitch, 0, None, 0, None)
                    submitted = True
            finally:
                if submitted:
                    self._context.call("zeCommandListAppendBarrier", handle, None, 0, None)

    # --- host memory ---

    def register_host(self, address: int, nbytes: int) -> HostRegistration:
        """Import page-aligned host memory, in steps; blocks in proportion to ``nbytes``."""
        self._context.check_open()
        return self._host.register(address, nbytes)

    def unregister_host(self, registration: HostRegistration) -> None:
        """Undo :meth:`register_host`. The caller guarantees that no queued work still uses it."""
        self._host.unregister(registration)

    # --- markers ---

    def create_marker(self) -> LevelZeroMarker:
        """Make a marker; it takes an event at each record."""
        self._context.check_open()
        return LevelZeroMarker()

    def record(self, marker: Marker, stream: Stream) -> None:
        """Set ``marker`` behind all work submitted to ``stream`` so far."""
        own, used = _live(marker), native(stream)
        event = self._context.events.take()
        try:
            with used.lock:
                self._context.call("zeCommandListAppendBarrier", used.handle, event.handle, 0, None)
        except BaseException:
            self._context.events.unused(event)
            raise
        with own.lock:
            before, own.event = own.event, event
        if before is not None:
            self._context.events.retire(before)

    def query_marker(self, marker: Marker) -> bool:
        """Return True when the work before the last record is done; False when never recorded."""
        own = _live(marker)
        with own.lock:
            return own.event is not None and is_set(self._context, own.event.handle)

    def wait_marker(self, stream: Stream, marker: Marker) -> None:
        """Let later work of ``stream`` run after the recorded point."""
        own, used = _live(marker), native(stream)
        with own.lock:
            event = own.event
            if event is None:
                raise UsageError("the marker was never recorded", remedy="record it first", backend="levelzero")
            over = self._context.events.take()
            try:
                waited = (ctypes.c_void_p * 1)(event.handle)
                with used.lock:
                    self._context.call("zeCommandListAppendBarrier", used.handle, over.handle, 1, waited)
            except BaseException:
                self._context.events.unused(over)
                raise
            self._context.events.retire(over, after=event)

    def destroy_marker(self, marker: Marker) -> None:
        """Give a marker back; its event is used again once nothing can touch it any more."""
        own = _live(marker)
        with own.lock:
            own.live = False
            event, own.event = own.event, None
        if event is not None:
            self._context.events.retire(event)

    def memory_info(self) -> MemoryInfo:
        """Return free and total device memory, by the management interface.

        Raises
        ------
        CapabilityError
            Where that is not to be had; nothing else knows how much is free.
        """
        self._context.check_open()
        return self._management.memory_info()


def _live(marker: Marker) -> LevelZeroMarker:
    if not isinstance(marker, LevelZeroMarker) or not marker.live:
        raise UsageError(
            "no live marker of this backend", remedy="use a marker before it is destroyed", backend="levelzero"
        )
    return marker


def _check_arrays(arrays: tuple[U64Array, ...], *, shape: tuple[int, ...]) -> None:
    for array in arrays:
        if array.dtype.str != "<u8" or array.shape != shape or not array.flags.c_contiguous:
            raise UsageError(
                f"expected C-contiguous uint64 of shape {shape}, got {array.dtype} of shape {array.shape}",
                remedy="numpy.ascontiguousarray(copies, dtype=numpy.uint64)",
                backend="levelzero",
            )
