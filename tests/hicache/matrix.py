"""The end-to-end scenarios under every completion strategy and deployment, on the simulated driver of any backend.

Owns which combinations there are, which scenarios of each CI runs, and what is looked at beside the scenarios: that the
strategy in use is the one that was to be, with the reasons for it. A backend's tests bring the process on their driver,
with its own checks of what is left, and call :func:`play` in it. It names no backend.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from devipc.channel.liveness import own_life
from devipc.errors import CapabilityError
from devipc.registry import load_backend
from tests.hicache import (  # noqa: F401 - they fill the registry
    scenarios_content,
    scenarios_ends,
    scenarios_faults,
    scenarios_room,
    scenarios_rules,
)
from tests.hicache.deployment import AUTO, DAEMON, INPROC, MESSAGES, NOTHING, deployed
from tests.hicache.scenario import SCENARIOS, scenarios_of
from tests.hicache.world import world
from tests.simulator.control import Simulator

COVERING = (
    "two_clients_and_two_pools_get_back_what_they_stored",
    "layers_arrive_group_by_group",
    "more_points_of_a_stream_than_a_fence_holds",
    "a_ready_point_that_fails_discards",
    "a_cancel_word_is_read_before_anything_is_published",
    "an_engine_that_is_killed_poisons_its_fences_and_another_one_serves",
)
"""What CI runs of each combination with a daemon: content, fences by layers, poison, cancel, kill."""

NO_EVENTS: Mapping[str, object] = {"ipc_events": 0}
NO_WORDS: Mapping[str, object] = {"ipc_events": 0, "pin_least_kb": 8}
"""Nothing as small as the page of a fence can be registered, so that neither streams nor copies reach its word."""

KEEP = "DEVIPC_TEST_SCENARIOS"
"""Names a folder for what was run: a JSON file for each backend."""
WHOLE_S, COVERING_S = 560.0, 100.0
"""Limits, below the one at which the test run's own stacks end it."""
BAD = ("no", "broken")
WHAT = "scenarios of the cache on a simulated driver"


@dataclass(frozen=True, slots=True)
class Combination:
    """A deployment, a strategy and switches of the simulated driver; what must be decided, and why.

    ``refused`` is a pattern: nothing runs, and that is what a client is told.
    """

    deployment: str
    strategy: str
    note: str = ""
    switches: Mapping[str, object] = field(default_factory=dict)
    decides: str = ""
    because: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""

    @property
    def id(self) -> str:
        return "-".join(filter(None, (self.deployment, self.strategy, self.note)))


def combinations(
    strategies: Sequence[str], *, no_events: str, no_words: Mapping[str, str], also: Sequence[Combination] = ()
) -> list[Combination]:
    """Return every combination for a backend.

    Parameters
    ----------
    strategies
        That it offers.
    no_events
        A pattern of what is said when events are asked for and are off.
    no_words
        Patterns of what is said about strategies that need a word, when none can be had.
    also
        Further ones of its own.
    """
    absent = {"stream_memop": "no sync interface"}
    return [
        Combination(INPROC, AUTO),
        Combination(INPROC, NOTHING),
        Combination(MESSAGES, AUTO),
        *(Combination(DAEMON, strategy) for strategy in strategies),
        Combination(DAEMON, NOTHING, decides="host_flag", because=absent),
        Combination(DAEMON, AUTO, "no_words", NO_WORDS, decides="polling", because=no_words),
        Combination(DAEMON, "event", "no_events", NO_EVENTS, refused=no_events),
        *also,
    ]


def cases(every: Sequence[Combination], *, whole: str) -> list[Any]:
    """Return the parameters of a test: a combination, and whether all scenarios are to be run.

    CI runs all of them in one process, and over the daemon under the strategy ``whole``; of the other lines a part.
    """
    part = [pytest.mark.long, pytest.mark.timeout(int(COVERING_S) + 20)]
    full = [pytest.mark.long, pytest.mark.timeout(int(WHOLE_S) + 20)]
    found = []
    for one in every:
        if one.deployment == INPROC or one.id == f"{DAEMON}-{whole}":
            found.append(pytest.param(one, True, id=one.id, marks=full))
            continue
        found.append(pytest.param(one, False, id=one.id, marks=part))
        if not one.refused:
            found.append(pytest.param(one, True, id=f"{one.id}-every", marks=[*full, pytest.mark.every]))
    return found


def run(backend: str, one: Combination, *, whole: bool, folder: Path, start: Callable[..., None]) -> None:
    """Run a combination; what it did is kept where somebody asks for that.

    ``start(arguments, switches, limit_s)`` runs :func:`play` with these in a process on the simulated driver, and fails
    with what it printed.
    """
    out, trials = folder / "out.json", folder / "trials"
    trials.mkdir(mode=0o700)  # verdicts about this driver, for nobody else
    began = time.monotonic()
    try:
        start(
            {"which": one.id, "whole": whole, "out": str(out)},
            {**one.switches, "DEVIPC_TRIAL_CACHE": str(trials)},
            WHOLE_S if whole else COVERING_S,
        )
    finally:
        keep(backend, one, whole=whole, out=out, took_s=time.monotonic() - began)


def play(backend: str, every: Sequence[Combination], which: str, *, whole: bool, out: str) -> None:
    """Run the scenarios of a combination, in a process of its own; write into ``out`` how it went."""
    one = next(one for one in every if one.id == which)
    faulthandler.dump_traceback_later((WHOLE_S if whole else COVERING_S) - 5, exit=True)
    own_life()  # what peers get of this process outlasts a scenario
    simulator = Simulator.loaded()
    fds = simulator.counter("fds")
    device = load_backend(backend).open_device()
    passed: dict[str, float] = {}
    failed: dict[str, str] = {}
    with deployed(one.deployment, one.strategy, decides=one.decides, because=one.because) as chosen:
        if one.refused:
            with pytest.raises(CapabilityError, match=one.refused), world(device) as it:
                it.client()
        names = [] if one.refused else scenarios_of(one.deployment)
        for name in names if whole else [name for name in names if name in COVERING]:
            print(name, flush=True)  # shown when it fails
            began = time.monotonic()
            try:
                SCENARIOS[name](device)
            except (Exception, pytest.fail.Exception):
                traceback.print_exc()
                failed[name] = traceback.format_exc(limit=-1)
            else:
                passed[name] = round(time.monotonic() - began, 2)
    decision = None if chosen.decision is None else chosen.decision.to_json()
    cpu_s = sum(os.times()[:4])  # of this process and all that have ended
    Path(out).write_text(json.dumps({"passed": passed, "failed": failed, "decision": decision, "cpu_s": cpu_s}))
    faulthandler.cancel_dump_traceback_later()
    device.close()
    assert simulator.counter("fds") == fds
    assert not failed, f"failed: {list(failed)}"
    assert passed or one.refused


def keep(backend: str, one: Combination, *, whole: bool, out: Path, took_s: float) -> None:
    """Add what :func:`play` wrote to the file of ``backend``, where somebody asks for that."""
    folder = os.environ.get(KEEP)
    if not folder or not whole or not out.exists():
        return
    found = json.loads(out.read_text())
    decision = found["decision"] or {"strategy": "in_process", "candidates": []}
    rejected = [each for each in decision["candidates"] if each["verdict"] in BAD]
    row = {
        "deployment": one.deployment,
        "asked": one.strategy,
        "switches": dict(one.switches),
        "used": decision["strategy"],
        "rejected": {each["strategy"]: each["reason"] for each in rejected},
        "passed": len(found["passed"]),
        "of": len(found["passed"]) + len(found["failed"]),
        "failed": sorted(found["failed"]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "wall_s": round(took_s, 1),
        "cpu_s": round(found["cpu_s"], 1),
        "scenario_s": found["passed"],
    }
    with open(Path(folder) / f"{backend}.json", "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # tests run beside each other
        file.seek(0)
        known: dict[str, Any] = json.loads(file.read() or "{}") or {
            "what": WHAT,
            "backend": backend,
            "combinations": {},
        }
        known["combinations"][one.id] = row
        file.truncate(0)
        file.write(json.dumps(known, indent=1) + "\n")
