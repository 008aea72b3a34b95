"""Pools as serving systems allocate them, filled with bytes that tell every place from every other.

Owns the geometries, the memory of one pool, and reading pages back by plain copies that no planner made. It knows no
cache.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from devipc.hicache.builders import BuiltPool, TensorView, mla_token_pool, token_pool
from devipc.interfaces.backend import Device
from devipc.interfaces.memory import Allocation
from devipc.memfd import PAGE_NBYTES, SharedMap, create_memfd, round_up
from devipc.types import HandleKind

__all__ = ["ALLOCATIONS", "GEOMETRIES", "Geometry", "Pinned", "Pool"]

U64 = npt.NDArray[np.uint64]
PageIds = npt.NDArray[np.int64]

ALLOCATIONS = ("one", "layers", "classic")
"""One allocation; one a layer, of the kind that the backend likes best; one a plane, with a classic handle."""
_STEP_NBYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Geometry:
    """Rows of one token: ``planes`` of them a layer (K and V, or one latent), of ``row_nbytes`` each."""

    layers: int
    planes: int
    row_nbytes: int

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.layers * self.planes * self.row_nbytes


GEOMETRIES = {
    "llama": Geometry(32, 2, 2048),  # Llama-3-8B: 8 heads of 128, two bytes each
    "tp4": Geometry(32, 2, 512),  # the same over four devices
    "mla": Geometry(61, 1, 1152),  # DeepSeek-V3: 512 + 64 values a token
}
"""Of models that are served much."""


class Pinned:
    """Host memory that a device reaches, and a stream beside it."""

    def __init__(self, device: Device, nbytes: int) -> None:
        assert device.transfer is not None
        self.transfer = device.transfer
        self.nbytes = round_up(nbytes, PAGE_NBYTES)
        fd = create_memfd("devipc-bench", self.nbytes)
        try:
            self._map = SharedMap(fd, self.nbytes)
        finally:
            os.close(fd)
        self.bytes = np.frombuffer(self._map.view, np.uint8)
        self.bytes[:] = 0  # touched before it is pinned
        self._registration = self.transfer.register_host(self._map.address, self.nbytes)
        self.ptr = self._registration.device_ptr
        self.stream = self.transfer.create_stream()

    def close(self) -> None:
        """Give everything back."""
        self.transfer.destroy_stream(self.stream)
        self.transfer.unregister_host(self._registration)
        self.bytes = np.empty(0, np.uint8)
        self._map.close()


class Pool:
    """One pool of ``rows`` tokens and the device memory behind it.

    Parameters
    ----------
    device : Device
        Where.
    geometry : Geometry
        What a token is.
    allocation : str
        One of :data:`ALLOCATIONS`.
    rows, page_tokens : int
        Tokens in the pool, and in a page.
    """

    def __init__(self, device: Device, geometry: Geometry, allocation: str, *, rows: int, page_tokens: int) -> None:
        assert device.memory is not None
        self._memory = device.memory
        self.geometry = geometry
        self.page_tokens = page_tokens
        self.allocations: list[Allocation] = []
        plane = rows * geometry.row_nbytes
        planes = geometry.layers * geometry.planes
        together = {"one": planes, "layers": geometry.planes, "classic": 1}[allocation]
        kind = HandleKind.LEGACY if allocation == "classic" else None
        try:
            for _ in range(0, planes, together):
                self.allocations.append(self._memory.allocate(together * plane, kind=kind))
            starts = [one.ptr + index * plane for one in self.allocations for index in range(together)]
            self.starts = np.array(starts, np.uint64)
            self.built = self._build(rows)
        except BaseException:
            self.close()
            raise

    def _build(self, rows: int) -> BuiltPool:
        shape = (rows, self.geometry.row_nbytes)
        views = [TensorView.contiguous(int(start), shape, 1) for start in self.starts]
        infos = [self._memory.describe(one.ptr) for one in self.allocations]
        if self.geometry.planes == 1:
            return mla_token_pool(views, page_tokens=self.page_tokens, allocations=infos)
        return token_pool(views[0::2], views[1::2], page_tokens=self.page_tokens, allocations=infos)

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page over all planes."""
        return self.page_tokens * self.geometry.token_nbytes

    @property
    def page_count(self) -> int:
        """Pages in the pool; page 0 is never moved."""
        return self.built.layout.page_count

    def pieces(self, pages: PageIds, host: int) -> tuple[U64, U64, U64]:
        """Return device address, host address and length of each piece, with pages packed one behind the other."""
        width = self.page_tokens * self.geometry.row_nbytes
        device = self.starts[None, :] + pages.astype(np.uint64)[:, None] * np.uint64(width)
        place = np.arange(device.size, dtype=np.uint64) * np.uint64(width) + np.uint64(host)
        return device.reshape(-1), place, np.full(device.size, width, np.uint64)

    def fill(self, pinned: Pinned, seed: int) -> None:
        """Write bytes that differ from place to place, and wait. ``pinned`` holds at least 32 MiB."""
        step = min(_STEP_NBYTES, pinned.nbytes // 2)
        pinned.bytes[: 2 * step] = np.random.default_rng(seed).integers(0, 256, 2 * step, np.uint8)
        number = 0
        for one in self.allocations:
            for at in range(0, one.nbytes, step):
                number += 1
                shift = number * 1_000_033 % (step - 8) // 8 * 8
                length = min(step, one.nbytes - at)
                pinned.transfer.copy(pinned.stream, one.ptr + at, pinned.ptr + shift, length)
        pinned.transfer.synchronize_stream(pinned.stream)

    def read(self, pages: PageIds, pinned: Pinned) -> npt.NDArray[np.uint8]:
        """Return the bytes of ``pages``, ``(n, page_nbytes)``, read by plain copies through ``pinned``."""
        found, step = [], max(pinned.nbytes // self.page_nbytes, 1)
        for first in range(0, len(pages), step):
            part = pages[first : first + step]
            device, host, nbytes = self.pieces(part, pinned.ptr)
            pinned.transfer.copy_batch(pinned.stream, host, device, nbytes)
            pinned.transfer.synchronize_stream(pinned.stream)
            found.append(pinned.bytes[: len(part) * self.page_nbytes].reshape(len(part), -1).copy())
        return np.concatenate(found)

    def close(self) -> None:
        """Free the memory."""
        while self.allocations:
            self._memory.free(self.allocations.pop())
