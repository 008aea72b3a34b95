"""The README lists every switch and counter, and every switch has a test."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulator import build, control, trace_calls
from tests.simulator.harness import ROOT, Simulation

pytestmark = pytest.mark.simulator
SWITCHES = re.findall(r"^SWITCH\((\w+),", (build.HERE / "core" / "switches.def").read_text(), re.MULTILINE)
COUNTERS = re.findall(r"^COUNTER\((\w+),", (build.HERE / "core" / "counters.def").read_text(), re.MULTILINE)
TEXTS = ("room", "order", "missing", "attributes", "fault", "trace")


def test_the_readme_lists_what_there_is() -> None:
    readme = (build.HERE / "README.md").read_text()
    assert [name for name in (*SWITCHES, *COUNTERS, *TEXTS) if f"`{name}`" not in readme] == []


def test_every_switch_is_tested() -> None:
    tests = "\n".join(path.read_text() for path in build.HERE.glob("test_*.py") if path.name != "test_documents.py")
    assert [name for name in SWITCHES if not re.search(rf'\b{name}=|"{name}"', tests)] == []


def test_the_wrapper_knows_every_switch_and_counter(sim: Simulation) -> None:
    found = sim.run(inventory)
    assert found["switches"] == SWITCHES
    assert found["counters"] == COUNTERS
    assert found["unknown"] == 4


def inventory(parent: object) -> object:
    simulator = control.Simulator.loaded()
    attempts = (
        lambda: simulator.set("absent", 1),
        lambda: simulator.counter("absent"),
        lambda: simulator.calls("absent"),
        lambda: simulator.lose(99),
    )
    unknown = 0
    for attempt in attempts:
        try:
            attempt()
        except control.SimulatorError:
            unknown += 1
    return {
        "switches": list(simulator.switches()),
        "counters": list(simulator.report().counters),
        "unknown": unknown,
    }


@pytest.fixture(scope="module")
def answers(library: Path) -> dict[str, object]:
    """The trace on the simulator."""
    environment = {**os.environ, **control.environment(library, control.new_room(), devices=1)}
    command = [sys.executable, str(build.HERE / "trace_calls.py"), "--together"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=50, check=True)
    return dict(json.loads(done.stdout)["cases"])


def test_every_traced_case_answers(answers: dict[str, object]) -> None:
    assert len(answers) > 800
    broken = {name: answer for name, answer in answers.items() if re.search("unprepared|timeout|exit", str(answer))}
    assert broken == {}
    wild = {name for name, answer in answers.items() if answer == "signal 11"}
    streams = {"copy_with_bogus_stream", "stream_bogus", "stream_destroyed"}
    assert wild == streams | {"map_released", "pool_bogus", "primary_released", "release_bogus"}


@pytest.mark.parametrize("path", sorted((build.HERE / "traces").glob("*.json")), ids=lambda path: path.stem)
def test_the_simulator_answers_as_hardware_does(answers: dict[str, object], path: Path) -> None:
    """A committed hardware trace and the simulator say the same, call for call; neither lacks a call."""
    trace = json.loads(path.read_text())
    hardware = trace["cases"]
    assert set(trace["about"]["of"]) == {"device", "driver", "kernel_driver", "bindings", "python"}
    assert len(hardware) > 900
    found = {
        name: (hardware.get(name, "absent"), answers.get(name, "absent"))
        for name in trace_calls.differences(hardware, answers)
    }
    assert found == {}
