"""Streams and values under their switches: stalls, waits, drains, order."""

from __future__ import annotations

import ctypes
import time

import pytest

from tests.simulator.control import Simulator
from tests.simulator.harness import Parent, Simulation
from tests.simulator.programs import MIB, Background, code, fetch, world

pytestmark = pytest.mark.simulator


def stalls(parent: Parent) -> object:
    """All streams, then one; a queued copy is not there until released."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w, sim = world(), Simulator.loaded()
    other = need(cu.cuStreamCreate(1))
    device, pinned = w.alloc(4096), w.pinned(4096)
    need(cu.cuMemsetD8(device, 5, 4096))
    found: dict[str, object] = {}
    sim.stall()
    need(cu.cuMemcpyAsync(pinned, device, 4096, w.stream))
    time.sleep(0.02)
    found["all"] = [code(cu.cuStreamQuery(w.stream)), ctypes.string_at(pinned, 1)[0]]
    sim.stall(False)
    need(cu.cuStreamSynchronize(w.stream))
    found["released"] = ctypes.string_at(pinned, 1)[0]
    sim.stall(stream=int(w.stream))
    need(cu.cuMemsetD8Async(device, 6, 4096, w.stream))
    need(cu.cuMemsetD8Async(device + 100, 7, 100, other))
    found["other"] = [code(cu.cuStreamSynchronize(other)), code(cu.cuStreamQuery(w.stream))]
    sim.stall(False, stream=int(w.stream))
    found["one"] = code(cu.cuStreamSynchronize(w.stream))
    return found


def test_stalls_are_deterministic(sim: Simulation) -> None:
    found = sim.run(stalls)
    assert found["all"] == ["NOT_READY", 0]
    assert found["released"] == 5
    assert found["other"] == ["SUCCESS", "NOT_READY"]
    assert found["one"] == "SUCCESS"


def default_order(parent: Parent) -> object:
    """The default stream and blocking streams order each other; non-blocking ones do not."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w, sim = world(), Simulator.loaded()
    blocking = need(cu.cuStreamCreate(0))
    device = w.alloc(4096)
    sim.stall(stream=int(blocking))
    need(cu.cuMemsetD8Async(device, 1, 16, blocking))
    need(cu.cuMemsetD8Async(device, 2, 16, w.null))
    need(cu.cuMemsetD8Async(device + 16, 3, 16, w.stream))
    found = [code(cu.cuStreamSynchronize(w.stream)), code(cu.cuStreamQuery(w.null))]
    sim.stall(False, stream=int(blocking))
    found.append(code(cu.cuStreamSynchronize(w.null)))
    return [*found, fetch(device, 1)[0]]


def test_the_default_streams_order(sim: Simulation) -> None:
    assert sim.run(default_order) == ["SUCCESS", "NOT_READY", "SUCCESS", 2]


def memop_switches(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w, sim = world(), Simulator.loaded()
    word = w.registered(4096)
    pinned = w.pinned(64)
    which = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
    sim.set("memops", 0)
    absent = [int(cu.cuDeviceGetAttribute(which, w.device)[1]), code(cu.cuStreamWriteValue64(w.stream, word, 1, 0))]
    sim.set("memops", 1)
    sim.set("memops_progress", 0)
    need(cu.cuStreamWaitValue64(w.stream, word, 0, 0))  # true from the start
    time.sleep(0.05)
    stuck = [
        int(cu.cuDeviceGetAttribute(which, w.device)[1]),
        code(cu.cuStreamQuery(w.stream)),
        sim.report()["pending_waits"],
    ]
    sim.set("memops_progress", 1)
    need(cu.cuStreamSynchronize(w.stream))
    need(cu.cuStreamWaitValue64(w.stream, word, 5, 0))
    large = []
    for value in (2**64 - 1, 2**63 - 1):  # the host writes; only the second is "at least 5"
        ctypes.c_uint64.from_address(word).value = value
        time.sleep(0.03)
        large.append(code(cu.cuStreamQuery(w.stream)))
    need(cu.cuMemcpyAsync(pinned, word, 8, w.stream))
    need(cu.cuStreamSynchronize(w.stream))
    return {"absent": absent, "stuck": stuck, "large": large, "pending": sim.report()["pending_waits"]}


def test_value_operations(sim: Simulation) -> None:
    found = sim.run(memop_switches)
    assert found["absent"] == [0, "NOT_SUPPORTED"]
    assert found["stuck"] == [1, "NOT_READY", 1]
    assert found["large"] == ["NOT_READY", "SUCCESS"]
    assert found["pending"] == 0


PTX = b".version 7.0\n.target sm_50\n.address_size 64\n.visible .entry k()\n{\n ret;\n}\n\0"


def lender(parent: Parent) -> object:
    """Keeps an exported classic allocation until told to end."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need, raw

    parent.send(raw(need(cu.cuIpcGetMemHandle(world().alloc(4 * MIB)))).hex())
    return parent.receive()


def drains(parent: Parent, handle: str) -> object:
    """While a value wait is pending: what blocks, and what it is released by."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import from_raw, need

    w = world()
    other = need(cu.cuStreamCreate(1))
    module = need(cu.cuModuleLoadData(PTX))
    warm = need(cu.cuModuleGetFunction(module, b"k"))
    need(cu.cuLaunchKernel(warm, 1, 1, 1, 1, 1, 1, 0, other, 0, 0))
    cold = need(cu.cuModuleGetFunction(need(cu.cuModuleLoadData(PTX)), b"k"))
    word, spare, device = w.registered(4096), w.pages(4096), int(need(cu.cuMemAlloc(4 * MIB)))
    need(cu.cuMemHostRegister(spare, 4096, 3))
    opened = int(need(cu.cuIpcOpenMemHandle(from_raw(cu.CUipcMemHandle, bytes.fromhex(handle)), 1)))
    mapped, pooled = w.mapped(1), int(need(cu.cuMemAllocFromPoolAsync(4096, w.pool(), other)))
    need(cu.cuStreamWaitValue64(w.stream, word, 1, 0))
    deadline = time.monotonic() + 10
    while not Simulator.loaded().report()["pending_waits"]:
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    launch = (1, 1, 1, 1, 1, 1, 0, other, 0, 0)
    calls = {
        "load": Background(w, lambda: cu.cuModuleLoadData(PTX)),
        "cold": Background(w, lambda: cu.cuLaunchKernel(cold, *launch)),
        "free": Background(w, lambda: cu.cuMemFree(device)),
        "unregister": Background(w, lambda: cu.cuMemHostUnregister(spare)),
        "close": Background(w, lambda: cu.cuIpcCloseMemHandle(opened)),
        "unmap": Background(w, lambda: cu.cuMemUnmap(mapped, 2 * MIB)),
        "pooled": Background(w, lambda: cu.cuMemFreeAsync(pooled, other)),
        "function": Background(w, lambda: cu.cuModuleGetFunction(module, b"k")),
        "warm": Background(w, lambda: cu.cuLaunchKernel(warm, *launch)),
        "copy": Background(w, lambda: cu.cuMemsetD8Async(w.alloc(64), 0, 64, other)),
        "export": Background(w, lambda: cu.cuIpcGetMemHandle(device)),
    }
    time.sleep(0.1)
    blocked = sorted(name for name, call in calls.items() if call.blocks(0.02))
    ctypes.c_uint64.from_address(word).value = 1
    answers = sorted({code(call.answer()) for call in calls.values()})
    return [blocked, answers, Simulator.loaded().report()["drained_calls"]]


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_what_blocks_while_a_wait_is_pending(sim: Simulation, mode: int) -> None:
    with sim.start(lender) as owner:
        found = sim.run(drains, owner.receive(), drain=mode)
        owner.send("end")
    blocked = ["close", "free", "load", "unregister"] if mode else []
    assert found == [blocked, ["SUCCESS"], len(blocked)]


def free_with_queued_work(parent: Parent) -> object:
    """Freeing waits for queued work of the context; without that rule the work finds nothing."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w, sim = world(), Simulator.loaded()
    device = int(need(cu.cuMemAlloc(4 * MIB)))
    sim.stall()
    need(cu.cuMemsetD8Async(device, 1, 4 * MIB, w.stream))
    free = Background(w, lambda: cu.cuMemFree(device))
    blocked = free.blocks()
    sim.stall(False)
    return [blocked, code(free.answer()), code(cu.cuStreamSynchronize(w.stream))]


def test_a_free_waits_for_queued_work(sim: Simulation) -> None:
    assert sim.run(free_with_queued_work) == [True, "SUCCESS", "SUCCESS"]
    assert sim.run(free_with_queued_work, drain=1) == [False, "SUCCESS", "ILLEGAL_ADDRESS"]


def timing(parent: Parent) -> object:
    """Delays, rates, queue depth, lazy writes, priorities."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w, sim = world(), Simulator.loaded()
    device, pinned = w.alloc(4 * MIB), w.pinned(4 * MIB)
    found: dict[str, object] = {}

    def timed(name: str, switch: str, value: int, nbytes: int) -> None:
        sim.set(switch, value)
        began = time.monotonic()
        need(cu.cuMemcpyAsync(pinned, device, nbytes, w.stream))
        need(cu.cuStreamSynchronize(w.stream))
        found[name] = time.monotonic() - began
        sim.set(switch, 0)

    timed("delay", "delay_us", 60_000, 64)
    timed("rate", "copy_mbps", 40, 4 * MIB)
    sim.stall()
    sim.set("queue_depth", 4)
    for _ in range(4):
        need(cu.cuMemsetD8Async(device, 1, 64, w.stream))
    fifth = Background(w, lambda: cu.cuMemsetD8Async(device, 1, 64, w.stream))
    found["depth"] = fifth.blocks()
    sim.stall(False)
    found["depth_released"] = code(fifth.answer())
    sim.set("queue_depth", 0)
    need(cu.cuStreamSynchronize(w.stream))
    sim.set("lazy_writes", 1)
    need(cu.cuMemcpyAsync(pinned, device, 64, w.stream))
    time.sleep(0.03)
    held = ctypes.string_at(pinned, 1)[0]
    need(cu.cuStreamWriteValue32(w.stream, device + 64, 9, 0))  # the fence
    time.sleep(0.03)
    found["lazy"] = [held, ctypes.string_at(pinned, 1)[0], code(cu.cuStreamQuery(w.stream))]
    need(cu.cuMemcpyAsync(pinned, device + 64, 1, w.stream))
    need(cu.cuStreamSynchronize(w.stream))
    found["lazy_sync"] = ctypes.string_at(pinned, 1)[0]
    return found


def test_time_and_visibility(sim: Simulation) -> None:
    found = sim.run(timing)
    assert found["delay"] >= 0.06
    assert found["rate"] >= 0.09
    assert (found["depth"], found["depth_released"]) == (True, "SUCCESS")
    assert found["lazy"] == [0, 1, "SUCCESS"]
    assert found["lazy_sync"] == 9


def priorities(parent: Parent) -> object:
    """One engine, many copies: the better priority finishes first though it came last."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w = world()
    low, high = (need(cu.cuStreamCreateWithPriority(1, priority)) for priority in (0, -5))
    device, pinned = w.alloc(MIB), w.pinned(MIB)
    events = [w.event(0), w.event(0)]
    for _ in range(6):
        need(cu.cuMemcpyAsync(pinned, device, MIB, low))
    need(cu.cuEventRecord(events[0], low))
    need(cu.cuMemcpyAsync(pinned, device, MIB, high))
    need(cu.cuEventRecord(events[1], high))
    need(cu.cuEventSynchronize(events[1]))
    first = code(cu.cuEventQuery(events[0]))
    need(cu.cuEventSynchronize(events[0]))
    return [first, Simulator.loaded().report()["copies"]]


def test_the_better_priority_goes_first(sim: Simulation) -> None:
    assert sim.run(priorities, engines=1, copy_mbps=100) == ["NOT_READY", 7]


def kernels_and_host_calls(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w, sim = world(), Simulator.loaded()
    seen: list[int] = []
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    call = kind(lambda argument: seen.append(argument or 0))
    function = need(cu.cuModuleGetFunction(need(cu.cuModuleLoadData(PTX)), b"k"))
    sim.set("kernel_us", 50_000)
    began = time.monotonic()
    need(cu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, w.stream, 0, 0))
    need(cu.cuLaunchHostFunc(w.stream, cu.CUhostFn(_ptr=ctypes.addressof(call)), 77))
    queued = time.monotonic() - began
    need(cu.cuStreamSynchronize(w.stream))
    report = sim.report()
    return [queued < 0.05, time.monotonic() - began >= 0.05, seen, report["launches"], report["host_calls"]]


def test_kernels_and_host_functions(sim: Simulation) -> None:
    assert sim.run(kernels_and_host_calls) == [True, True, [77], 1, 1]


def concurrent(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    w, sim = world(), Simulator.loaded()
    sim.inject("cuMemGetInfo_v2@*=sleep:40")
    quiet = sim.report()["concurrent_entries"]
    calls = [Background(w, cu.cuMemGetInfo) for _ in range(3)]
    answers = {code(call.answer()) for call in calls}
    report = sim.report()
    return [quiet, sorted(answers), report["concurrent_entries"] >= 2, report["concurrent_peak"] >= 2]


def test_concurrent_entries_are_counted(sim: Simulation) -> None:
    assert sim.run(concurrent) == [0, ["SUCCESS"], True, True]
