"""Streams, copies, host registration and markers of one device: copies only, no kernel is launched by this package.

Owns the submission of copies and what is cheap about it. Knows nothing of other processes.

Sources: copies find out what an address is with hipMemcpyDefault, and a strided one is refused above ``MaxPitch`` (HIP
runtime API, memory management). The runtime may serve a copy by a kernel of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from devipc.spi import (
    PIN_STEP_NBYTES,
    CapabilityError,
    HostRegistration,
    Marker,
    MemoryInfo,
    Rectangle,
    Stream,
    UsageError,
)
from devipc_hip import driver, streams
from devipc_hip.context import Context
from devipc_hip.host_memory import HostMemory
from devipc_hip.streams import HipStream
from devipc_hip.sync import query

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    U64Array = npt.NDArray[np.uint64]

__all__ = ["HipMarker", "HipTransfer"]

_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_DEFAULT_MAX_PITCH = 2**31 - 1


class HipMarker:
    """A driver event without timing, and whether it was ever recorded: the driver calls an unrecorded one done."""

    __slots__ = ("native", "recorded")

    def __init__(self, native: int) -> None:
        self.native: int | None = native
        self.recorded = False


class HipTransfer:
    """Transfer over the driver API.

    Parameters
    ----------
    context : Context
        The device's context.
    pin_step_nbytes : int
        Host memory pinned by one driver call.
    """

    def __init__(self, context: Context, *, pin_step_nbytes: int = PIN_STEP_NBYTES) -> None:
        self._context = context
        self._host = HostMemory(step_nbytes=pin_step_nbytes)
        self._lock = threading.Lock()
        self._max_pitch = driver.device_attribute("MaxPitch", context.ordinal) or _DEFAULT_MAX_PITCH
        self._no_batch = ""

    # --- streams ---

    def create_stream(self, *, priority: int = 0) -> HipStream:
        """Make a non-blocking stream; the driver clamps ``priority`` to its range, lower runs first."""
        with self._context:
            stream = driver.call("hipStreamCreateWithPriority", _NON_BLOCKING, priority)
        return HipStream(stream, made_here=True)

    def wrap_stream(self, handle: object) -> HipStream:
        """Borrow an integer handle or a torch stream; objects are kept alive."""
        return streams.wrap(handle)

    def destroy_stream(self, stream: Stream) -> None:
        """Wait for the stream's work and destroy it; a borrowed one is only forgotten."""
        native = streams.native(stream)
        assert isinstance(stream, HipStream)
        with self._lock:
            if stream.destroyed:
                raise UsageError("the stream was destroyed before", remedy="destroy it once", backend="hip")
            stream.destroyed = True
        if stream.made_here:
            with self._context:
                try:
                    driver.call("hipStreamSynchronize", native)
                finally:
                    driver.call("hipStreamDestroy", native)
        stream.owner = None

    def synchronize_stream(self, stream: Stream) -> None:
        """Block until all work submitted to ``stream`` so far is done; the GIL is released."""
        with self._context:
            driver.call("hipStreamSynchronize", streams.native(stream))

    def is_capturing(self, stream: Stream) -> bool:
        """Return True while ``stream`` records a graph."""
        with self._context.enqueueing:
            return streams.is_capturing(stream)

    # --- copies ---

    def copy(self, stream: Stream, dst: int, src: int, nbytes: int) -> None:
        """Enqueue one copy; zero bytes do nothing."""
        if nbytes < 0:
            raise UsageError(f"copy of {nbytes} bytes", remedy="lengths are not negative", backend="hip")
        if nbytes:
            with self._context.enqueueing:
                self._submit(streams.native(stream), [(dst, src, nbytes, nbytes, nbytes, 1)])

    def copy_batch(self, stream: Stream, dst: U64Array, src: U64Array, nbytes: U64Array) -> None:
        """Enqueue ``n`` copies in any order: one driver call where there is one, else one for each.

        The arrays are copied before the call returns. Ranges of zero bytes are passed over.
        """
        _check_arrays((dst, src, nbytes), shape=(len(dst),))
        copies = [(d, s, n, n, n, 1) for d, s, n in zip(dst.tolist(), src.tolist(), nbytes.tolist(), strict=True) if n]
        if not copies:
            return
        native = streams.native(stream)
        with self._context.enqueueing:
            batched = len(copies) > 1 and not self._no_batch and not _is_default(stream)
            if not (batched and self._submit_batch(native, self._uncrossed(copies))):
                self._submit(native, copies)

    def copy_strided(self, stream: Stream, copies: U64Array) -> None:
        """Enqueue ``n`` two-dimensional copies; see the interface for the columns.

        A pitch above the driver's limit is served row by row, contiguous rows as one flat copy.
        """
        _check_arrays((copies,), shape=(len(copies), 6))
        rows: list[Rectangle] = [tuple(row) for row in copies.tolist()]
        for _, _, dst_pitch, src_pitch, width, height in rows:
            if height > 1 and width > min(dst_pitch, src_pitch):
                raise UsageError(
                    f"rows of {width} bytes overlap at pitches {dst_pitch} and {src_pitch}",
                    remedy="a row may not be wider than the distance to the next",
                    backend="hip",
                )
        with self._context.enqueueing:
            self._submit(streams.native(stream), rows)

    def _uncrossed(self, copies: Iterable[Rectangle]) -> Iterable[Rectangle]:
        """Split at the borders between registrations, of which there usually are none."""
        if not self._host.borders:
            return copies
        return (part for copy in copies for part in self._host.split(copy))

    def _submit(self, native: int, copies: Iterable[Rectangle]) -> None:
        flat = driver.bound("hipMemcpyAsync", driver.DEFAULT_COPY)
        strided: Callable[..., None] | None = None
        max_pitch = self._max_pitch
        for dst, src, dst_pitch, src_pitch, width, height in self._uncrossed(copies):
            if not (width and height):
                continue
            if height == 1 or dst_pitch == src_pitch == width:
                flat(dst, src, width * height, native)
            elif dst_pitch > max_pitch or src_pitch > max_pitch:
                for row in range(height):
                    flat(dst + row * dst_pitch, src + row * src_pitch, width, native)
            else:
                if strided is None:
                    strided = driver.bound("hipMemcpy2DAsync", driver.DEFAULT_COPY)
                strided(dst, dst_pitch, src, src_pitch, width, height, native)

    def _submit_batch(self, native: int, copies: Iterable[Rectangle]) -> bool:
        """Try the batch call; False when it is absent or refuses, and then the caller submits one by one.

        Copying a range twice is harmless. An absence is remembered, a refusal is not: its cause may be an address.
        """
        dst, src, nbytes = zip(*((copy[0], copy[1], copy[4]) for copy in copies), strict=True)
        try:
            status = driver.copy_batch(dst, src, nbytes, native)
        except CapabilityError as error:
            self._no_batch = str(error)
            return False
        if status == 801:
            self._no_batch = "hipMemcpyBatchAsync -> 801"
        return status == 0

    # --- host memory ---

    def register_host(self, address: int, nbytes: int) -> HostRegistration:
        """Pin and map page-aligned host memory, in steps; blocks in proportion to ``nbytes``."""
        with self._context:
            return self._host.register(address, nbytes)

    def unregister_host(self, registration: HostRegistration) -> None:
        """Undo :meth:`register_host`. May block while a device-side wait of this process is pending."""
        with self._context:
            self._host.unregister(registration)

    # --- markers ---

    def create_marker(self) -> HipMarker:
        """Make a marker."""
        with self._context:
            return HipMarker(driver.call("hipEventCreateWithFlags", _DISABLE_TIMING))

    def record(self, marker: Marker, stream: Stream) -> None:
        """Set ``marker`` behind all work submitted to ``stream`` so far."""
        own = _live(marker)
        with self._context.enqueueing:
            driver.call("hipEventRecord", own.native, streams.native(stream))
        own.recorded = True

    def query_marker(self, marker: Marker) -> bool:
        """Return True when the work before the last record is done; False when never recorded."""
        own = _live(marker)
        if not own.recorded:
            return False
        with self._context:
            return query(own.native or 0)

    def wait_marker(self, stream: Stream, marker: Marker) -> None:
        """Let later work of ``stream`` run after the recorded point."""
        own = _live(marker)
        if not own.recorded:
            raise UsageError(
                "the marker was never recorded; a wait for it would end at once",
                remedy="record it first",
                backend="hip",
            )
        with self._context.enqueueing:
            driver.call("hipStreamWaitEvent", streams.native(stream), own.native, 0)

    def destroy_marker(self, marker: Marker) -> None:
        """Give a marker back."""
        own = _live(marker)
        with self._lock:
            native, own.native = own.native, None
        if native is not None:
            with self._context:
                driver.call("hipEventDestroy", native)

    def memory_info(self) -> MemoryInfo:
        """Return free and total device memory."""
        with self._context:
            free, total = driver.call("hipMemGetInfo")
        return MemoryInfo(int(free), int(total))


def _is_default(stream: Stream) -> bool:
    """Return True for the default streams, which refuse batches."""
    return isinstance(stream, HipStream) and stream.is_default


def _live(marker: Marker) -> HipMarker:
    if not isinstance(marker, HipMarker) or marker.native is None:
        raise UsageError("no live marker of this backend", remedy="use a marker before it is destroyed", backend="hip")
    return marker


def _check_arrays(arrays: tuple[U64Array, ...], *, shape: tuple[int, ...]) -> None:
    for array in arrays:
        if array.dtype.str != "<u8" or array.shape != shape or not array.flags.c_contiguous:
            raise UsageError(
                f"expected C-contiguous uint64 of shape {shape}, got {array.dtype} of shape {array.shape}",
                remedy="numpy.ascontiguousarray(copies, dtype=numpy.uint64)",
                backend="hip",
            )
