"""When a mover hands over a first part by itself, so that it moves while the rest is submitted; what failures keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from devipc.errors import DriverError
from devipc.hicache.layout import Component, Plane, PoolChunk, PoolLayout, Rule
from devipc.hicache.moving.arena import HostArena
from devipc.hicache.moving.mover import BouncedMover, MarkerPool, PinnedMover
from devipc.hicache.planning.planner import Direction
from devipc.hicache.tier.records import Places
from devipc.host.backend import HostBackend
from devipc.memfd import SharedMap
from devipc.types import HandleKind

PLANES, PAGES, ROW = 4, 151, 2**16
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
    ("lengths", "parts"),
    [
        ([1] * 31, [31]),  # 8 MiB: moved sooner than a second call returns
        ([1] * 32, [16, 16]),  # but of many runs the first are submitted while the others are planned
        ([1] * 75, [16, 59]),
        ([10] * 7, [10, 60]),  # 17 MiB in few runs
        ([5] * 14, [15, 55]),
        ([1, *[2] * 37], [31, 44]),  # 16 runs, of two classes
    ],
)
def test_a_part_of_what_takes_long_goes_first(
    device: Any, lengths: list[int], parts: list[int], monkeypatch: pytest.MonkeyPatch
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

    def counted(stream: Any, copies: Any, **options: Any) -> None:
        put.append(copies.total_nbytes // (PLANES * ROW))
        whole(stream, copies, **options)

    monkeypatch.setattr(mover._fan, "put", counted)
    ends = np.cumsum(np.array(lengths) + 1)  # a page is left out between two runs
    pages = np.concatenate([np.arange(end - length, end) for length, end in zip(lengths, ends, strict=True)])
    page_count = len(pages)
    span = np.repeat(lengths, lengths)
    index = np.concatenate([np.arange(length) for length in lengths])
    places = Places(PLANES * ROW * (np.arange(page_count) - index), span, index)
    mover.move(mover.planner(LAYOUT, [block.ptr]), Direction.BACKUP, pages, places, stream, lambda _group: None)
    transfer.synchronize_stream(stream)
    assert put == parts
    first = 0
    for length, end in zip(lengths, ends, strict=True):  # an extent has its pages plane by plane
        found = np.frombuffer(arena.view[first : first + length * PLANES * ROW], np.uint8)
        expected = content.reshape(PLANES, PAGES, ROW)[:, end - length : end]
        assert np.array_equal(found.reshape(PLANES, length, ROW), expected)
        first += length * PLANES * ROW
    del found
    transfer.unregister_host(registration)
    transfer.destroy_stream(stream)
    device.memory.free(block)
    arena.close()


def test_a_marker_that_cannot_be_asked_is_used_again(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer, arena = device.transfer, HostArena(PLANES * PAGES * ROW)
    block = device.memory.allocate(PLANES * PAGES * ROW)
    bounce = SharedMap(arena.fileno(), 2 * PLANES * ROW)
    registration = transfer.register_host(bounce.address, bounce.nbytes)
    stream, markers = transfer.create_stream(), MarkerPool(transfer)
    mover = BouncedMover(transfer, arena, bounce, markers, stopped=lambda: False)
    planner = mover.planner(LAYOUT, [block.ptr])

    def refused(_marker: Any) -> bool:
        raise DriverError("the driver refused an answer", remedy="none: it was asked to")

    monkeypatch.setattr(transfer, "query_marker", refused)
    for _ in range(3):
        with pytest.raises(DriverError):
            mover.move(planner, Direction.BACKUP, np.array([1]), Places(np.array([0])), stream, lambda _group: None)
    assert len(markers._all) == 1
    transfer.synchronize_stream(stream)
    markers.close()
    transfer.unregister_host(registration)
    transfer.destroy_stream(stream)
    device.memory.free(block)
    bounce.close()
    arena.close()
