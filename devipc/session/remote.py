"""Memory of a peer, mapped here: an address, how to look at it, and when it is given back.

Owns one use of one mapping. Views (arrays, tensors) taken from it keep the mapping alive, so that closing it under
them never leaves a pointer into nothing.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from devipc.errors import BoundsError, ClosedError, HandleError, StaleError, UsageError
from devipc.integrations import ForeignBuffer, ViewKeeper, itemsize_of
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import Stream
from devipc.mappings import Mapping
from devipc.session.messages import ShareMeta
from devipc.wire import MemoryHandle

if TYPE_CHECKING:
    import numpy
    import torch

__all__ = ["RemoteMemory", "check_handle", "check_meta"]


_MAX_VIEW_NBYTES = 2**63 - 1


def check_meta(meta: ShareMeta, nbytes: int) -> None:
    """Check that every element that ``meta`` describes lies inside ``nbytes`` shared bytes.

    Raises
    ------
    HandleError
        For an element type that this side does not know.
    BoundsError
        When one does not: the exporter's description is wrong or was changed on the way.
    """
    try:
        itemsize = itemsize_of(meta.dtype)
    except UsageError as error:  # the exporter's words, not the caller's
        raise HandleError(
            f"the exporter describes {error.message}", code="dtype", remedy="run the same devipc on both sides"
        ) from error
    low = high = meta.offset
    for extent, stride in zip(meta.shape, meta.strides, strict=True):
        reach = (extent - 1) * stride * itemsize if extent else 0
        low, high = low + min(reach, 0), high + max(reach, 0)
    empty = any(extent == 0 for extent in meta.shape)
    if math.prod(extent or 1 for extent in meta.shape) * itemsize > _MAX_VIEW_NBYTES:  # at distance 0 they need no room
        raise BoundsError(
            f"shape {meta.shape} has more elements than an array can have",
            remedy="the exporter's description is wrong; share the memory again",
        )
    if any(abs(stride) * itemsize > _MAX_VIEW_NBYTES for stride in meta.strides):  # also those that are never walked
        raise BoundsError(
            f"strides {meta.strides} are longer than an array can have",
            remedy="the exporter's description is wrong; share the memory again",
        )
    if low < 0 or (high + (0 if empty else itemsize)) > nbytes:
        raise BoundsError(
            f"described elements reach from byte {low} to {high + itemsize} of {nbytes} shared bytes",
            remedy="the exporter's description is wrong; share the memory again",
        )


def check_handle(handle: MemoryHandle, instance: bytes, backend: str, device: Device) -> None:
    """Check that ``handle`` is of the process that sent it, and of this endpoint's backend and device.

    Raises
    ------
    HandleError
        When it is not.
    """
    if handle.instance != instance:
        raise HandleError(
            "the handle belongs to another process than the one that sent it",
            code="foreign",
            remedy="open it from the process that exported it",
        )
    if handle.backend != backend:
        raise HandleError(
            f"the handle is of backend {handle.backend!r}, this endpoint uses {backend!r}",
            code="wrong_backend",
            remedy="use the same backend on both sides",
        )
    if handle.device_uuid != device.info.uuid:
        raise HandleError(
            f"the handle is of device {handle.device_uuid!r}, this endpoint uses {device.info.uuid}",
            code="wrong_device",
            remedy="open the importer on the exporter's device",
        )


class _Last:
    """Gives a mapping back when its last view is gone: at once for ``close()``, else on a thread of its own.

    The last view can die in a garbage collection inside any lock of any thread, where nothing may block, no lock may
    be taken, and even ``threading`` may not be asked for a thread; a raw one may.
    """

    __slots__ = ("_mapping", "_memory", "_release")

    def __init__(self, mapping: Mapping, release: Callable[[Mapping], None], memory: RemoteMemory) -> None:
        self._mapping = mapping
        self._release = release
        self._memory = weakref.ref(memory)

    def __call__(self) -> None:
        memory = self._memory()
        if memory is not None and memory._closer == threading.get_ident():
            self._release(self._mapping)
        else:
            # At the end of the interpreter there is no thread to be had; the process's own end unmaps.
            with contextlib.suppress(RuntimeError):
                _thread.start_new_thread(self._elsewhere, ())

    def _elsewhere(self) -> None:
        try:
            threading.Thread(target=self._release, args=(self._mapping,), name="devipc-unmap", daemon=True).start()
        except RuntimeError:  # no second thread to be had: this one will do
            self._release(self._mapping)


class RemoteMemory:
    """One opened share. A context manager; usable from any thread.

    The memory stays the exporter's: what either side writes, the other sees. Order the accesses by fences.
    """

    def __init__(
        self,
        name: str,
        device: Device,
        mapping: Mapping,
        meta: ShareMeta,
        *,
        release: Callable[[Mapping], None],
    ) -> None:
        self._closed = True  # until it is complete: then it owns the use
        self.name = name
        self.meta = meta
        self._device = device
        self._mapping = mapping
        self._lock = threading.Lock()
        self._closer = 0
        self._keeper = ViewKeeper(on_last=_Last(mapping, release, self))
        self._closed = False

    @property
    def ptr(self) -> int:
        """Device address of the first element. Checks that the memory is open and not stale."""
        self._check()
        return self._mapping.ptr + self.meta.offset

    @property
    def nbytes(self) -> int:
        """Length in bytes of the shared range that the elements lie in."""
        return self._mapping.nbytes

    @property
    def region(self) -> int:
        """Memories of one region other than 0 lie side by side: while all are open, one strided copy may span them."""
        return self._mapping.region

    @property
    def stale(self) -> str:
        """Why this memory must not be used any more; empty while it may."""
        return self._mapping.stale

    def __dlpack__(self, **options: Any) -> Any:
        return self.view().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.view().__dlpack_device__()

    def to_numpy(self) -> numpy.ndarray[Any, Any]:
        """Return a zero-copy array; only for memory that the host can address."""
        return self.view().to_numpy()

    def to_torch(self, *, allow_readonly: bool = False) -> torch.Tensor:
        """Return a zero-copy tensor with the exporter's shape and strides; see :meth:`ForeignBuffer.to_torch`."""
        return self.view().to_torch(allow_readonly=allow_readonly)

    def view(self) -> ForeignBuffer:
        """Return an object that speaks every array protocol that fits the device, and keeps the mapping alive."""
        self._check()
        return ForeignBuffer(
            ptr=self._mapping.ptr + self.meta.offset,
            dtype=self.meta.dtype,
            shape=self.meta.shape,
            strides=self.meta.strides,
            device=self._device.info,
            readonly=not self.meta.writable,
            keeper=self._keeper,
        )

    def close(self, *, streams: Sequence[Stream] = ()) -> None:
        """Give this use back, after all work on ``streams`` is done.

        Blocks for that work only. The mapping itself goes once every view is gone too. Calling it again does nothing.
        """
        transfer = self._device.transfer
        for stream in () if self._closed else streams:
            if transfer is not None:
                transfer.synchronize_stream(stream)  # work that may still run keeps the memory: it stays open
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._closer = threading.get_ident()
        try:
            self._keeper.release()
        finally:
            self._closer = 0  # a view that dies later on this thread may die inside of any lock

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self._closed = True
            self._keeper.release()

    def __enter__(self) -> RemoteMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._mapping.stale or "open"
        return f"RemoteMemory({self.name!r}, {self.meta.dtype}{list(self.meta.shape)}, {self.nbytes} bytes, {state})"

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.name!r} is closed", remedy="open it again")
        if self._mapping.stale:
            raise StaleError(f"{self.name!r}: {self._mapping.stale}", remedy="close it and open it again")
