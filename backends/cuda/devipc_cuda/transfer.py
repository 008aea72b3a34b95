"""Streams, copies, host registration and markers of one device: copy engines only, no kernel is launched.

Owns which form of copy the driver is given; how many are given to it at once is :mod:`devipc_cuda.submit`'s. Knows
nothing of other processes.

Sources: a strided copy is refused above ``MAX_PITCH``, a batch on default streams (CUDA driver API, memory
management).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from devipc.spi import HostRegistration, Marker, MemoryInfo, Stream, UsageError
from devipc_cuda import driver, streams
from devipc_cuda.context import Context
from devipc_cuda.host_memory import DEFAULT_STEP_NBYTES, HostMemory, Rectangle
from devipc_cuda.streams import CudaStream
from devipc_cuda.sync import query

if TYPE_CHECKING:
    from devipc_cuda.submit import Submission, U64Array

__all__ = ["CudaMarker", "CudaTransfer"]

_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_DEFAULT_MAX_PITCH = 2**31 - 1


class CudaMarker:
    """A driver event without timing, and whether it was ever recorded: the driver calls an unrecorded one done."""

    __slots__ = ("native", "recorded")

    def __init__(self, native: Any) -> None:
        self.native = native
        self.recorded = False


class CudaTransfer:
    """Transfer over the driver API.

    Parameters
    ----------
    context : Context
        The device's context.
    pin_step_nbytes : int
        Host memory pinned by one driver call.
    """

    def __init__(self, context: Context, *, pin_step_nbytes: int = DEFAULT_STEP_NBYTES) -> None:
        self._context = context
        self._host = HostMemory(step_nbytes=pin_step_nbytes)
        self._lock = threading.Lock()
        self._max_pitch = driver.device_attribute("MAX_PITCH", context.device) or _DEFAULT_MAX_PITCH

    # --- streams ---

    def create_stream(self, *, priority: int = 0) -> CudaStream:
        """Make a non-blocking stream; the driver clamps ``priority`` to its range, lower runs first."""
        with self._context:
            stream = driver.call("cuStreamCreateWithPriority", _NON_BLOCKING, priority)
        return CudaStream(int(stream), made_here=True)

    def wrap_stream(self, handle: object) -> CudaStream:
        """Borrow an integer handle, a torch stream, or an object with ``__cuda_stream__``; objects are kept alive."""
        return streams.wrap(handle)

    def destroy_stream(self, stream: Stream) -> None:
        """Wait for the stream's work and destroy it; a borrowed one is only forgotten."""
        native = streams.native(stream)
        assert isinstance(stream, CudaStream)
        with self._lock:
            if stream.native is None:
                raise UsageError("the stream was destroyed before", remedy="destroy it once", backend="cuda")
            stream.native = None
        if stream.made_here:
            with self._context:
                try:
                    driver.call("cuStreamSynchronize", native)
                finally:
                    driver.call("cuStreamDestroy", native)
        stream.owner = None

    def synchronize_stream(self, stream: Stream) -> None:
        """Block until all work submitted to ``stream`` so far is done; the GIL is released."""
        with self._context:
            driver.call("cuStreamSynchronize", streams.native(stream))

    def is_capturing(self, stream: Stream) -> bool:
        """Return True while ``stream`` records a graph."""
        with self._context.enqueueing:
            return streams.is_capturing(stream)

    # --- copies ---

    def copy(self, stream: Stream, dst: int, src: int, nbytes: int) -> None:
        """Enqueue one copy; zero bytes do nothing."""
        if nbytes < 0:
            raise UsageError(f"copy of {nbytes} bytes", remedy="lengths are not negative", backend="cuda")
        if nbytes:
            flat = driver.bound("cuMemcpyAsync")
            with self._context.enqueueing:
                for part in self._host.split((dst, src, nbytes, nbytes, nbytes, 1)):
                    flat(part[0], part[1], part[4], streams.native(stream))

    def copy_batch(self, stream: Stream, dst: U64Array, src: U64Array, nbytes: U64Array) -> None:
        """Enqueue ``n`` copies in any order: one driver call where there is one, else one for each.

        The arrays are copied before the call returns. Ranges of zero bytes are passed over.
        """
        _check_arrays((dst, src, nbytes), shape=(len(dst),))
        if not len(dst):
            return
        import numpy as np

        if not nbytes.all() or self._crossed(((dst, dst + nbytes), (src, src + nbytes))).any():
            self._submit(stream, np.stack((dst, src, nbytes, nbytes, nbytes, np.ones_like(nbytes)), axis=1))
            return
        with self._context.enqueueing:  # most batches: nothing to leave out, nothing to cut
            self._submission.flat(streams.native(stream), dst, src, nbytes, batch=_takes_batches(stream))

    def copy_strided(self, stream: Stream, copies: U64Array) -> None:
        """Enqueue ``n`` two-dimensional copies in any order; see the interface for the columns.

        One driver call where there is one that takes them all, else one for each. A pitch above the driver's limit is
        served row by row, contiguous rows as one flat copy.
        """
        _check_arrays((copies,), shape=(len(copies), 6))
        wrong = (copies[:, 5] > 1) & (copies[:, 4] > copies[:, 2:4].min(axis=1)) if len(copies) else copies[:, 0]
        if wrong.any():
            _, _, dst_pitch, src_pitch, width, _ = copies[int(wrong.argmax())].tolist()
            raise UsageError(
                f"rows of {width} bytes overlap at pitches {dst_pitch} and {src_pitch}",
                remedy="a row may not be wider than the distance to the next",
                backend="cuda",
            )
        self._submit(stream, copies)

    def _submit(self, stream: Stream, copies: U64Array) -> None:
        """Sort copies by the driver's forms, with one push of the context for all of them."""
        import numpy as np

        copies = self._uncrossed(copies[(copies[:, 4] > 0) & (copies[:, 5] > 0)])
        native = streams.native(stream)
        width, height = copies[:, 4], copies[:, 5]
        flat = (height == 1) | ((copies[:, 2] == width) & (copies[:, 3] == width))
        far = ~flat & (copies[:, 2:4].max(axis=1, initial=0) > self._max_pitch)
        near = ~flat & ~far
        rows = [copies[flat]] if flat.any() else []
        if far.any():
            rows.append(np.array([row for copy in copies[far].tolist() for row in _rows_of(copy)], np.uint64))
        with self._context.enqueueing:
            batch = _takes_batches(stream)
            for some in rows:
                self._submission.flat(native, some[:, 0], some[:, 1], some[:, 4] * some[:, 5], batch=batch)
            if near.any():
                self._submission.strided(native, copies[near], batch=batch)

    @functools.cached_property
    def _submission(self) -> Submission:
        from devipc_cuda.submit import Submission  # brings numpy, which whoever has arrays has

        return Submission()

    def _crossed(self, ranges: Iterable[tuple[U64Array, U64Array]]) -> Any:
        """Return which copies cross a border, of whose sides these are the begins and ends; False for none at all."""
        import numpy as np

        borders = self._host.borders
        crossed = np.False_
        if borders:
            edges = np.array(borders, np.uint64)
            for begin, end in ranges:
                crossed = crossed | (
                    np.searchsorted(edges, begin, side="right") != np.searchsorted(edges, end, side="left")
                )
        return crossed

    def _uncrossed(self, copies: U64Array) -> U64Array:
        """Split at the borders between registrations, of which there usually are none."""
        if not len(copies):
            return copies
        rows = copies[:, 5] - 1
        crossed = self._crossed(
            (base, base + rows * pitch + copies[:, 4])
            for base, pitch in ((copies[:, 0], copies[:, 2]), (copies[:, 1], copies[:, 3]))
        )
        if not crossed.any():
            return copies
        import numpy as np

        parts = [part for copy in copies[crossed].tolist() for part in self._host.split(tuple(copy))]
        return np.concatenate((copies[~crossed], np.array(parts, np.uint64)))

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

    def create_marker(self) -> CudaMarker:
        """Make a marker."""
        with self._context:
            return CudaMarker(driver.call("cuEventCreate", _DISABLE_TIMING))

    def record(self, marker: Marker, stream: Stream) -> None:
        """Set ``marker`` behind all work submitted to ``stream`` so far."""
        own = _live(marker)
        with self._context.enqueueing:
            driver.call("cuEventRecord", own.native, streams.native(stream))
        own.recorded = True

    def query_marker(self, marker: Marker) -> bool:
        """Return True when the work before the last record is done; False when never recorded."""
        own = _live(marker)
        if not own.recorded:
            return False
        with self._context:
            return query(own.native)

    def wait_marker(self, stream: Stream, marker: Marker) -> None:
        """Let later work of ``stream`` run after the recorded point."""
        own = _live(marker)
        if not own.recorded:
            raise UsageError(
                "the marker was never recorded; a wait for it would end at once",
                remedy="record it first",
                backend="cuda",
            )
        with self._context.enqueueing:
            driver.call("cuStreamWaitEvent", streams.native(stream), own.native, 0)

    def destroy_marker(self, marker: Marker) -> None:
        """Give a marker back."""
        own = _live(marker)
        with self._lock:
            native, own.native = own.native, None
        if native is not None:
            with self._context:
                driver.call("cuEventDestroy", native)

    def memory_info(self) -> MemoryInfo:
        """Return free and total device memory."""
        with self._context:
            free, total = driver.call("cuMemGetInfo")
        return MemoryInfo(int(free), int(total))


def _takes_batches(stream: Stream) -> bool:
    """Return False for default streams and those that record a graph, which refuse batches; the context is current."""
    is_default = isinstance(stream, CudaStream) and stream.is_default
    return not is_default and not streams.is_capturing(stream)


def _live(marker: Marker) -> CudaMarker:
    if not isinstance(marker, CudaMarker) or marker.native is None:
        raise UsageError("no live marker of this backend", remedy="use a marker before it is destroyed", backend="cuda")
    return marker


def _rows_of(copy: list[int]) -> Iterator[Rectangle]:
    dst, src, dst_pitch, src_pitch, width, height = copy
    for row in range(height):
        yield dst + row * dst_pitch, src + row * src_pitch, width, width, width, 1


def _check_arrays(arrays: tuple[U64Array, ...], *, shape: tuple[int, ...]) -> None:
    for array in arrays:
        if array.dtype.str != "<u8" or array.shape != shape or not array.flags.c_contiguous:
            raise UsageError(
                f"expected C-contiguous uint64 of shape {shape}, got {array.dtype} of shape {array.shape}",
                remedy="numpy.ascontiguousarray(copies, dtype=numpy.uint64)",
                backend="cuda",
            )
