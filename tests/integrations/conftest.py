"""Mapped memory, as a session would hand it out, and devices of several kinds to pretend it lies on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from devipc.integrations import ForeignBuffer, ViewKeeper
from devipc.memfd import SharedMap, create_memfd
from devipc.types import DeviceInfo

HOST = DeviceInfo("host-0", 0, "host memory", dlpack_type=1)
PINNED = DeviceInfo("card-0", 0, "pinned host memory", dlpack_type=3)
CARD = DeviceInfo("card-1", 1, "a card", dlpack_type=2)
NAMELESS = DeviceInfo("card-2", 0, "a new kind of card")


class Mapped:
    """One page-aligned mapping whose end can be watched. ``ends`` counts how often it was given back."""

    def __init__(self, map_: SharedMap) -> None:
        self.map = map_
        self.ends = 0
        self.keeper = ViewKeeper(self._end)

    def _end(self) -> None:
        self.ends += 1

    @property
    def views(self) -> int:
        """Counts beyond our own."""
        return self.keeper.count - 1

    def buffer(
        self, dtype: str = "float32", shape: Sequence[int] = (4, 4), *, at: int = 0, **options: Any
    ) -> ForeignBuffer:
        options.setdefault("device", HOST)
        return ForeignBuffer(ptr=self.map.address + at, dtype=dtype, shape=shape, keeper=self.keeper, **options)


@pytest.fixture
def mapped() -> Iterator[Mapped]:
    fd = create_memfd("test", 1 << 20)
    map_ = SharedMap(fd, 1 << 20)
    os.close(fd)
    yield Mapped(map_)
    map_.close()
