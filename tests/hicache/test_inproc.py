"""The end-to-end scenarios over ``inproc:``, on the host backend and on simulated CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from devipc.interfaces.backend import Device
from devipc.registry import load_backend
from tests.hicache import matrix  # noqa: F401 - fills the registry
from tests.hicache.deployment import INPROC
from tests.hicache.scenario import SCENARIOS, scenarios_of
from tests.simulator import build
from tests.simulator.harness import Parent, Simulation


@pytest.fixture
def device() -> Iterator[Device]:
    opened = load_backend("host").open_device()
    yield opened
    opened.close()


@pytest.mark.parametrize("name", scenarios_of(INPROC))
def test_on_the_host(device: Device, name: str) -> None:
    SCENARIOS[name](device)


@pytest.mark.simulator
@pytest.mark.parametrize("name", scenarios_of(INPROC))
def test_on_simulated_cuda(name: str) -> None:
    simulation = Simulation(build.build("cuda"))
    assert simulation.run(run_on_cuda, name) == {"left": 0}


def run_on_cuda(_parent: Parent, name: str) -> dict[str, Any]:
    """In a process of its own: the scenario, then what the driver still holds for it."""
    from tests.simulator.control import Simulator

    simulator = Simulator.loaded()
    before = simulator.live()
    device = load_backend("cuda").open_device()
    SCENARIOS[name](device)
    device.close()
    return {"left": simulator.live() - before}
