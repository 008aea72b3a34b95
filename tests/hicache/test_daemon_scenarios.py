"""The end-to-end scenarios over ``unix:``: a supervisor, an engine process, rings or messages.

On the host backend, and on simulated CUDA under every completion strategy, and where the device has none to offer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from devipc.channel.liveness import own_life
from devipc.interfaces.backend import Device
from devipc.registry import load_backend
from tests.hicache import scenarios_content, scenarios_faults, scenarios_room, scenarios_rules  # noqa: F401
from tests.hicache.deployment import DAEMON, INPROC, MESSAGES, NOTHING, deployed
from tests.hicache.scenario import ELSEWHERE, SCENARIOS
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
BY_COST = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in ELSEWHERE]


@pytest.mark.parametrize("name", BY_COST)
def test_over_rings(device: Device, name: str) -> None:
    with deployed(DAEMON):
        SCENARIOS[name](device)


@pytest.mark.long
@pytest.mark.parametrize("name", ELSEWHERE)
def test_over_messages(device: Device, name: str) -> None:
    with deployed(MESSAGES):
        SCENARIOS[name](device)


STRATEGIES = ("stream_memop", "host_flag", "polling", "event", NOTHING)
QUICK_ON_CUDA = {("two_clients_and_two_pools_get_back_what_they_stored", "stream_memop")}
MATRIX = [
    pytest.param(name, strategy, marks=() if (name, strategy) in QUICK_ON_CUDA else pytest.mark.long)
    for strategy in STRATEGIES
    for name in ELSEWHERE
]
SIMULATED_S = 55.0


@pytest.mark.simulator
@pytest.mark.parametrize(("name", "strategy"), MATRIX)
def test_on_simulated_cuda(name: str, strategy: str) -> None:
    run_on_cuda(DAEMON, strategy, name)


@pytest.mark.long
@pytest.mark.simulator
@pytest.mark.parametrize("name", sorted(QUICK))
def test_on_simulated_cuda_over_messages(name: str) -> None:
    run_on_cuda(MESSAGES, "auto", name)


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
