"""The end-to-end scenarios in one process, on the host backend; on simulated drivers by :mod:`tests.hicache.matrix`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from devipc.interfaces.backend import Device
from devipc.registry import load_backend
from tests.hicache import matrix  # noqa: F401 - fills the registry
from tests.hicache.deployment import INPROC
from tests.hicache.scenario import SCENARIOS, scenarios_of


@pytest.fixture
def device() -> Iterator[Device]:
    opened = load_backend("host").open_device()
    yield opened
    opened.close()


@pytest.mark.parametrize("name", scenarios_of(INPROC))
def test_on_the_host(device: Device, name: str) -> None:
    SCENARIOS[name](device)
