"""The cache's end-to-end scenarios in one process, on the simulated runtime."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from .peers import environment, run_body

pytestmark = [pytest.mark.long, pytest.mark.simulator]


def scenarios() -> dict[str, Any]:
    for name in ("content", "faults", "room", "rules"):
        importlib.import_module(f"tests.hicache.scenarios_{name}")
    found: dict[str, Any] = importlib.import_module("tests.hicache.scenario").SCENARIOS
    return found


@pytest.mark.parametrize(
    "switches", [{}, {"memops": 0, "ipc_events": 0}, {"host_pointer": 0}], ids=["whole", "bare", "alias"]
)
@pytest.mark.parametrize("part", range(4))
def test_scenarios(part: int, switches: dict[str, object]) -> None:
    run_body(play, {"part": part}, environment(switches))


def play(part: int, device: Any, sim: Any) -> None:
    names = sorted(scenarios())[part::4]
    assert names
    before = sim.live()
    for name in names:
        print(name, flush=True)
        scenarios()[name](device)
        assert sim.live() - before <= 1, f"{name} left objects of the runtime behind"  # a stream of the device's own
