"""A pool whose layers are allocations of their own: mapped side by side, a page is one copy."""

from __future__ import annotations

import numpy as np
import pytest

from devipc.hicache.layout import Component, Plane, PoolChunk, PoolLayout, Rule
from devipc.hicache.moving.arena import HostArena
from devipc.hicache.moving.mover import PinnedMover
from devipc.hicache.planning.planner import Direction, HostPages
from devipc.host.backend import HostBackend
from devipc.types import HandleKind, OpenedExtent

LAYERS, PAGES, TOKENS, ROW = 16, 40, 4, 128
PLANE = PAGES * TOKENS * ROW


def layout() -> PoolLayout:
    planes = tuple(Plane(layer, layer, 0, ROW, ROW, TOKENS * ROW) for layer in range(LAYERS))
    component = Component("kv", Rule.MLA, TOKENS, TOKENS, planes)
    return PoolLayout(PAGES, (PoolChunk(PLANE, HandleKind.MEMFD),) * LAYERS, (component,), 1)


@pytest.mark.parametrize("together", [True, False])
def test_a_page_of_all_layers_is_one_copy(*, together: bool) -> None:
    device = HostBackend().open_device()
    memory, transfer = device.memory, device.transfer
    blocks = [memory.allocate(PLANE) for _ in range(LAYERS)]
    extents = [memory.export(block.ptr, PLANE) for block in blocks]
    opened: list[OpenedExtent] = (
        list(memory.open_side_by_side(extents)) if together else [memory.open(extent) for extent in extents]
    )
    arena = HostArena(2 * PLANE * LAYERS)
    registration = transfer.register_host(arena.address, arena.nbytes)
    stream = transfer.create_stream()
    content = np.random.default_rng(5).integers(0, 255, (LAYERS, PAGES, TOKENS * ROW), np.uint8)
    for block, plane in zip(blocks, content, strict=True):
        transfer.copy_batch(
            stream, *(np.array([v], np.uint64) for v in (block.ptr, _staged(arena, plane), plane.nbytes))
        )
        transfer.synchronize_stream(stream)
    planner = PinnedMover(transfer, arena).planner(
        layout(), [one.ptr for one in opened], [one.region for one in opened]
    )
    pages = np.array([7, 3, 21, 30])
    places = arena.address + 16384 * np.arange(4)
    copies = planner.plan(Direction.BACKUP, pages, HostPages.blocks(places)).groups[0]
    assert len(copies.strided) + len(copies.nbytes) == len(pages) * (1 if together else LAYERS)
    transfer.copy_strided(stream, copies.strided)
    transfer.copy_batch(stream, copies.dst, copies.src, copies.nbytes)
    transfer.synchronize_stream(stream)
    for page, number in zip(pages, range(4), strict=True):
        found = np.frombuffer(arena.view[16384 * number :][: LAYERS * TOKENS * ROW], np.uint8)
        assert np.array_equal(found.reshape(LAYERS, -1), content[:, page])
        del found
    for one in opened:
        memory.close(one)
    for extent, block in zip(extents, blocks, strict=True):
        memory.release(extent)
        memory.free(block)
    transfer.destroy_stream(stream)
    transfer.unregister_host(registration)
    arena.close()
    device.close()


def _staged(arena: HostArena, plane: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> int:
    """Put a plane at the end of the arena, and return where."""
    at = arena.nbytes - plane.nbytes
    arena.view[at : at + plane.nbytes] = plane.tobytes()
    return arena.address + at
