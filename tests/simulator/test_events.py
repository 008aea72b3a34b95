"""Events under their switches: readiness, limits, costs, destroyed handles, remembered records."""

from __future__ import annotations

import time

import pytest

from tests.simulator.control import Simulator
from tests.simulator.harness import Parent, Simulation
from tests.simulator.programs import Background, code, world

pytestmark = pytest.mark.simulator


def event_switches(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w, sim = world(), Simulator.loaded()
    event = w.event(6)
    found: dict[str, object] = {}
    sim.stall()
    need(cu.cuMemsetD8Async(w.alloc(64), 0, 64, w.stream))
    need(cu.cuEventRecord(event, w.stream))
    honest = code(cu.cuEventQuery(event))
    sim.set("event_ready", 1)
    found["always_ready"] = [honest, code(cu.cuEventQuery(event))]
    sim.set("event_ready", 0)
    sim.set("event_destroy_drains", 1)
    doomed = need(cu.cuEventCreate(6))
    need(cu.cuEventRecord(doomed, w.stream))
    destroy = Background(w, lambda: cu.cuEventDestroy(doomed))
    found["drains"] = destroy.blocks()
    sim.stall(False)
    destroy.answer()
    sim.set("event_destroy_drains", 0)
    sim.set("event_destroy_ms", 60)
    began = time.monotonic()
    need(cu.cuEventDestroy(need(cu.cuEventCreate(6))))
    shared = time.monotonic() - began
    began = time.monotonic()
    need(cu.cuEventDestroy(need(cu.cuEventCreate(2))))
    found["costly"] = [shared > 0.055, time.monotonic() - began < 0.055]
    sim.set("event_destroy_ms", 0)
    sim.set("event_limit", 3)
    found["limit"] = [code(cu.cuEventCreate(flags)) for flags in (6, 6, 6, 2)]
    sim.set("ipc_events", 0)
    which = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED
    found["none"] = [
        int(cu.cuDeviceGetAttribute(which, w.device)[1]),
        code(cu.cuEventCreate(6)),
        code(cu.cuEventCreate(2)),
    ]
    return found


def test_event_switches(sim: Simulation) -> None:
    found = sim.run(event_switches)
    assert found["always_ready"] == ["NOT_READY", "SUCCESS"]
    assert found["drains"] is True
    assert found["costly"] == [True, True]
    assert found["limit"] == ["SUCCESS", "SUCCESS", "OUT_OF_MEMORY", "SUCCESS"]
    assert found["none"] == [0, "NOT_SUPPORTED", "SUCCESS"]


def event_destroyer(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need, raw

    world()
    event = need(cu.cuEventCreate(6))
    handle = raw(need(cu.cuIpcGetEventHandle(event))).hex()
    need(cu.cuEventDestroy(event))
    parent.send(handle)
    parent.receive()
    return None


def event_opener(parent: Parent, handle: str) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import from_raw

    world()
    return code(cu.cuIpcOpenEventHandle(from_raw(cu.CUipcEventHandle, bytes.fromhex(handle))))


@pytest.mark.parametrize(("dies", "answer"), [(0, "SUCCESS"), (1, "MAP_FAILED")])
def test_the_handle_of_a_destroyed_event(sim: Simulation, dies: int, answer: str) -> None:
    """It still opens while its process lives, as on hardware; with the switch it does not."""
    with sim.start(event_destroyer, event_handle_dies=dies) as child:
        assert sim.run(event_opener, child.receive()) == answer
        child.send("end")


def event_tickets(parent: Parent) -> object:
    """A wait remembers the record it saw: a later one neither shortens nor prolongs it."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w, sim = world(), Simulator.loaded()
    slow, quick, waiter = (need(cu.cuStreamCreate(1)) for _ in range(3))
    event, device = w.event(2), w.alloc(64)
    sim.stall(stream=int(slow))
    need(cu.cuMemsetD8Async(device, 1, 64, slow))
    need(cu.cuEventRecord(event, slow))
    need(cu.cuStreamWaitEvent(waiter, event, 0))
    need(cu.cuEventRecord(event, quick))
    need(cu.cuEventSynchronize(event))
    early = [code(cu.cuEventQuery(event)), code(cu.cuStreamQuery(waiter))]
    sim.stall(False, stream=int(slow))
    return [*early, code(cu.cuStreamSynchronize(waiter))]


def test_a_wait_keeps_the_record_it_saw(sim: Simulation) -> None:
    assert sim.run(event_tickets) == ["SUCCESS", "NOT_READY", "SUCCESS"]
