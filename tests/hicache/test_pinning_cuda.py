"""Host memory and a driver that registers less than asked, late, or at another address: on simulated CUDA."""

from __future__ import annotations

from typing import Any

import pytest

from devipc.errors import DevIPCError
from devipc.hicache.api import UNFENCED
from devipc.hicache.moving.arena import HostArena, Pinned
from devipc.registry import load_backend
from tests.hicache.scenario import done
from tests.hicache.scenarios_content import two_clients_and_two_pools_get_back_what_they_stored
from tests.hicache.world import world
from tests.simulator import build
from tests.simulator.harness import Parent, Simulation

pytestmark = pytest.mark.simulator


@pytest.fixture
def sim() -> Simulation:
    return Simulation(build.build("cuda"))


@pytest.mark.parametrize("switches", [{"pin_total_mb": 3}, {"pin_limit_mb": 2}], ids=str)
def test_pages_go_through_a_buffer_where_the_arena_cannot_be_pinned(sim: Simulation, switches: Any) -> None:
    assert sim.run(unpinned_round_trip, **switches) == {"pinned": False, "left": 0}


def unpinned_round_trip(_parent: Parent) -> dict[str, Any]:
    from tests.simulator.control import Simulator

    simulator = Simulator.loaded()
    before, device = simulator.live(), load_backend("cuda").open_device()
    with world(device) as it:  # four MiB of host memory in one registration
        status: Any = it.engine.status()
        memory, client = it.attention_pool(), it.client()
        handle = it.register(client, memory)
        keys = it.keys(handle, 8)
        memory.fill(range(1, 9), keys)
        done(client.backup(handle, range(1, 9), keys, ready=UNFENCED))
        memory.poison(range(20, 28))
        done(client.restore(handle, keys, range(20, 28), ready=UNFENCED))
        memory.check(range(20, 28), keys)
    device.close()
    return {"pinned": status["pinned"], "left": simulator.live() - before}


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_a_chunk_that_fails_leaves_nothing_pinned(sim: Simulation, failing: int) -> None:
    found = sim.run(failing_chunk, fault=f"cuMemHostRegister*@{failing}=2")
    assert found == {"code": "host_memory", "pinned_bytes": 0, "live": 0, "again": True}


def failing_chunk(_parent: Parent) -> dict[str, Any]:
    from tests.simulator.control import Simulator

    simulator, device = Simulator.loaded(), load_backend("cuda").open_device()
    transfer = device.transfer
    assert transfer is not None
    arena = HostArena(4 * 2**20)
    code = ""
    try:
        Pinned(arena, transfer, chunk_nbytes=2**20, required=True)
    except DevIPCError as error:
        code = error.code
    report = simulator.report()
    found = {"code": code, "pinned_bytes": report["pinned_bytes"], "live": report["live_registrations"]}
    pinned = Pinned(arena, transfer, chunk_nbytes=2**20, required=True)  # the failure has left no error behind
    again = pinned.pinned and simulator.counter("pinned_bytes") == arena.nbytes
    pinned.close()
    arena.close()
    device.close()
    return {**found, "again": again}


@pytest.mark.parametrize("switches", [{"host_pointer": 0}, {"memops": 0, "ipc_events": 0}, {"lazy_writes": 1}], ids=str)
def test_the_round_trip_under_other_drivers(sim: Simulation, switches: Any) -> None:
    assert sim.run(round_trip, **switches) == {"left": 0}


def round_trip(_parent: Parent) -> dict[str, Any]:
    from tests.simulator.control import Simulator

    simulator = Simulator.loaded()
    before, device = simulator.live(), load_backend("cuda").open_device()
    two_clients_and_two_pools_get_back_what_they_stored(device)
    device.close()
    return {"left": simulator.live() - before}
