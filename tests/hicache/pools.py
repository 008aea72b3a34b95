"""Device memory of the cache's tests: streams that can be held back, pools with known content around sentinels.

Knows no client and no engine, so that any process of a test can use it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from devipc.hicache.builders import BuiltPool
from devipc.interfaces.backend import Device
from devipc.interfaces.memory import Allocation
from devipc.memfd import SharedMap, create_memfd
from tests.hicache.holding import hold

Bytes = npt.NDArray[np.uint8]
Keys = npt.NDArray[np.uint8]

SENTINEL, POISON = 0xA5, 0xEE
TIMEOUT_S = 20.0
STAGING_NBYTES = 2**20


class Gate:
    """Holds streams back, so that "not done yet" is certain and no race."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._held: list[Any] = []

    def stall(self, stream: Any) -> None:
        hold(self._device, stream, on=True)
        self._held.append(stream)

    def resume(self, stream: Any) -> None:
        self._held.remove(stream)
        hold(self._device, stream, on=False)

    def resume_all(self) -> None:
        while self._held:
            hold(self._device, self._held.pop(), on=False)


class Staging:
    """Registered host memory and a stream: blocking reads and writes of device memory."""

    def __init__(self, device: Device) -> None:
        assert device.transfer is not None
        self.transfer = device.transfer
        fd = create_memfd("test-staging", STAGING_NBYTES)
        self.map = SharedMap(fd, STAGING_NBYTES)
        os.close(fd)
        self._registration = self.transfer.register_host(self.map.address, STAGING_NBYTES)
        self.stream = self.transfer.create_stream()
        self.bytes = np.frombuffer(self.map.view, np.uint8)

    def read(self, ptr: int, nbytes: int) -> Bytes:
        self.transfer.copy(self.stream, self._registration.device_ptr, ptr, nbytes)
        self.transfer.synchronize_stream(self.stream)
        return self.bytes[:nbytes].copy()

    def write(self, ptr: int, data: Bytes) -> None:
        self.bytes[: len(data)] = data
        self.transfer.copy(self.stream, ptr, self._registration.device_ptr, len(data))
        self.transfer.synchronize_stream(self.stream)

    def close(self) -> None:
        self.transfer.destroy_stream(self.stream)
        self.transfer.unregister_host(self._registration)
        self.unmap()

    def unmap(self) -> None:
        del self.bytes
        self.map.close()


class PoolMemory:
    """A pool in device memory: pages with the content of their keys, poison, and sentinels around them."""

    def __init__(self, staging: Staging, built: BuiltPool, allocations: list[Allocation]) -> None:
        self._staging = staging
        self.built = built
        self.layout = built.layout
        self.allocations = allocations
        starts = np.cumsum([0, *(nbytes for _, nbytes in built.exports)])
        self._starts = starts
        self.where = np.stack([self._page(page) for page in range(self.layout.page_count)])
        inside = np.zeros(int(starts[-1]), np.bool_)
        inside[self.where[self.layout.first_page :].ravel()] = True
        self._outside = ~inside
        self.store(np.full(int(starts[-1]), SENTINEL, np.uint8))

    def _page(self, page: int) -> npt.NDArray[np.int64]:
        """Where each byte of a page lies, in the order of host memory."""
        found = []
        for component, plane in self.layout.planes():
            for row in range(component.page_rows):
                start = int(self._starts[plane.chunk]) + plane.offset
                start += page * plane.page_stride_nbytes + row * plane.row_stride_nbytes
                found.append(np.arange(start, start + plane.row_nbytes))
        return np.concatenate(found)

    def load(self) -> Bytes:
        return np.concatenate([self._staging.read(ptr, nbytes) for ptr, nbytes in self.built.exports])

    def store(self, image: Bytes) -> None:
        for start, (ptr, nbytes) in zip(self._starts, self.built.exports, strict=False):
            self._staging.write(ptr, image[start : start + nbytes])

    def content(self, key: Bytes) -> Bytes:
        """What the page of a key holds: nothing else can be taken for it."""
        return np.frombuffer(hashlib.shake_128(key.tobytes()).digest(self.layout.page_nbytes), np.uint8)

    def fill(self, pages: Sequence[int] | npt.NDArray[Any], keys: Keys) -> None:
        image = self.load()
        for page, key in zip(pages, keys, strict=True):
            image[self.where[page]] = self.content(key)
        self.store(image)

    def poison(self, pages: Sequence[int] | npt.NDArray[Any]) -> None:
        image = self.load()
        image[self.where[np.asarray(pages)].ravel()] = POISON
        self.store(image)

    def check(self, pages: Sequence[int] | npt.NDArray[Any], keys: Keys) -> None:
        """Pages hold what their keys say, and no byte outside of pages has changed."""
        image = self.load()
        for page, key in zip(pages, keys, strict=True):
            assert np.array_equal(image[self.where[page]], self.content(key)), f"page {page} holds something else"
        assert (image[self._outside] == SENTINEL).all(), "bytes outside of pages were written"

    def is_poisoned(self, pages: Sequence[int] | npt.NDArray[Any]) -> bool:
        return bool((self.load()[self.where[np.asarray(pages)]] == POISON).all())


class Closable(Protocol):
    def close(self) -> None: ...


@contextlib.contextmanager
def closed_behind(made: Closable) -> Iterator[None]:
    """Close ``made`` behind a block; where the block has failed, what closing finds wrong then is not told."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            made.close()
        raise
    made.close()


def until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.001)
