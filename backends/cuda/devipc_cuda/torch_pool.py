"""Torch tensors in memory that can be exported: for KV pools that another process is to map.

Owns the tie between a tensor's life and the allocation under it. torch is imported here only, and only when used.
Torch's own allocator serves memory from blocks whose kind depends on its settings; a tensor made here is always
exportable, has whole blocks to itself, and is freed soon after the last tensor that views it is gone.
"""

from __future__ import annotations

import _thread
import math
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from devipc.spi import Allocation, ClosedError, DeviceLostError, DevIPCError, ForkError, HandleKind, UsageError
from devipc_cuda import driver
from devipc_cuda.context import Context

if TYPE_CHECKING:
    import torch

__all__ = ["TorchPool"]


class _Device(Protocol):
    @property
    def context(self) -> Context: ...
    @property
    def memory(self) -> Any: ...


class _Block:
    """Bytes on the device, described so that torch makes a tensor over them and keeps this object with it."""

    def __init__(self, pool: TorchPool, allocation: Allocation, nbytes: int) -> None:
        self._pool = pool
        self._allocation = allocation
        # torch takes the object's interface as of now and holds the object until the storage dies.
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (allocation.ptr, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }

    def __del__(self) -> None:
        # This can run in a garbage collection inside of any lock of this thread, the device's own among them, and
        # freeing waits for the device: never here.
        self._pool._dead.append(self._allocation)
        self._pool._start_freeing()


class TorchPool:
    """Allocates exportable torch tensors on one device. Any thread.

    Memory is given back on a thread of its own, behind all work that the device holds when the last tensor dies.

    Parameters
    ----------
    device : CudaDevice
        An opened device of this backend.
    kind : HandleKind or None
        How the memory will be exported; the device's best when None (file descriptors).
    """

    def __init__(self, device: _Device, *, kind: HandleKind | None = None) -> None:
        self._device = device
        self._kind = kind
        self._lock = threading.Lock()
        self._live: dict[int, int] = {}
        self._dead: deque[Allocation] = deque()  # without the lock, see _Block.__del__

    @property
    def live_nbytes(self) -> int:
        """Bytes under tensors that still live, or whose memory is not given back yet, rounded up to whole blocks.

        Memory that cannot be given back at once, as while a graph is captured, is tried again when the next tensor is
        made or dies.
        """
        with self._lock:
            return sum(self._live.values())

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
        """Return a contiguous tensor of ``shape`` over an allocation of its own, without a copy.

        Parameters
        ----------
        shape : sequence of int
            All dimensions at least 1.
        dtype : torch.dtype
            Any type with whole bytes.
        zero : bool
            Fill with zeros before returning.

        Raises
        ------
        UsageError
            For a tensor without elements.
        ResourceExhausted
            When memory ran out.
        """
        import torch

        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes <= 0:
            raise UsageError(f"tensor of shape {tuple(shape)}", remedy="ask for at least one element", backend="cuda")
        block = self._block(nbytes, zero=zero)
        ordinal = self._device.context.ordinal
        return torch.as_tensor(block, device=f"cuda:{ordinal}").view(dtype).view(tuple(shape))

    def _block(self, nbytes: int, *, zero: bool) -> _Block:
        if self._dead:
            self._start_freeing()
        allocation = self._device.memory.allocate(nbytes, kind=self._kind, zero=zero)
        with self._lock:
            self._live[id(allocation)] = allocation.nbytes
        return _Block(self, allocation, nbytes)

    def _start_freeing(self) -> None:
        """Free on a thread of its own. At the interpreter's end none is to be had, and none is needed."""
        try:
            _thread.start_new_thread(self._free_dead, ())
        except RuntimeError:
            pass

    def _free_dead(self) -> None:
        """Free behind all work of the device. Runs on a thread of its own, also at exit: never raises."""
        for _ in range(len(self._dead)):
            try:
                allocation = self._dead.popleft()
            except IndexError:  # another thread was faster
                return
            idle = False
            try:
                with self._device.context:
                    driver.call("cuCtxSynchronize")
                idle = True
                self._device.memory.free(allocation)
            except (ClosedError, DeviceLostError, ForkError):
                pass  # it went with the device
            except DevIPCError:
                # While a stream captures, its context cannot be waited for (CUDA programming guide, stream capture).
                if not idle:
                    self._dead.append(allocation)
                continue  # what the driver keeps is still said to live
            with self._lock:
                self._live.pop(id(allocation), None)
