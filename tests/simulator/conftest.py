"""Fixtures of the simulator's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulator import build
from tests.simulator.harness import Simulation


@pytest.fixture(scope="session")
def library() -> Path:
    """Folder of the built library."""
    return build.build("cuda")


@pytest.fixture
def sim(library: Path) -> Simulation:
    """A room of its own for each test."""
    return Simulation(library)
