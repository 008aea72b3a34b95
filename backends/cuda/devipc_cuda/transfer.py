"""Streams, copies, host registration and markers of one device: copy engines only, no kernel is launched.

Owns the submission of copies and what is cheap about it. Knows nothing of other processes.

Sources: a strided copy names its memory as ``unified``, so that the driver finds out what an address is, and is
refused above ``MAX_PITCH``; a batch is refused on default streams and makes no promise about order inside of it (CUDA
driver API, memory management).
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from devipc.spi import CapabilityError, HostRegistration, Marker, MemoryInfo, Stream, UsageError
from devipc_cuda import driver, streams
from devipc_cuda.context import Context
from devipc_cuda.host_memory import DEFAULT_STEP_NBYTES, HostMemory, Rectangle
from devipc_cuda.streams import CudaStream
from devipc_cuda.sync import query

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    U64Array = npt.NDArray[np.uint64]

__all__ = ["CudaMarker", "CudaTransfer"]

_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_UNIFIED = 4
_DEFAULT_MAX_PITCH = 2**31 - 1

# CUDA_MEMCPY2D: x, y, type, padding, host, device, array, pitch for source and destination, then width and height.
_COPY_2D = struct.Struct("=QQIIQQQQQQIIQQQQQQ")


class CudaMarker:
    """A driver event without timing, and whether it was ever recorded: the driver calls an unrecorded one done."""

    __slots__ = ("native", "recorded")

    def __init__(self, native: Any) -> None:
        self.native = native
        self.recorded = False


class _StridedCopy:
    """One reusable copy description, written in place: making a binding object for each copy would cost more."""

    def __init__(self) -> None:
        self.description = driver.make_struct("CUDA_MEMCPY2D")
        self._bytes = (ctypes.c_char * _COPY_2D.size).from_address(self.description.getPtr())

    def fill(self, dst: int, src: int, dst_pitch: int, src_pitch: int, width: int, height: int) -> None:
        _COPY_2D.pack_into(
            self._bytes, 0,
            0, 0, _UNIFIED, 0, 0, src, 0, src_pitch,
            0, 0, _UNIFIED, 0, 0, dst, 0, dst_pitch,
            width, height,
        )  # fmt: skip


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
        self._local = threading.local()
        self._max_pitch = driver.device_attribute("MAX_PITCH", context.device) or _DEFAULT_MAX_PITCH
        self._no_batch = ""

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
                    backend="cuda",
                )
        with self._context.enqueueing:
            self._submit(streams.native(stream), rows)

    def _uncrossed(self, copies: Iterable[Rectangle]) -> Iterable[Rectangle]:
        """Split at the borders between registrations, of which there usually are none."""
        if not self._host.borders:
            return copies
        return (part for copy in copies for part in self._host.split(copy))

    def _submit(self, native: Any, copies: Iterable[Rectangle]) -> None:
        flat = driver.bound("cuMemcpyAsync")
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
                    strided, reused = driver.bound("cuMemcpy2DAsync"), self._strided_copy()
                reused.fill(dst, src, dst_pitch, src_pitch, width, height)
                strided(reused.description, native)

    def _strided_copy(self) -> _StridedCopy:
        """One description for each thread: the driver has read it when the call returns."""
        found: _StridedCopy | None = getattr(self._local, "strided", None)
        if found is None:
            found = self._local.strided = _StridedCopy()
        return found

    def _submit_batch(self, native: Any, copies: Iterable[Rectangle]) -> bool:
        """Try the batch call; False when it is absent or refuses, and then the caller submits one by one.

        Copying a range twice is harmless. An absence is remembered, a refusal is not: its cause may be an address.
        """
        dst, src, nbytes = [], [], []
        for copy in copies:
            dst.append(driver.make("CUdeviceptr", copy[0]))
            src.append(driver.make("CUdeviceptr", copy[1]))
            nbytes.append(copy[4])
        try:
            status, _ = driver.attempt(
                "cuMemcpyBatchAsync", dst, src, nbytes, len(dst), [driver.copy_attributes()], [0], 1, native
            )
        except CapabilityError as error:
            self._no_batch = str(error)
            return False
        if status == 801:
            self._no_batch = "cuMemcpyBatchAsync -> 801"
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


def _is_default(stream: Stream) -> bool:
    """Return True for the default streams, which refuse batches."""
    return isinstance(stream, CudaStream) and stream.is_default


def _live(marker: Marker) -> CudaMarker:
    if not isinstance(marker, CudaMarker) or marker.native is None:
        raise UsageError("no live marker of this backend", remedy="use a marker before it is destroyed", backend="cuda")
    return marker


def _check_arrays(arrays: tuple[U64Array, ...], *, shape: tuple[int, ...]) -> None:
    for array in arrays:
        if array.dtype.str != "<u8" or array.shape != shape or not array.flags.c_contiguous:
            raise UsageError(
                f"expected C-contiguous uint64 of shape {shape}, got {array.dtype} of shape {array.shape}",
                remedy="numpy.ascontiguousarray(copies, dtype=numpy.uint64)",
                backend="cuda",
            )
