"""Small numbers to a device and back, past its copy engines.

Owns host memory that kernels of the device read and write by themselves. A copy of a few bytes would wait at a copy
engine until what the cache moves there has passed, megabytes at a time, and the computation with it; a kernel that
reads the same bytes over the bus waits for no copy. On the host the same is done with ordinary memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from devipc.integrations import ForeignBuffer, ViewKeeper
from devipc.types import DeviceInfo

__all__ = ["Staging", "Window"]

_WINDOWS = 4
_LEAST = 1024


class Window:
    """Integers that the host and kernels of a device share.

    Only kernels may touch ``device``: torch hands ``copy_`` and ``clone`` to a copy engine, ``+ 0`` to a kernel.

    Parameters
    ----------
    count : int
        How many.
    where : torch.device
        Who shares them; the host itself is one.

    Attributes
    ----------
    host : numpy array
        For the host.
    device : Tensor
        The same memory, as one of the device's tensors. It and what is made from it keep the memory.
    """

    def __init__(self, count: int, where: torch.device) -> None:
        on_device = where.type != "cpu"
        pinned = torch.zeros(count, dtype=torch.int64, pin_memory=on_device)
        self.host: np.ndarray[tuple[int, ...], np.dtype[np.int64]] = pinned.numpy()
        kind, ordinal = torch.empty(0, device=where).__dlpack_device__()
        self.device: Tensor = ForeignBuffer(
            ptr=pinned.data_ptr(),
            dtype="int64",
            shape=(count,),
            device=DeviceInfo(uuid="", ordinal=ordinal, name=str(where), dlpack_type=int(kind)),
            keeper=ViewKeeper(lambda: pinned),
        ).to_torch()
        self._last = torch.Event(where) if on_device else None

    def used(self) -> None:
        """Remember what was launched so far, on the current stream: it may use the window."""
        if self._last is not None:
            self._last.record()

    def wait(self) -> None:
        """Block until that is over: then the host may read what kernels wrote, and write anew."""
        if self._last is not None:
            self._last.synchronize()


class Staging:
    """Sends and fetches lists of integers. One thread; on a device, always on the same stream.

    Parameters
    ----------
    where : torch.device
        Where the tensors are.
    """

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._windows = [Window(_LEAST, where) for _ in range(_WINDOWS)]  # so that sending seldom waits
        self._next = 0

    @torch.inference_mode()
    def send(self, values: Sequence[int]) -> Tensor:
        """Return a tensor of ``values``, without waiting for what was launched before."""
        window = self._take(len(values))
        window.host[: len(values)] = values
        try:
            return window.device[: len(values)] + 0
        finally:  # an interrupt may come behind the launch
            window.used()

    @torch.inference_mode()
    def fetch(self, tensor: Tensor) -> list[int]:
        """Return the integers of a tensor, all dimensions as one. Blocks until they are known."""
        count = tensor.numel()
        window = self._take(count)
        try:
            torch.add(tensor.flatten(), 0, out=window.device[:count])
        finally:
            window.used()
        window.wait()
        found: list[int] = window.host[:count].tolist()
        return found

    def _take(self, count: int) -> Window:
        """Return the window that was used longest ago, once it is free, with room for ``count``."""
        window = self._windows[self._next]
        window.wait()
        if len(window.host) < count:
            window = self._windows[self._next] = Window(1 << (count - 1).bit_length(), self._where)
        self._next = (self._next + 1) % len(self._windows)
        return window
