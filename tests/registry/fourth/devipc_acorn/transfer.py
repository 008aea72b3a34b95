"""Streams, copies, registered host memory and markers of the Acorn device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from devipc.spi import (
    PAGE_NBYTES,
    ClosedError,
    HostRegistration,
    Marker,
    MemoryInfo,
    MemoryKind,
    Stream,
    UsageError,
)

from .driver import NAME, Driver, Range, Worker
from .memory import memory_info

if TYPE_CHECKING:  # importing numpy starts threads, and loading a backend must not
    import numpy as np
    import numpy.typing as npt

    U64Array = npt.NDArray[np.uint64]

__all__ = ["AcornStream", "AcornTransfer", "worker_of"]

_MS_ASYNC = 1
_msync = ctypes.CDLL(None).msync
_msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(slots=True, eq=False)
class AcornStream:
    """A stream, made here or borrowed. Fulfils :class:`devipc.spi.Stream`."""

    worker: Worker
    borrowed: bool
    closed: bool = False

    @property
    def handle(self) -> int:
        """Number of the stream in this process."""
        return self.worker.handle


@dataclass(slots=True, eq=False)
class AcornMarker:
    """A point in a stream. Fulfils :class:`devipc.spi.Marker`."""

    point: tuple[Worker, int] | None = None
    closed: bool = False


def worker_of(stream: object) -> Worker:
    """Return the worker behind a stream; UsageError for anything else, ClosedError for a destroyed one."""
    if not isinstance(stream, AcornStream):
        raise UsageError(f"this {type(stream).__name__} is no stream of this device", remedy="use create_stream")
    if stream.closed:
        raise ClosedError("the stream is destroyed", remedy="make a new stream", backend=NAME)
    return stream.worker


def _marker(marker: object) -> AcornMarker:
    if not isinstance(marker, AcornMarker):
        raise UsageError(f"this {type(marker).__name__} is no marker of this device", remedy="use create_marker")
    if marker.closed:
        raise ClosedError("the marker is destroyed", remedy="make a new marker", backend=NAME)
    return marker


def _rows(array: object, name: str, *inner: int) -> list[list[int]]:
    """Snapshot a C-contiguous buffer of uint64 of shape ``(n, *inner)``; numpy is not needed for that."""
    try:
        view = memoryview(array)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name} is a {type(array).__name__}", remedy="pass a numpy array of uint64") from None
    shaped = view.format in ("Q", "L") and view.itemsize == 8 and tuple(view.shape or ())[1:] == inner
    if not shaped or view.ndim != 1 + len(inner) or not view.c_contiguous:
        raise UsageError(f"{name} is no C-contiguous uint64 array of its shape", remedy="see DeviceTransfer")
    rows: list[Any] = view.tolist()
    return rows if inner else [[one] for one in rows]


class AcornTransfer:
    """Fulfils :class:`devipc.spi.DeviceTransfer`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def create_stream(self, *, priority: int = 0) -> AcornStream:
        """Make a stream. Its thread shares the processor with all others: ``priority`` changes nothing."""
        self._driver.enter("create_stream")
        return AcornStream(self._driver.start(), borrowed=False)

    def wrap_stream(self, handle: object) -> AcornStream:
        """Borrow a stream of this device by its handle, or by an object that has one."""
        self._driver.enter("wrap_stream")
        return AcornStream(self._driver.worker(getattr(handle, "handle", handle)), borrowed=True)

    def destroy_stream(self, stream: Stream) -> None:
        """Destroy a stream after its work; one that was borrowed is only forgotten."""
        self._driver.enter("destroy_stream")
        worker = worker_of(stream)
        assert isinstance(stream, AcornStream)
        stream.closed = True
        if not stream.borrowed:
            self._driver.finish(worker)

    def synchronize_stream(self, stream: Stream) -> None:
        """Block until all work submitted so far is done."""
        self._driver.enter("synchronize_stream")
        worker = worker_of(stream)
        worker.wait(worker.mark())

    def is_capturing(self, stream: Stream) -> bool:
        """Return False: this device records no graphs."""
        self._driver.enter("is_capturing")
        worker_of(stream)
        return False

    def copy(self, stream: Stream, dst: int, src: int, nbytes: int) -> None:
        """Copy ``nbytes``."""
        self._copy(stream, [(dst, src, nbytes, nbytes, nbytes, 1)])

    def copy_batch(self, stream: Stream, dst: U64Array, src: U64Array, nbytes: U64Array) -> None:
        """Copy ``n`` ranges."""
        columns = [_rows(array, name) for array, name in ((dst, "dst"), (src, "src"), (nbytes, "nbytes"))]
        if len({len(column) for column in columns}) != 1:
            raise UsageError("dst, src and nbytes differ in length", remedy="pass equal lengths", backend=NAME)
        self._copy(stream, [(to, of, n, n, n, 1) for (to,), (of,), (n,) in zip(*columns, strict=True)])

    def copy_strided(self, stream: Stream, copies: U64Array) -> None:
        """Do ``n`` two-dimensional copies."""
        self._copy(stream, _rows(copies, "copies", 6))

    def _copy(self, stream: Stream, copies: Iterable[Iterable[int]]) -> None:
        """Check all copies (dst, src, dst_pitch, src_pitch, width, height), then enqueue them as one piece of work."""
        self._driver.enter("copy")
        rects = [tuple(one) for one in copies]
        rects = [one for one in rects if one[4] and one[5]]
        spans = []
        for dst, src, dst_pitch, src_pitch, width, height in rects:
            if min(width, height) < 0 or (height > 1 and width > min(dst_pitch, src_pitch)):
                raise UsageError("rows overlap, or have a negative length", remedy="width <= pitch", backend=NAME)
            spans += [(dst, (height - 1) * dst_pitch + width), (src, (height - 1) * src_pitch + width)]

        def run() -> None:
            for dst, src, dst_pitch, src_pitch, width, height in rects:
                for row in range(height):
                    ctypes.memmove(dst + row * dst_pitch, src + row * src_pitch, width)

        self._submit(stream, run, spans)

    def _submit(self, stream: Stream, run: Callable[[], None], spans: Iterable[tuple[int, int]] = ()) -> None:
        worker = worker_of(stream)
        worker.submit(run, self._driver.hold(spans))

    def register_host(self, address: int, nbytes: int) -> HostRegistration:
        """Let the device reach host memory, at the same address. Threads need no pinned pages."""
        self._driver.enter("register_host")
        if address % PAGE_NBYTES or nbytes <= 0:
            raise UsageError("not whole pages of host memory", remedy="align the address", backend=NAME)
        if _msync(address, nbytes, _MS_ASYNC):  # msync(2): ENOMEM where anything is not mapped
            raise UsageError(
                f"[{address:#x}, {address + nbytes:#x}) is not mapped",
                code="not_mapped",
                remedy="map the memory before it is registered",
                backend=NAME,
            )
        made = self._driver.add(Range(address, address + nbytes, MemoryKind.HOST))
        return HostRegistration(address, nbytes, address, made.number)

    def unregister_host(self, registration: HostRegistration) -> None:
        """Undo it. Blocks while queued work uses the memory, because the caller unmaps it next."""
        self._driver.enter("unregister_host")
        self._driver.retire(registration.token, MemoryKind.HOST, wait=True)

    def create_marker(self) -> AcornMarker:
        """Make a marker."""
        self._driver.enter("create_marker")
        return AcornMarker()

    def record(self, marker: Marker, stream: Stream) -> None:
        """Set the marker behind all work of ``stream`` so far."""
        self._driver.enter("record")
        worker = worker_of(stream)
        _marker(marker).point = worker, worker.mark()

    def query_marker(self, marker: Marker) -> bool:
        """Return True when the recorded point is passed; False when none was recorded."""
        self._driver.enter("query_marker")
        point = _marker(marker).point
        return point is not None and point[0].completed >= point[1]

    def wait_marker(self, stream: Stream, marker: Marker) -> None:
        """Let later work of ``stream`` run behind the point that is recorded now."""
        self._driver.enter("wait_marker")
        worker, point = worker_of(stream), _marker(marker).point
        if point is None:
            raise UsageError("the marker was never recorded", remedy="record it first", backend=NAME)
        source, number = point
        self._submit(stream, lambda: worker.poll(lambda: source.completed >= number))

    def destroy_marker(self, marker: Marker) -> None:
        """Give a marker back; waits that were enqueued stay valid."""
        self._driver.enter("destroy_marker")
        _marker(marker).closed = True

    def memory_info(self) -> MemoryInfo:
        """Return what the machine has free and in total."""
        self._driver.enter("memory_info")
        return memory_info()
