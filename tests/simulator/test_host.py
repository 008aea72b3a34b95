"""Host memory: registration limits, aliases, pageable copies."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from functools import partial

import pytest

from tests.simulator.control import Simulator
from tests.simulator.harness import Parent, Simulation
from tests.simulator.programs import MIB, Background, code, fetch, shared_words, world

pytestmark = pytest.mark.simulator


def limits(parent: Parent) -> object:
    """Per call, in total, too little, not at all; a failure leaves nothing registered."""
    from cuda.bindings import driver as cu

    w, sim = world(), Simulator.loaded()
    area = w.pages(8 * MIB)

    def register(at: int, nbytes: int) -> str:
        return code(cu.cuMemHostRegister(area + at, nbytes, 3))

    found: dict[str, object] = {}
    sim.set("pin_limit_mb", 2)
    found["per_call"] = [register(0, 3 * MIB), register(0, 2 * MIB), register(2 * MIB, 2 * MIB)]
    sim.set("pin_total_mb", 5)
    found["total"] = [register(4 * MIB, 2 * MIB), register(4 * MIB, MIB)]
    found["pinned"] = [sim.report()["pinned_bytes"] // MIB, sim.report()["live_registrations"]]
    for at in (0, 2 * MIB, 4 * MIB):
        cu.cuMemHostUnregister(area + at)
    found["back"] = [sim.report()["pinned_bytes"], sim.report()["live_registrations"]]
    sim.set("pin_least_kb", 8)
    found["least"] = [register(0, 4096), register(0, 8192)]
    cu.cuMemHostUnregister(area)
    sim.set("host_register", 0)
    found["never"] = register(0, 4096)
    found["allocates_still"] = code(cu.cuMemHostAlloc(4096, 0))
    return found


def test_registration_limits(sim: Simulation) -> None:
    found = sim.run(limits)
    assert found["per_call"] == ["OUT_OF_MEMORY", "SUCCESS", "SUCCESS"]
    assert found["total"] == ["OUT_OF_MEMORY", "SUCCESS"]
    assert found["pinned"] == [5, 3]
    assert found["back"] == [0, 0]
    assert found["least"] == ["NOT_SUPPORTED", "SUCCESS"]
    assert found["never"] == "NOT_SUPPORTED"
    assert found["allocates_still"] == "SUCCESS"


def failure_left_pending(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    w, sim = world(), Simulator.loaded()
    area = w.pages(2 * MIB)
    sim.set("pin_limit_mb", 1)
    sim.set("pin_pending", 1)
    answers = [cu.cuMemHostRegister(area, 2 * MIB, 0), cu.cuStreamQuery(w.stream), cu.cuStreamQuery(w.stream)]
    return [code(answer) for answer in answers]


def test_a_failed_registration_hits_the_next_call(sim: Simulation) -> None:
    assert sim.run(failure_left_pending) == ["OUT_OF_MEMORY", "OUT_OF_MEMORY", "SUCCESS"]


def slow_pins(parent: Parent) -> object:
    """Registrations queue up behind each other; other calls go on."""
    from cuda.bindings import driver as cu

    w, sim = world(), Simulator.loaded()
    area = w.pages(8192)
    sim.set("pin_ms", 80)
    began = time.monotonic()
    calls = [Background(w, partial(cu.cuMemHostRegister, area + at, 4096, 3)) for at in (0, 4096)]
    other = code(cu.cuStreamQuery(w.stream))
    quick = time.monotonic() - began < 0.08
    answers = [code(call.answer()) for call in calls]
    return [other, quick, answers, time.monotonic() - began >= 0.16]


def test_slow_registrations_queue_up(sim: Simulation) -> None:
    assert sim.run(slow_pins) == ["SUCCESS", True, ["SUCCESS"] * 2, True]


def aliases(parent: Parent) -> object:
    """Where the device address differs, the host address is no device address."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w = world()
    area = w.registered(8192)
    alias = int(need(cu.cuMemHostGetDevicePointer(area + 64, 0)))
    device = w.alloc(64)
    attribute = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    found = {
        "claim": int(cu.cuDeviceGetAttribute(attribute, w.device)[1]),
        "same": alias == area + 64,
        "value_by_host": code(cu.cuStreamWriteValue32(w.stream, area + 64, 7, 0)),
        "value_by_device": code(cu.cuStreamWriteValue32(w.stream, alias, 8, 0)),
        "fill_by_host": code(cu.cuMemsetD8Async(area + 128, 1, 4, w.stream)),
        "copy_by_host": code(cu.cuMemcpyHtoDAsync(device, area + 64, 4, w.stream)),
    }
    need(cu.cuStreamSynchronize(w.stream))
    return {**found, "word": ctypes.c_uint32.from_address(area + 64).value, "copied": fetch(device, 1)[0]}


def test_device_aliases_of_host_memory(sim: Simulation) -> None:
    same = sim.run(aliases)
    assert (same["claim"], same["same"], same["value_by_host"], same["fill_by_host"]) == (1, True, "SUCCESS", "SUCCESS")
    apart = sim.run(aliases, host_pointer=0)
    assert (apart["claim"], apart["same"]) == (0, False)
    assert (apart["value_by_host"], apart["fill_by_host"]) == ("INVALID_VALUE", "INVALID_VALUE")
    for found in (same, apart):
        assert (found["value_by_device"], found["copy_by_host"]) == ("SUCCESS", "SUCCESS")
        assert (found["word"], found["copied"]) == (8, 8)


def pageable(parent: Parent) -> object:
    """A pageable source may change after the call; a pageable target is written before it returns."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w, sim = world(), Simulator.loaded()
    device, pinned = w.alloc(4 * MIB), w.pinned(64)
    source = ctypes.create_string_buffer(b"\x05" * 64, 64)
    need(cu.cuMemsetD8(device, 0, 64))
    sim.stall()
    need(cu.cuMemcpyHtoDAsync(device, ctypes.addressof(source), 64, w.stream))
    ctypes.memset(source, 9, 64)
    ctypes.memset(pinned, 5, 64)
    need(cu.cuMemcpyHtoDAsync(device + 64, pinned, 64, w.stream))
    ctypes.memset(pinned, 9, 64)
    target = Background(w, lambda: cu.cuMemcpyDtoHAsync(ctypes.addressof(source), device, 64, w.stream))
    blocks = target.blocks()
    sim.stall(False)
    target.answer()
    need(cu.cuStreamSynchronize(w.stream))
    return [blocks, source.raw[0], fetch(device + 64, 1)[0]]


def test_pageable_memory_is_staged(sim: Simulation) -> None:
    assert sim.run(pageable) == [True, 5, 9]


def host_to_host(parent: Parent) -> object:
    """Copies with no device side, one of each form, while the stream stands."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.copies import HOST, attributes, plane
    from tests.simulator.trace_cases.world import need

    w, sim = world(), Simulator.loaded()
    source, target = w.pinned(8192), w.registered(8192)
    ctypes.memset(source, 5, 8192)
    wide = plane(w, srcMemoryType=HOST, dstMemoryType=HOST, srcHost=source, dstHost=target)
    to, at = [cu.CUdeviceptr(target)], [cu.CUdeviceptr(source)]
    forms = (
        partial(cu.cuMemcpyAsync, target, source, 64, w.stream),
        partial(cu.cuMemcpy2DAsync, wide, w.stream),
        partial(cu.cuMemcpyBatchAsync, to, at, [64], 1, [attributes()], [0], 1, w.stream),
    )
    blocks = []
    for form in forms:
        sim.stall()
        call = Background(w, form)
        blocks.append(call.blocks(0.1))
        sim.stall(False)
        need(call.answer())
    need(cu.cuStreamSynchronize(w.stream))
    return [blocks, ctypes.c_uint8.from_address(target).value]


@pytest.mark.parametrize("waits", [1, 0])
def test_a_copy_from_host_to_host_blocks_its_caller(sim: Simulation, waits: int) -> None:
    assert sim.run(host_to_host, host_copy_waits=waits) == [[bool(waits)] * 3, 5]


def unmapped_early(parent: Parent) -> object:
    """The caller unmaps registered pages under queued work; another mapping sees what it wrote."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w, sim = world(), Simulator.loaded()
    fd = os.memfd_create("words")
    os.ftruncate(fd, 4096)
    area, address = shared_words(fd)
    need(cu.cuMemHostRegister(address, 4096, 3))
    sim.stall()
    need(cu.cuStreamWriteValue64(w.stream, address, 5, 0))
    gc.collect()
    area.close()
    sim.stall(False)
    answers = [code(cu.cuStreamSynchronize(w.stream)), code(cu.cuMemHostUnregister(address))]
    return [*answers, os.pread(fd, 8, 0)[0]]


def test_registered_pages_outlive_their_mapping(sim: Simulation) -> None:
    assert sim.run(unmapped_early) == ["SUCCESS", "SUCCESS", 5]
