"""The cache's end-to-end scenarios on a device: in one process, and with a daemon under every completion strategy.

The same scenarios as in ``tests/hicache``: clients that share the tier, pools of several shapes, random pages with the
content of their keys, destinations poisoned before each restore, sentinels around all pages; streams that stand still,
copies that are refused, cancels that race. Each combination runs in a process of its own; several visible devices share
them. ``python -m backends.cuda.tests.hardware.hicache_scenarios --out FILE``. Where time is short, ``HICACHE_LINES``
names some combinations, the first ones first (``daemon/polling messages/auto``), ``HICACHE_AT_ONCE`` how many a device
has at a time, ``HICACHE_LIMIT_S`` the seconds for all.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from devipc.channel.liveness import own_life
from devipc.completion.cache import DIRECTORY_VARIABLE, TrialCache
from devipc.completion.pair import try_in_children
from devipc.registry import load_backend
from devipc.types import Strategy

from . import evidence, holding
from .evidence import SIMULATED

importlib.import_module("tests.hicache.matrix")  # fills the registry
_deployment: Any = importlib.import_module("tests.hicache.deployment")
_scenario: Any = importlib.import_module("tests.hicache.scenario")
HOLD: str = importlib.import_module("tests.hicache.holding").HOLD
AUTO, DAEMON, INPROC = _deployment.AUTO, _deployment.DAEMON, _deployment.INPROC
MESSAGES, NOTHING = _deployment.MESSAGES, _deployment.NOTHING
SCENARIOS, scenarios_of = _scenario.SCENARIOS, _scenario.scenarios_of
STRATEGIES = ("stream_memop", "host_flag", "polling", "event", NOTHING)
COMBINATIONS = [(INPROC, AUTO), (INPROC, NOTHING), (MESSAGES, AUTO), *((DAEMON, strategy) for strategy in STRATEGIES)]
if SIMULATED:
    COMBINATIONS = COMBINATIONS[1:4]
if "HICACHE_LINES" in os.environ:
    lines = [line.partition("/") for line in os.environ["HICACHE_LINES"].split()]
    COMBINATIONS = [(deployment, strategy) for deployment, _, strategy in lines]
QUICK = ("two_clients_and_two_pools_get_back_what_they_stored", "layers_arrive_group_by_group")
LIMIT_S = float(os.environ.get("HICACHE_LIMIT_S", 330))
"""For all of them together; what was not reached then is missing, and counts."""
AT_ONCE = int(os.environ.get("HICACHE_AT_ONCE", 2 if SIMULATED else 3))
"""On each device, which makes one context after the other: each scenario begins an engine process, and that has one."""
TRIAL_S = 30.0
ENVIRONMENT = {HOLD: holding.__name__, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
VISIBLE = "CUDA_VISIBLE_DEVICES"


def one(deployment: str, strategy: str, names: Sequence[str]) -> None:
    """Run scenarios one after the other; print a line of JSON for each."""
    own_life()
    device = load_backend("cuda").open_device()
    for name in names or scenarios_of(deployment):
        began = time.monotonic()
        line: dict[str, Any] = {"scenario": name}
        try:
            with _deployment.deployed(deployment, strategy):
                SCENARIOS[name](device)
        except BaseException as error:
            line["error"] = f"{type(error).__name__}: {error}"[:2000]
        print(json.dumps({**line, "s": round(time.monotonic() - began, 2)}), flush=True)
    holding.end()
    device.close()


def trials() -> None:
    """Find out what works between two processes, one strategy after the other, and keep it; print a line for each."""
    backend = load_backend("cuda")
    device = backend.open_device()
    cache = TrialCache(backend=backend.name, device_uuid=device.info.uuid, facts=backend.facts())
    for strategy in Strategy:
        began = time.monotonic()
        found = try_in_children(backend.name, device.info.uuid, strategy, deadline_s=TRIAL_S)
        cache.store(strategy, found)
        line = {"trial": strategy.value, **found.to_json(), "s": round(time.monotonic() - began, 2)}
        print(json.dumps(line), flush=True)
    device.close()


class Place:
    """One device, with the combinations that it has. The trials are its first job, alone."""

    def __init__(self, stack: contextlib.ExitStack, visible: str, ends_at: float) -> None:
        self._ends_at = ends_at
        kept = stack.enter_context(tempfile.TemporaryDirectory(prefix="hs"))
        self._environment = {**os.environ, **ENVIRONMENT, DIRECTORY_VARIABLE: kept}
        if visible:
            self._environment[VISIBLE] = visible
        self._pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
        self.tried = self._pool.submit(self._play, "--trials")

    def submit(self, deployment: str, strategy: str) -> Future[dict[str, Any]]:
        """Let one combination have its turn."""
        return self._pool.submit(self._combination, deployment, strategy)

    def _play(self, *arguments: str) -> tuple[list[dict[str, Any]], int, str]:
        """Run this module in a process of its own; return its lines, its exit status, and what else it said."""
        command = [sys.executable, "-m", f"{__package__}.hicache_scenarios", *arguments]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=self._environment, **pipes)
        try:
            out, err = process.communicate(timeout=max(0.1, self._ends_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        whole = [line for line in out.splitlines(keepends=True) if line.endswith("\n")]
        return [json.loads(line) for line in whole], process.returncode, err

    def _combination(self, deployment: str, strategy: str) -> dict[str, Any]:
        tried, _, _ = self.tried.result()
        names = QUICK if SIMULATED else ()
        lines, status, said = self._play("--one", deployment, strategy, *names)
        expected = len(names or scenarios_of(deployment))
        failed = [line for line in lines if "error" in line]
        found = {
            "passed": len(lines) - len(failed),
            "of": expected,
            "failed": failed,
            "exit status": status,
            "s": {line["scenario"]: line["s"] for line in lines},
            "trials": {line["trial"]: [line["verdict"], line["s"]] for line in tried},
        }
        if failed or len(lines) < expected or status:
            found |= {"said": said[-3000:], "trials": tried}
        return found


def passed(deployment: str, strategy: str, future: Future[dict[str, Any]]) -> dict[str, Any]:
    """Wait for one combination; say what failed."""
    found = future.result()
    print(deployment, strategy, found["passed"], "of", found["of"], [line["scenario"] for line in found["failed"]])
    if "said" in found:
        raise AssertionError(json.dumps(found, indent=1))
    return found


def visible() -> list[str]:
    """Name the devices, each as an environment names it; one without a name is the only one."""
    count = 1 if SIMULATED else len(load_backend("cuda").devices())
    named = os.environ.get(VISIBLE, ",".join(map(str, range(count)))).split(",")
    return named[:count] if count > 1 else [""]


def sections(device: Any) -> Sequence[evidence.Section]:
    """One a combination; they run side by side on all devices, and are waited for one after the other."""
    stack = contextlib.ExitStack()
    ends_at = time.monotonic() + LIMIT_S
    places = [Place(stack, name, ends_at) for name in visible()]
    futures = [places[number % len(places)].submit(*each) for number, each in enumerate(COMBINATIONS)]
    atexit.register(stack.close)
    return [
        (f"scenarios, {', '.join(each)}", partial(passed, *each, future))
        for each, future in zip(COMBINATIONS, futures, strict=True)
    ]


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        one(sys.argv[2], sys.argv[3], sys.argv[4:])
    elif sys.argv[1] == "--trials":
        trials()
    else:
        sys.exit(evidence.main(str(__doc__), sections))
