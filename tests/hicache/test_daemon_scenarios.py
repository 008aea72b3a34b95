"""The end-to-end scenarios over ``unix:``: a supervisor, an engine process, rings or messages.

On the host backend under each strategy. On simulated drivers, where a device has none to offer too: the tests of each
backend, by :mod:`tests.hicache.matrix`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from devipc.channel.liveness import own_life
from devipc.interfaces.backend import Device
from devipc.registry import load_backend
from tests.hicache.deployment import DAEMON, INPROC, MESSAGES, NOTHING, deployed
from tests.hicache.matrix import COVERING
from tests.hicache.scenario import SCENARIOS, scenarios_of
from tests.simulator import build
from tests.simulator.harness import Parent, Simulation


@pytest.fixture(scope="module", autouse=True)
def _lasting() -> None:
    own_life()  # this process's sign of life, which peers get, outlasts a test


@pytest.fixture
def device() -> Iterator[Device]:
    opened = load_backend("host").open_device()
    yield opened
    opened.close()


QUICK = {
    "two_clients_and_two_pools_get_back_what_they_stored",
    "layers_arrive_group_by_group",
    "a_ready_point_that_fails_discards",
    "a_cancel_word_is_read_before_anything_is_published",
    "pages_outside_the_pool_never_reach_a_copy",
}
BY_COST = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in scenarios_of(DAEMON)]

BY_COVER = [
    pytest.param(name, marks=pytest.mark.long if name in COVERING else [pytest.mark.long, pytest.mark.every])
    for name in scenarios_of(DAEMON)
]


@pytest.mark.parametrize("name", BY_COST)
def test_over_rings(device: Device, name: str) -> None:
    with deployed(DAEMON):
        SCENARIOS[name](device)


@pytest.mark.parametrize("name", BY_COVER)
@pytest.mark.parametrize("strategy", ["stream_memop", "host_flag", "polling", "event", NOTHING])
def test_under_each_strategy(device: Device, strategy: str, name: str) -> None:
    with deployed(DAEMON, strategy, decides="host_flag" if strategy == NOTHING else ""):
        SCENARIOS[name](device)


@pytest.mark.long
@pytest.mark.parametrize("name", scenarios_of(MESSAGES))
def test_over_messages(device: Device, name: str) -> None:
    with deployed(MESSAGES):
        SCENARIOS[name](device)


SIMULATED_S = 55.0


@pytest.mark.simulator
def test_on_simulated_cuda() -> None:
    run_on_cuda(DAEMON, "stream_memop", "two_clients_and_two_pools_get_back_what_they_stored")


@pytest.mark.simulator
def test_in_one_process_without_synchronisation() -> None:
    run_on_cuda(INPROC, NOTHING, "two_clients_and_two_pools_get_back_what_they_stored")


def run_on_cuda(deployment: str, strategy: str, name: str) -> None:
    simulation = Simulation(build.build("cuda"))
    with simulation.start(scenario_on_cuda, deployment, strategy, name, variables={"DEVIPC_TRIAL_CACHE": ""}) as child:
        assert child.result(SIMULATED_S) == {"left": 0}


def scenario_on_cuda(_parent: Parent, deployment: str, strategy: str, name: str) -> dict[str, Any]:
    """In a process of its own: the scenario, then what the driver still holds for it."""
    from tests.simulator.control import Simulator

    own_life()
    simulator = Simulator.loaded()
    before = simulator.live()
    device = load_backend("cuda").open_device()
    with deployed(deployment, strategy):
        SCENARIOS[name](device)
    device.close()
    return {"left": simulator.live() - before}
