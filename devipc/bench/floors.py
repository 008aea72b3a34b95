"""Floors and baselines: the same bytes moved without a cache, in the same run.

Owns the contiguous copy, one way and both, and what a program without a planner does. On a device whose memory the
host reads, the contiguous copy is numpy's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from devipc.bench.pools import PageIds, Pinned, Pool
from devipc.interfaces.backend import Device
from devipc.memfd import PAGE_NBYTES, round_up

__all__ = ["BACKUP", "BOTH", "RESTORE", "Floor", "baselines"]

BACKUP, RESTORE, BOTH = "backup", "restore", "both"
_HOST_DLPACK = 1


class Floor:
    """Contiguous copies of ``nbytes`` between device memory and pinned host memory.

    Parameters
    ----------
    device : Device
        Where.
    nbytes : int
        Of one copy, one way.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        assert device.memory is not None
        self._memory = device.memory
        self._nbytes = nbytes
        self._pinned = [Pinned(device, nbytes) for _ in range(2)]
        self._blocks = [device.memory.allocate(round_up(nbytes, PAGE_NBYTES), zero=True) for _ in range(2)]
        self._views = []
        self.how = "one contiguous copy to and from pinned memory"
        if device.info.dlpack_type == _HOST_DLPACK:
            self.how = "numpy's copy of one contiguous array"
            for block in self._blocks:
                self._views.append(_view(block.ptr, nbytes))

    def copy(self, direction: str, *, times: int = 1) -> float:
        """Copy ``times`` times, one behind the other; return the seconds of all.

        Both ways are two copies at once, on two streams or two threads.
        """
        sides = {BACKUP: (0,), RESTORE: (1,), BOTH: (0, 1)}[direction]
        start = time.perf_counter()
        if self._views:
            threads = [threading.Thread(target=self._by_numpy, args=(side, times)) for side in sides[1:]]
            for thread in threads:
                thread.start()
            self._by_numpy(sides[0], times)
            for thread in threads:
                thread.join()
        else:
            for side in sides * times:
                pinned, block = self._pinned[side], self._blocks[side].ptr
                to, back = (pinned.ptr, block) if side == 0 else (block, pinned.ptr)
                pinned.transfer.copy(pinned.stream, to, back, self._nbytes)
            for side in sides:
                self._pinned[side].transfer.synchronize_stream(self._pinned[side].stream)
        return time.perf_counter() - start

    def _by_numpy(self, side: int, times: int) -> None:
        pinned, block = self._pinned[side].bytes[: self._nbytes], self._views[side]
        for _ in range(times):
            np.copyto(*((pinned, block) if side == 0 else (block, pinned)))

    def close(self) -> None:
        """Give everything back."""
        self._views.clear()
        for pinned, block in zip(self._pinned, self._blocks, strict=True):
            pinned.close()
            self._memory.free(block)


def _view(address: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    interface = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
    return np.asarray(type("Memory", (), {"__array_interface__": interface})())


def baselines(pool: Pool, pinned: Pinned) -> dict[str, Callable[[str, PageIds], float]]:
    """Return what moves pages without a planner: by name, a function of direction and pages that returns seconds.

    ``loop`` is one copy for each page and plane, ``batch`` hands all of these over at once.
    """

    def sides(direction: str, pages: PageIds) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        device, host, nbytes = pool.pieces(pages, pinned.ptr)
        return (host, device, nbytes) if direction == BACKUP else (device, host, nbytes)

    def loop(direction: str, pages: PageIds) -> float:
        start = time.perf_counter()
        dst, src, nbytes = sides(direction, pages)
        for to, back, length in zip(dst.tolist(), src.tolist(), nbytes.tolist(), strict=True):
            pinned.transfer.copy(pinned.stream, to, back, length)
        pinned.transfer.synchronize_stream(pinned.stream)
        return time.perf_counter() - start

    def batch(direction: str, pages: PageIds) -> float:
        start = time.perf_counter()
        pinned.transfer.copy_batch(pinned.stream, *sides(direction, pages))
        pinned.transfer.synchronize_stream(pinned.stream)
        return time.perf_counter() - start

    return {"loop": loop, "batch": batch}
