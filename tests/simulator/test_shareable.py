"""Physical memory and pools: their switches, fds, limits."""

from __future__ import annotations

import os
import resource

import pytest

from tests.simulator.control import Simulator
from tests.simulator.harness import Parent, Simulation
from tests.simulator.programs import MIB, code, fetch, world

pytestmark = pytest.mark.simulator
CHUNK = 2 * MIB


def support(parent: Parent) -> object:
    """Attribute and behaviour of each shareable kind."""
    from cuda.bindings import driver as cu

    w = world()
    which = cu.CUdevice_attribute
    asked = (
        which.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        which.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        which.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
    )
    claims = [int(cu.cuDeviceGetAttribute(one, w.device)[1]) for one in asked]
    private, shared = (cu.cuMemCreate(CHUNK, w.properties(types), 0) for types in (0, 1))
    pools = [code(cu.cuMemPoolCreate(w.pool_properties(types))) for types in (0, 1)]
    return {"claims": claims, "physical": [code(private), code(shared)], "pools": pools}


def test_platforms_without_a_kind(sim: Simulation) -> None:
    assert sim.run(support) == {"claims": [1, 1, 1], "physical": ["SUCCESS"] * 2, "pools": ["SUCCESS"] * 2}
    none = sim.run(support, vmm=0, pools=0)
    assert none == {"claims": [0, 0, 0], "physical": ["NOT_SUPPORTED"] * 2, "pools": ["NOT_SUPPORTED"] * 2}
    lying = sim.run(support, fd_handles=0, attributes="103=1")
    assert lying["claims"][1] == 1
    assert lying["physical"] == lying["pools"] == ["SUCCESS", "NOT_SUPPORTED"]


def fabric(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    w = world()
    kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    made = cu.cuMemCreate(CHUNK, w.properties(8), 0)
    if code(made) != "SUCCESS":
        return [code(made)]
    shared = cu.cuMemExportToShareableHandle(made[1], kind, 0)
    if code(shared) != "SUCCESS":
        return ["SUCCESS", code(shared)]
    start, again = w.mapped(1), w.reserve(CHUNK)
    del start
    imported = cu.cuMemImportFromShareableHandle(shared[1].getPtr(), kind)
    mapped = cu.cuMemMap(again, CHUNK, 0, imported[1], 0)
    return ["SUCCESS", "SUCCESS", code(imported), code(mapped), code(cu.cuMemUnmap(again, CHUNK))]


def test_fabric_handles(sim: Simulation) -> None:
    """Refused though the attribute says yes, working, not there, or accepted and then not exportable."""
    assert sim.run(fabric) == ["NOT_PERMITTED"]
    assert sim.run(fabric, fabric=1) == ["SUCCESS"] * 5
    assert sim.run(fabric, fabric=2) == ["NOT_SUPPORTED"]
    assert sim.run(fabric, fabric=3) == ["SUCCESS", "NOT_PERMITTED"]


def fd_rules(parent: Parent) -> object:
    """Whose the fd is after an import, and whether it may close before the map."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w = world()
    kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    fd = int(need(cu.cuMemExportToShareableHandle(w.physical(), kind, 0)))
    handle = need(cu.cuMemImportFromShareableHandle(fd, kind))
    try:
        os.close(fd)
        ours = True
    except OSError:
        ours = False
    start = w.reserve(CHUNK)
    mapped = code(cu.cuMemMap(start, CHUNK, 0, handle, 0))
    cu.cuMemUnmap(start, CHUNK)
    return [ours, mapped, code(cu.cuMemRelease(handle))]


def test_who_owns_the_fd(sim: Simulation) -> None:
    assert sim.run(fd_rules, fd_mode=0) == [True, "SUCCESS", "SUCCESS"]
    assert sim.run(fd_rules, fd_mode=1) == [False, "SUCCESS", "SUCCESS"]
    assert sim.run(fd_rules, fd_mode=2) == [True, "MAP_FAILED", "SUCCESS"]


def map_over_live(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w, sim = world(), Simulator.loaded()
    start, other = w.mapped(1), w.physical()
    refused = code(cu.cuMemMap(start, CHUNK, 0, other, 0))
    sim.set("map_live", 1)
    taken = code(cu.cuMemMap(start, CHUNK, 0, other, 0))
    need(cu.cuMemSetAccess(start, CHUNK, [w.access()], 1))
    return [refused, taken, sim.report()["live_maps"]]


def test_mapping_over_a_live_mapping(sim: Simulation) -> None:
    refused, taken, maps = sim.run(map_over_live)
    assert (refused, taken, maps) == ("INVALID_VALUE", "SUCCESS", 1)


def address_budget(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    w, sim = world(), Simulator.loaded()
    sizes = [code(cu.cuMemAddressReserve(size * MIB, 0, 0, 0)) for size in (40, 40, 20, 2)]
    return [
        sizes,
        sim.report()["reserved_bytes"] // MIB,
        code(cu.cuMemAlloc(4 * MIB)),
        code(w.context and (cu.cuCtxSynchronize())),
    ]


def test_address_space_runs_out(sim: Simulation) -> None:
    sizes, reserved, alloc, sync = sim.run(address_budget, va_limit_mb=100)
    assert sizes == ["SUCCESS", "SUCCESS", "SUCCESS", "OUT_OF_MEMORY"]
    assert (reserved, alloc, sync) == (100, "OUT_OF_MEMORY", "SUCCESS")


def out_of_fds(parent: Parent) -> object:
    """With no fd left: create, export, import, open fail by code and recover."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w, sim = world(), Simulator.loaded()
    kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    physical = w.physical()
    fd = int(need(cu.cuMemExportToShareableHandle(physical, kind, 0)))
    before = sim.report()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, hard))
    answers = [
        code(cu.cuMemCreate(CHUNK, w.properties(), 0)),
        code(cu.cuMemExportToShareableHandle(physical, kind, 0)),
        code(cu.cuMemImportFromShareableHandle(fd, kind)),
        code(cu.cuMemAlloc(4 * MIB)),
        code(cu.cuMemPoolCreate(w.pool_properties())),
    ]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for one in [*taken, fd]:
        os.close(one)
    after = sim.report()
    again = code(cu.cuMemCreate(CHUNK, w.properties(), 0))
    return {"answers": answers, "again": again, "held": after["fds"] - before["fds"], "live": after["live_physical"]}


def test_no_fds_left(sim: Simulation) -> None:
    found = sim.run(out_of_fds)
    assert found == {"answers": ["OPERATING_SYSTEM"] * 5, "again": "SUCCESS", "held": 0, "live": 1}


def cycles(parent: Parent) -> object:
    """Many rounds of every kind of object; what is left afterwards."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w, sim = world(), Simulator.loaded()
    kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    fetch(w.alloc(4), 4)  # the default stream is there
    before, fds = sim.report().counters, len(os.listdir("/proc/self/fd"))
    for _ in range(60):
        with w.scope():
            start = w.mapped(2)
            handle = need(cu.cuMemRetainAllocationHandle(start))
            fd = int(need(cu.cuMemExportToShareableHandle(handle, kind, 0)))
            imported = need(cu.cuMemImportFromShareableHandle(fd, kind))
            os.close(fd)
            need(cu.cuMemRelease(imported))
            need(cu.cuMemRelease(handle))
            w.pooled(4096, w.pool())
            w.alloc(1000), w.alloc(4 * MIB), w.event(6), w.event(2), w.registered(4096), w.pinned(4096)
            need(cu.cuStreamDestroy(need(cu.cuStreamCreate(1))))
    after = sim.report().counters
    grown = {name: after[name] - before[name] for name in after if name.startswith("live_") or name == "fds"}
    return {"grown": {name: n for name, n in grown.items() if n}, "fds": len(os.listdir("/proc/self/fd")) - fds}


def test_everything_comes_back(sim: Simulation) -> None:
    assert sim.run(cycles) == {"grown": {}, "fds": 0}


def forgotten(parent: Parent) -> object:
    """What is not given back is counted by kind."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w, sim = world(), Simulator.loaded()
    before, live = sim.report().counters, sim.live()
    need(cu.cuMemAlloc(100))
    handle = need(cu.cuMemCreate(CHUNK, w.properties(), 0))
    start = int(need(cu.cuMemAddressReserve(CHUNK, 0, 0, 0)))
    need(cu.cuMemMap(start, CHUNK, 0, handle, 0))
    pool = need(cu.cuMemPoolCreate(w.pool_properties()))
    need(cu.cuMemAllocFromPoolAsync(100, pool, w.stream))
    need(cu.cuEventCreate(6))
    need(cu.cuStreamCreate(1))
    need(cu.cuMemHostRegister(w.pages(4096), 4096, 0))
    after = sim.report().counters
    kinds = (
        "allocations",
        "physical",
        "reservations",
        "maps",
        "pools",
        "pool_pointers",
        "events",
        "ipc_events",
        "streams",
        "registrations",
    )
    return {**{kind: after[f"live_{kind}"] - before[f"live_{kind}"] for kind in kinds}, "all": sim.live() - live}


def test_leaks_are_counted_by_kind(sim: Simulation) -> None:
    found = sim.run(forgotten)
    assert found.pop("all") == 9
    assert set(found.values()) == {1}
