"""The cache's end-to-end scenarios on the simulated driver: in the scheduler's process, and over the daemon."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import pytest

from .peers import simulated

HOST_WAITS = {"layers_arrive_group_by_group"}
"""It holds the engine's copies back and then waits on a stream; without word waits that blocks the host that would
let them go."""
GROUPS = ["content", "faults", "room", "rules"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("deployment", ["inproc", "daemon"])
@simulated(bare=True, limit_s=220, DEVIPC_TRIAL_CACHE="")
def test_scenarios(deployment: str, group: str, sim: Any) -> None:
    device = importlib.import_module("devipc.registry").load_backend("levelzero").open_device()
    scenarios = importlib.import_module("tests.hicache.scenario")
    deployed = importlib.import_module("tests.hicache.deployment").deployed
    importlib.import_module("devipc.channel.liveness").own_life()  # what peers get outlasts a scenario
    module = importlib.import_module(f"tests.hicache.scenarios_{group}")
    elsewhere = deployment == "daemon"
    chosen = [name for name in scenarios.ELSEWHERE if name not in HOST_WAITS] if elsewhere else scenarios.SCENARIOS
    named = [name for name in chosen if hasattr(module, name)]
    assert len(named) > 3
    for name in named:
        print(name, flush=True)  # shown when it fails
        with deployed(deployment) if elsewhere else contextlib.nullcontext():
            scenarios.SCENARIOS[name](device)
    device.close()
    left = {name: n for name, n in sim.report().counters.items() if name.startswith(("live_", "unreturned")) and n}
    assert not left
