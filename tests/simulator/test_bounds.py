"""Memory the host cannot touch, exact bounds, and the bytes that copies move."""

from __future__ import annotations

import ctypes
import signal
from typing import TYPE_CHECKING

import pytest

from tests.simulator.control import Simulator
from tests.simulator.harness import Parent, Simulation
from tests.simulator.programs import MIB, code, fetch, world

if TYPE_CHECKING:
    from tests.simulator.trace_cases.world import World

pytestmark = pytest.mark.simulator


def touch(parent: Parent) -> object:
    pointer = world().alloc(4096)
    parent.send("allocated")
    return ctypes.c_uint8.from_address(pointer).value


def test_the_host_dies_of_touching_device_memory(sim: Simulation) -> None:
    with sim.start(touch) as child:
        assert child.receive() == "allocated"
        assert child.status() == -signal.SIGSEGV


def pattern(nbytes: int) -> bytes:
    return bytes((i * 7 + i // 251) % 256 for i in range(nbytes))


def batch(w: World, items: list[tuple[int, int, int]]) -> None:
    """A batch of (to, from, bytes)."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.copies import attributes
    from tests.simulator.trace_cases.world import need

    tos, froms = ([cu.CUdeviceptr(item[i]) for item in items] for i in (0, 1))
    sizes = [item[2] for item in items]
    need(cu.cuMemcpyBatchAsync(tos, froms, sizes, len(items), [attributes()], [0], 1, w.stream))


def boxes(parent: Parent) -> object:
    """2D and 3D copies and batches against the same in Python."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.copies import box, plane
    from tests.simulator.trace_cases.world import need

    w = world()
    src, dst, data = w.alloc(8192), w.alloc(8192), pattern(8192)
    need(cu.cuMemcpyHtoD(src, data, 8192))
    found = {}

    need(cu.cuMemsetD8(dst, 0, 8192))
    need(cu.cuMemcpy2DAsync(plane(w, srcDevice=src, dstDevice=dst, srcXInBytes=3, srcY=1, dstXInBytes=5), w.stream))
    need(cu.cuStreamSynchronize(w.stream))
    want = bytearray(8192)
    for row in range(4):
        want[row * 1024 + 5 : row * 1024 + 261] = data[(row + 1) * 512 + 3 : (row + 1) * 512 + 259]
    found["2d"] = fetch(dst, 8192) == bytes(want)

    need(cu.cuMemsetD8(dst, 0, 8192))
    need(cu.cuMemcpy3DAsync(box(srcDevice=src, dstDevice=dst, srcZ=1, srcXInBytes=2, Depth=3), w.stream))
    need(cu.cuStreamSynchronize(w.stream))
    want = bytearray(8192)
    for layer in range(3):
        for row in range(2):
            at = ((layer + 1) * 4 + row) * 128 + 2
            to = (layer * 2 + row) * 64
            want[to : to + 64] = data[at : at + 64]
    found["3d"] = fetch(dst, 8192) == bytes(want)

    need(cu.cuMemsetD8(dst, 0, 8192))
    runs = [(0, 100, 50), (60, 4000, 1), (1000, 0, 3000)]
    batch(w, [(dst + to, src + at, nbytes) for to, at, nbytes in runs])
    need(cu.cuStreamSynchronize(w.stream))
    want = bytearray(8192)
    for to, at, nbytes in runs:
        want[to : to + nbytes] = data[at : at + nbytes]
    found["batch"] = fetch(dst, 8192) == bytes(want)

    need(cu.cuMemsetD32Async(dst + 8, 0x11223344, 3, w.stream))
    need(cu.cuMemsetD2D8Async(dst + 4096, 100, 9, 10, 3, w.stream))
    need(cu.cuStreamSynchronize(w.stream))
    found["fill"] = fetch(dst + 8, 12) == b"\x44\x33\x22\x11" * 3
    rows = fetch(dst + 4096, 300)
    found["fill_2d"] = all(rows[i * 100 : i * 100 + 10] == b"\x09" * 10 and rows[i * 100 + 10] != 9 for i in range(3))
    return found


def test_copies_move_the_right_bytes(sim: Simulation) -> None:
    found = sim.run(boxes)
    assert found == dict.fromkeys(("2d", "3d", "batch", "fill", "fill_2d"), True)


def unordered(parent: Parent) -> object:
    """Items of a batch that overlap: the first one wins here, where a naive reader expects the last."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w = world()
    src, dst = w.alloc(64), w.alloc(64)
    need(cu.cuMemsetD8(src, 1, 32))
    need(cu.cuMemsetD8(src + 32, 2, 32))
    batch(w, [(dst, src, 32), (dst, src + 32, 32)])
    need(cu.cuStreamSynchronize(w.stream))
    return fetch(dst, 1)[0]


def test_a_batch_has_no_order(sim: Simulation) -> None:
    assert sim.run(unordered) == 1


def reuse(parent: Parent) -> object:
    """A freed address comes back at once, as another allocation."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    world()
    which = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
    found = []
    for nbytes in (4 * MIB, 1000):
        first = int(need(cu.cuMemAlloc(nbytes)))
        identity = int(need(cu.cuPointerGetAttribute(which, first)))
        need(cu.cuMemFree(first))
        second = int(need(cu.cuMemAlloc(nbytes)))
        found.append([first == second, identity != int(need(cu.cuPointerGetAttribute(which, second)))])
    return found


def test_addresses_are_reused_under_a_new_identity(sim: Simulation) -> None:
    assert sim.run(reuse) == [[True, True], [True, True]]


def use_while_unmapped(parent: Parent) -> object:
    """Memory taken away under queued work is a sticky error, as on hardware."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w, sim = world(), Simulator.loaded()
    start = w.reserve(2 * MIB)
    need(cu.cuMemMap(start, 2 * MIB, 0, w.physical(), 0))
    need(cu.cuMemSetAccess(start, 2 * MIB, [w.access()], 1))
    sim.stall()
    need(cu.cuMemsetD8Async(start, 1, 2 * MIB, w.stream))
    need(cu.cuMemUnmap(start, 2 * MIB))
    sim.stall(False)
    return [code(cu.cuStreamSynchronize(w.stream)), code(cu.cuMemAlloc(8))]


def test_work_on_unmapped_memory_is_sticky(sim: Simulation) -> None:
    assert sim.run(use_while_unmapped) == ["ILLEGAL_ADDRESS"] * 2


def traced(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    world()
    cu.cuMemAlloc(0)
    return None


def test_calls_can_be_traced_to_a_file(sim: Simulation, tmp_path: object) -> None:
    path = f"{tmp_path}/trace"
    sim.run(traced, trace=path)
    with open(path) as file:
        lines = [line.split() for line in file]
    names = [line[2] for line in lines]
    assert names[:3] == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    assert ["cuMemAlloc_v2", "1"] in [line[2:4] for line in lines]
