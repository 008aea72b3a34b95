"""When a mover hands over a first part by itself: of what takes long, so that it moves while the rest is submitted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from devipc.hicache.arena import HostArena
from devipc.hicache.layout import Component, Plane, PoolChunk, PoolLayout, Rule
from devipc.hicache.mover import PinnedMover
from devipc.hicache.planner import Direction
from devipc.hicache.records import Places
from devipc.host.backend import HostBackend
from devipc.types import HandleKind

PLANES, PAGES, ROW = 4, 9, 2**20
LAYOUT = PoolLayout(
    PAGES,
    (PoolChunk(PLANES * PAGES * ROW, HandleKind.MEMFD),),
    (
        Component(
            "kv", Rule.MLA, 1, 1, tuple(Plane(layer, 0, layer * PAGES * ROW, ROW, ROW, ROW) for layer in range(PLANES))
        ),
    ),
    1,
)


@pytest.fixture
def device() -> Iterator[Any]:
    opened = HostBackend().open_device()
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("page_count", "parts"),
    [
        (3, [3]),  # 12 MiB: moved sooner than a second call returns
        (4, [1, 3]),
        (8, [2, 6]),
    ],
)
def test_a_quarter_of_what_takes_long_goes_first(
    device: Any, page_count: int, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer, arena = device.transfer, HostArena(PLANES * PAGES * ROW)
    block = device.memory.allocate(PLANES * PAGES * ROW)
    registration = transfer.register_host(arena.address, arena.nbytes)
    stream, mover, put = transfer.create_stream(), PinnedMover(transfer, arena), []
    content = np.random.default_rng(5).integers(0, 255, arena.nbytes, np.uint8)
    arena.view[: arena.nbytes] = content.tobytes()
    transfer.copy(stream, block.ptr, arena.address, arena.nbytes)
    transfer.synchronize_stream(stream)
    arena.view[: arena.nbytes] = bytes(arena.nbytes)
    whole = mover._fan.put

    def counted(stream: Any, copies: Any) -> None:
        put.append(copies.total_nbytes // (PLANES * ROW))
        whole(stream, copies)

    monkeypatch.setattr(mover._fan, "put", counted)
    pages = np.array([7, 3, 5, 1, 8, 2, 6, 4])[:page_count]  # none beside the one before it
    places = Places(PLANES * ROW * np.arange(page_count), None, None)
    mover.move(mover.planner(LAYOUT, [block.ptr]), Direction.BACKUP, pages, places, stream, lambda _group: None)
    transfer.synchronize_stream(stream)
    assert put == parts
    found = np.frombuffer(arena.view[: page_count * PLANES * ROW], np.uint8)
    expected = content.reshape(PLANES, PAGES, ROW)[:, pages].swapaxes(0, 1)
    assert np.array_equal(found.reshape(page_count, PLANES, ROW), expected)
    del found
    transfer.unregister_host(registration)
    transfer.destroy_stream(stream)
    device.memory.free(block)
    arena.close()
