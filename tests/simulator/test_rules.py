"""Fault rules: when they strike and what they do."""

from __future__ import annotations

import signal
import time

import pytest

from tests.simulator.control import Simulator, SimulatorError
from tests.simulator.harness import ChildFailed, Parent, Simulation
from tests.simulator.programs import code, fetch, world

pytestmark = pytest.mark.simulator


def strikes(parent: Parent) -> object:
    """For each rule, which of eight calls of one kind fail."""
    from cuda.bindings import driver as cu

    world()
    sim = Simulator.loaded()
    found = {}
    for when in ("1", "3", "2-4", "6+", "*", "/3", "%50"):
        sim.clear_faults()
        sim.inject(f"cuMemGetInfo_v2@{when}=999")
        found[when] = [int(code(cu.cuMemGetInfo()) == "UNKNOWN") for _ in range(8)]
    sim.clear_faults()
    return found


def test_when_a_rule_strikes(sim: Simulation) -> None:
    found = sim.run(strikes)
    again = sim.run(strikes)
    assert found["1"] == [1, 0, 0, 0, 0, 0, 0, 0]
    assert found["3"] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert found["2-4"] == [0, 1, 1, 1, 0, 0, 0, 0]
    assert found["6+"] == [0, 0, 0, 0, 0, 1, 1, 1]
    assert found["*"] == [1] * 8
    assert found["/3"] == [0, 0, 1, 0, 0, 1, 0, 0]
    assert 0 < sum(found["%50"]) < 8
    assert found == again  # chance is repeatable
    other = sim.run(strikes, seed=7)
    assert other["%50"] != found["%50"]


def actions(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    w, sim = world(), Simulator.loaded()
    found: dict[str, object] = {}
    sim.inject("cuMemAlloc_v2@1=2")
    found["code"] = [code(cu.cuMemAlloc(100)), sim.report()["live_allocations"]]
    sim.inject("cuMemAlloc_v2@1=after:2")  # the call is made and its answer lost
    found["after"] = [code(cu.cuMemAlloc(100)), sim.report()["live_allocations"]]
    sim.inject("cuMemAlloc_v2@1=sleep:60")
    began = time.monotonic()
    found["sleep"] = [code(cu.cuMemAlloc(100)), time.monotonic() - began > 0.055]
    sim.inject("cuIpc*@2=801")
    small = w.alloc(100)
    found["glob"] = [code(cu.cuIpcGetMemHandle(small)), code(cu.cuIpcGetEventHandle(w.event(6)))]
    sim.clear_faults()
    found["cleared"] = code(cu.cuIpcGetMemHandle(small))
    refused = []
    for rule in ("nothing", "cuInit@x=1", "cuInit@1=maybe", "@1=2", "cuInit@0=1", "cuInit@4-2=1", "cuInit@1=sleep:"):
        try:
            sim.inject(rule)
        except SimulatorError:
            refused.append(rule)
    found["refused"] = len(refused)
    found["calls"] = [sim.calls("cuMemAlloc"), sim.calls("cuMemAlloc_v2"), sim.calls("cuIpc*")]
    found["failures"] = sim.report().calls["cuMemAlloc_v2"].failures
    sim.inject("cuCtxSynchronize@1=sticky:719")
    found["sticky"] = [code(cu.cuCtxSynchronize()), code(cu.cuMemAlloc(100)), code(cu.cuStreamQuery(w.stream))]
    return found


def test_what_a_rule_does(sim: Simulation) -> None:
    found = sim.run(actions)
    assert found["code"] == ["OUT_OF_MEMORY", 0]
    assert found["after"] == ["OUT_OF_MEMORY", 1]
    assert found["sleep"] == ["SUCCESS", True]
    assert found["glob"] == ["SUCCESS", "NOT_SUPPORTED"]
    assert found["cleared"] == "SUCCESS"
    assert found["refused"] == 7
    assert found["calls"] == [4, 4, 3]
    assert found["failures"] == 2
    assert found["sticky"] == ["LAUNCH_FAILED"] * 3


def deadly(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    world()
    parent.send("started")
    return code(cu.cuMemGetInfo())


@pytest.mark.parametrize(
    ("action", "number"), [("kill", signal.SIGKILL), ("segv", signal.SIGSEGV), ("abort", signal.SIGABRT)]
)
def test_a_rule_can_end_the_process(sim: Simulation, action: str, number: int) -> None:
    with sim.start(deadly, fault=f"cuMemGetInfo_v2@1={action}") as child:
        assert child.receive() == "started"
        assert child.status() == -number


def test_a_call_can_hang(sim: Simulation) -> None:
    with sim.start(deadly, fault="cuMemGetInfo_v2@1=hang") as child:
        assert child.receive() == "started"
        with pytest.raises(ChildFailed, match="silent"):
            child.result(0.3)


def test_a_call_can_stop_the_process(sim: Simulation) -> None:
    with sim.start(deadly, fault="cuMemGetInfo_v2@1=stop") as child:
        assert child.receive() == "started"
        with pytest.raises(ChildFailed, match="silent"):
            child.result(0.3)
        child.kill(signal.SIGCONT)
        assert child.result() == "SUCCESS"


def test_death_at_the_nth_call_of_any_name(sim: Simulation) -> None:
    """Name resolution does not count: call 1 is the first real one."""
    with sim.start(deadly, fault="*@1=kill") as child:
        assert child.status() == -signal.SIGKILL
    with sim.start(deadly, fault="cu*@6=kill") as child:
        assert child.receive() == "started"  # init, device, retain, current, stream
        assert child.status() == -signal.SIGKILL


def test_an_unreadable_rule_ends_the_start(sim: Simulation) -> None:
    with sim.start(deadly, fault="cuInit=1") as child:
        assert child.status() == -signal.SIGABRT


@pytest.mark.parametrize("number", [34, 100, 802, 803, 804, 999])
def test_start_up_answers(sim: Simulation, number: int) -> None:
    """A stub library, no device, mismatched versions."""
    assert sim.run(start_up, fault=f"cuInit@*={number}") == number


def start_up(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    return int(cu.cuInit(0)[0])


def work_faults(parent: Parent) -> object:
    """Faults of queued work, by the kind of work."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w, sim = world(), Simulator.loaded()
    device, pinned = w.alloc(4096), w.pinned(4096)
    sim.inject("work.copy@1=sleep:80")
    need(cu.cuMemcpyAsync(pinned, device, 4096, w.stream))
    slow = [code(cu.cuStreamQuery(w.stream)), code(cu.cuStreamSynchronize(w.stream))]
    sim.inject("work.copy@1=700")
    queued = code(cu.cuMemcpyAsync(pinned, device, 4096, w.stream))
    late = [code(cu.cuStreamSynchronize(w.stream)), code(cu.cuMemAlloc(8)), sim.report()["dropped"]]
    return {"slow": slow, "queued": queued, "late": late}


def test_queued_work_can_fail_or_drag(sim: Simulation) -> None:
    found = sim.run(work_faults)
    assert found["slow"] == ["NOT_READY", "SUCCESS"]
    assert found["queued"] == "SUCCESS"
    assert found["late"] == ["ILLEGAL_ADDRESS", "ILLEGAL_ADDRESS", 1]


def endless_copy(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w = world()
    device, pinned = w.alloc(4096), w.pinned(4096)
    Simulator.loaded().inject("work.copy@1=hang")
    need(cu.cuMemcpyAsync(pinned, device, 4096, w.stream))
    time.sleep(0.3)  # it is in the endless copy
    other = need(cu.cuStreamCreate(1))
    need(cu.cuMemcpyAsync(pinned, device, 4096, other))
    parent.send([code(cu.cuStreamQuery(w.stream)), code(cu.cuStreamSynchronize(other)), len(fetch(device, 8))])
    parent.receive()
    return None


def test_a_copy_that_never_ends(sim: Simulation) -> None:
    """It holds its stream and one engine, nothing else."""
    with sim.start(endless_copy) as child:
        assert child.receive() == ["NOT_READY", "SUCCESS", 8]
