"""Devices: identity, visibility, slices, peers, memory, versions, loss."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.simulator.control import Simulator
from tests.simulator.harness import Parent, Simulation
from tests.simulator.programs import MIB, code, fetch, world
from tests.simulator.test_handles import export, load

pytestmark = pytest.mark.simulator
UUIDS = ["d0e151700a5c4d2b9f310000000000" + f"{n:02x}" for n in (1, 2, 3)]


def listing(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    started = cu.cuInit(0)
    if code(started) != "SUCCESS":
        return code(started)
    count = int(cu.cuDeviceGetCount()[1])
    return [cu.cuDeviceGetUuid(cu.cuDeviceGet(i)[1])[1].bytes.hex() for i in range(count)]


def dashed(uuid: str) -> str:
    return f"{uuid[:8]}-{uuid[8:12]}-{uuid[12:16]}-{uuid[16:20]}-{uuid[20:]}"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("1,0", [1, 0]),
        ("2", [2]),
        ("0,0", [0]),
        ("1,9,0", [1]),
        (f"GPU-{dashed(UUIDS[2])}", [2]),
        (f"GPU-{UUIDS[0][:6]}", [0]),
        ("", None),
        ("-1", None),
        ("nonsense", None),
    ],
)
def test_visible_devices(sim: Simulation, visible: str, expected: list[int] | None) -> None:
    """The variable's rules: ordinals, full and short UUIDs, the list ends at the first bad entry."""
    found = sim.run(listing, devices=3, variables={"CUDA_VISIBLE_DEVICES": visible})
    assert found == ("NO_DEVICE" if expected is None else [UUIDS[i] for i in expected])


def test_order_and_number_of_devices(sim: Simulation) -> None:
    assert sim.run(listing, devices=1) == UUIDS[:1]
    assert sim.run(listing, devices=3, order="2,0,1") == [UUIDS[2], UUIDS[0], UUIDS[1]]
    assert sim.run(listing, devices=0) == "NO_DEVICE"


def owner(parent: Parent, ordinal: int) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w = world(ordinal)
    pointer = w.alloc(4 * MIB)
    need(cu.cuMemsetD8(pointer, 6, 64))
    parent.send(export(pointer))
    parent.receive()
    return None


def opener(parent: Parent, handle: str, ordinal: int) -> object:
    from cuda.bindings import driver as cu

    w = world(ordinal)
    count = int(cu.cuDeviceGetCount()[1])
    others = [cu.cuDeviceGet(i)[1] for i in range(count) if i != ordinal]
    can = [int(cu.cuDeviceCanAccessPeer(w.device, other)[1]) for other in others]
    answer, pointer = load(handle)
    if answer != "SUCCESS":
        return [answer, can]
    which = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return [answer, can, fetch(pointer, 1)[0], int(cu.cuPointerGetAttribute(which, pointer)[1])]


def test_peers_across_devices(sim: Simulation) -> None:
    """The query may lie in both directions; the open tells the truth."""
    with sim.start(owner, 1) as child:
        handle = child.receive()
        assert sim.run(opener, handle, 1) == ["SUCCESS", [1], 6, 1]
        assert sim.run(opener, handle, 0) == ["SUCCESS", [1], 6, 1]
        assert sim.run(opener, handle, 0, peer=0) == ["PEER_ACCESS_UNSUPPORTED", [0]]
        assert sim.run(opener, handle, 0, peer=0, peer_claim=1) == ["PEER_ACCESS_UNSUPPORTED", [1]]
        assert sim.run(opener, handle, 0, peer=1, peer_claim=0) == ["SUCCESS", [0], 6, 1]
        # reversed ordinals: the memory still is where it was
        assert sim.run(opener, handle, 0, order="1,0") == ["SUCCESS", [1], 6, 0]
        # the exporter's device is hidden here
        hidden = sim.run(opener, handle, 0, variables={"CUDA_VISIBLE_DEVICES": "0"})
        assert hidden == ["INVALID_DEVICE", []]
        child.send("end")


def names(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    cu.cuInit(0)
    return [cu.cuDeviceGetName(64, cu.cuDeviceGet(i)[1])[1].split(b"\0")[0].decode() for i in range(2)]


def test_slices_are_devices_of_their_own(sim: Simulation) -> None:
    assert sim.run(names, devices=1, slices=2) == ["Simulated accelerator 0 MIG 1g.4gb"] * 2
    found = sim.run(listing, devices=1, slices=2)
    assert len(set(found)) == 2
    assert UUIDS[0] not in found
    with sim.start(owner, 0, devices=1, slices=2) as child:
        handle = child.receive()
        assert sim.run(opener, handle, 0, devices=1, slices=2)[0] == "SUCCESS"
        assert sim.run(opener, handle, 1, devices=1, slices=2) == ["PEER_ACCESS_UNSUPPORTED", [0]]
        child.send("end")
    chosen = sim.run(listing, devices=1, slices=2, variables={"CUDA_VISIBLE_DEVICES": f"MIG-{dashed(found[1])}"})
    assert chosen == [found[1]]


def claim(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    cu.cuInit(0)
    device = cu.cuDeviceGet(0)[1]
    mode = int(cu.cuDeviceGetAttribute(cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, device)[1])
    parent.send([mode, code(cu.cuDevicePrimaryCtxRetain(device))])
    parent.receive()
    return None


def test_compute_modes(sim: Simulation) -> None:
    """Exclusive: one process per device, and a killed one frees it."""
    with sim.start(claim, compute_mode=2) as child:
        assert child.receive() == [2, "DEVICE_UNAVAILABLE"]
    with sim.start(claim, compute_mode=3) as first:
        assert first.receive() == [3, "SUCCESS"]
        with sim.start(claim, compute_mode=3) as second:
            assert second.receive() == [3, "DEVICE_UNAVAILABLE"]
        first.kill()
        first.status()
        with sim.start(claim, compute_mode=3) as third:
            assert third.receive() == [3, "SUCCESS"]


def fill_up(parent: Parent, nbytes: int) -> object:
    from cuda.bindings import driver as cu

    world()
    answer = cu.cuMemAlloc(nbytes)
    free, total = (int(n) for n in cu.cuMemGetInfo()[1:])
    parent.send([code(answer), free // MIB, total // MIB])
    parent.receive()
    return None


def test_memory_is_one_for_all_processes(sim: Simulation) -> None:
    with sim.start(fill_up, 60 * MIB, memory_mb=100) as first:
        assert first.receive() == ["SUCCESS", 40, 100]
        with sim.start(fill_up, 60 * MIB, memory_mb=100) as second:
            assert second.receive() == ["OUT_OF_MEMORY", 40, 100]
        first.kill()
        first.status()
        with sim.start(fill_up, 60 * MIB, memory_mb=100) as third:
            assert third.receive() == ["SUCCESS", 40, 100]


def hold(parent: Parent, handle: str) -> object:
    world()
    load(handle)
    parent.send("open")
    parent.receive()
    sim = Simulator.loaded()
    parent.send(sim.used_bytes(pid=os.getpid()))
    parent.receive()
    return None


@pytest.mark.parametrize(("holder", "charged"), [(0, [4, 4]), (1, [0, 4])])
def test_a_dead_owners_memory_is_charged(sim: Simulation, holder: int, charged: list[int]) -> None:
    """To every holder, or to the newest alone."""
    with sim.start(owner, 0) as child:
        handle = child.receive()
        with sim.start(hold, handle, holder=holder) as first, sim.start(hold, handle, holder=holder) as second:
            first.receive(), second.receive()
            child.kill()
            child.status()
            found = []
            for one in (first, second):
                one.send("ask")
                found.append(one.receive() // MIB)
            assert found == charged


def versions(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.copies import attributes

    w = world()
    a, b = cu.CUdeviceptr(w.alloc(64)), cu.CUdeviceptr(w.alloc(64))
    calls: list[Callable[[], Any]] = [
        lambda: cu.cuMemcpyBatchAsync([a], [b], [64], 1, [attributes()], [0], 1, w.stream),
        lambda: cu.cuStreamWriteValue64(w.stream, a, 1, 0),
    ]
    answers = []
    for call in calls:
        try:
            answers.append(code(call()))
        except RuntimeError as error:
            answers.append(type(error).__name__)
    return [int(cu.cuDriverGetVersion()[1]), *answers]


def test_old_drivers_and_missing_symbols(sim: Simulation) -> None:
    """An entry point that is newer than the driver, or removed by name, is not resolved."""
    assert sim.run(versions) == [13000, "SUCCESS", "SUCCESS"]
    assert sim.run(versions, driver_version=12040) == [12040, "FunctionNotFoundError", "SUCCESS"]
    assert sim.run(versions, missing="cuStreamWriteValue64_v2,cuMemcpyBatchAsync") == [
        13000,
        "FunctionNotFoundError",
        "FunctionNotFoundError",
    ]


def lies(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    w = world()
    which = cu.CUdevice_attribute
    asked = (which.CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, which.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)
    claims = [int(cu.cuDeviceGetAttribute(one, w.device)[1]) for one in asked]
    return [claims, code(cu.cuEventCreate(6)), code(cu.cuStreamWriteValue64(w.stream, w.alloc(8), 1, 0))]


def test_capability_bits_lie_both_ways(sim: Simulation) -> None:
    assert sim.run(lies) == [[1, 1], "SUCCESS", "SUCCESS"]
    assert sim.run(lies, attributes="125=0,122=0") == [[0, 0], "SUCCESS", "SUCCESS"]
    both_off = {"ipc_events": 0, "memops": 0, "attributes": "125=1,122=1"}
    assert sim.run(lies, **both_off) == [[1, 1], "NOT_SUPPORTED", "NOT_SUPPORTED"]


def lost(parent: Parent) -> object:
    """A sticky error ends everything on one device; waits return, the other device works."""
    from cuda.bindings import driver as cu

    from tests.simulator.programs import Background
    from tests.simulator.trace_cases.world import World, need

    w, sim = world(), Simulator.loaded()
    word, event, pointer = w.registered(4096), w.event(6), w.alloc(64)
    need(cu.cuStreamWaitValue64(w.stream, word, 1, 0))
    need(cu.cuEventRecord(event, w.stream))
    waiting = Background(w, lambda: cu.cuStreamSynchronize(w.stream))
    blocked = waiting.blocks()
    sim.lose(0, 719)
    answers = {code(waiting.answer())}
    calls: list[Callable[[], Any]] = [
        lambda: cu.cuMemAlloc(8), lambda: cu.cuStreamQuery(w.stream), lambda: cu.cuEventQuery(event),
        lambda: cu.cuMemFree(pointer), cu.cuCtxSynchronize, lambda: cu.cuIpcGetMemHandle(pointer),
        lambda: cu.cuMemHostUnregister(word), lambda: cu.cuStreamDestroy(w.stream),
    ]  # fmt: skip
    answers |= {code(call()) for call in calls}
    other = World(1)
    return [blocked, sorted(answers), len(fetch(other.alloc(64), 64))]


def test_a_lost_device_stays_lost(sim: Simulation) -> None:
    assert sim.run(lost) == [True, ["LAUNCH_FAILED"], 64]


def no_context(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    w = world()
    event = w.event()
    calls: list[Callable[[], Any]] = [
        lambda: cu.cuMemAlloc(8),
        cu.cuCtxSynchronize,
        lambda: cu.cuStreamQuery(w.stream),
        lambda: cu.cuEventQuery(event),
    ]
    return [code(w.without_context(call)) for call in calls]  # type: ignore[arg-type]


def test_contexts_are_per_thread(sim: Simulation) -> None:
    """Streams and events bring theirs along, unless the switch demands one everywhere."""
    assert sim.run(no_context) == ["INVALID_CONTEXT"] * 2 + ["SUCCESS"] * 2
    assert sim.run(no_context, need_context=0) == ["SUCCESS"] * 4
    assert sim.run(no_context, need_context=2) == ["INVALID_CONTEXT"] * 4


def wild(parent: Parent, which: str) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w = world()
    if which == "pool":
        return code(cu.cuMemPoolTrimTo(cu.CUmemoryPool(0x1234560), 0))
    if which == "physical":
        return code(cu.cuMemRelease(cu.CUmemGenericAllocationHandle(0x1234560)))
    if which == "context":
        need(cu.cuDevicePrimaryCtxRelease(w.device))
        return code(cu.cuStreamQuery(w.stream))
    stream = need(cu.cuStreamCreate(1))
    need(cu.cuStreamDestroy(stream))
    return code(cu.cuStreamQuery(stream))


@pytest.mark.parametrize("which", ["stream", "context", "pool", "physical"])
def test_handles_that_are_none_crash(sim: Simulation, which: str) -> None:
    with sim.start(wild, which) as child:
        assert child.status() == -signal.SIGSEGV
    expected = {"stream": "INVALID_HANDLE", "context": "INVALID_CONTEXT"}.get(which, "INVALID_VALUE")
    assert sim.run(wild, which, wild_crash=0) == expected


def zero_batch(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    w = world()
    return code(cu.cuMemcpyBatchAsync([], [], [], 0, [], [], 0, w.stream))


def test_a_batch_of_nothing_may_abort(sim: Simulation) -> None:
    assert sim.run(zero_batch) == "INVALID_VALUE"
    with sim.start(zero_batch, count_zero_abort=1) as child:
        assert child.status() == -signal.SIGABRT


def leftovers(parent: Parent) -> object:
    w, sim = world(), Simulator.loaded()
    seen = fetch(w.alloc(4 * MIB), 1)[0]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        fetch(w.alloc(64), 64)
    return [seen, len(os.listdir("/proc/self/fd")) - before, sim.report()["leaked"]]


def test_old_bytes_and_leaking_copies(sim: Simulation) -> None:
    clean, grown, leaked = sim.run(leftovers)
    assert (clean, grown <= 1, leaked) == (0, True, 0)
    seen, grown, leaked = sim.run(leftovers, dirty=1, leak_copy=1)
    assert (seen, leaked) == (0xD1, 6)
    assert grown >= 5


def forked(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    world()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, code(cu.cuMemAlloc(8)).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return [os.read(reader, 100).decode(), code(cu.cuMemAlloc(8))]


def test_a_forked_child_has_no_driver(sim: Simulation) -> None:
    assert sim.run(forked) == ["NOT_INITIALIZED", "SUCCESS"]


def imported_only(parent: Parent) -> object:
    import cuda.bindings.driver  # noqa: F401

    return Simulator.loaded().calls("cuInit")


def test_start_up_calls_are_counted(sim: Simulation) -> None:
    assert sim.run(imported_only) == 0
