"""The cache's end-to-end scenarios on a device: in one process, and with a daemon under every completion strategy.

The same scenarios as in ``tests/hicache``: clients that share the tier, pools of several shapes, random pages with the
content of their keys, destinations poisoned before each restore, sentinels around all pages; streams that stand still,
copies that are refused, cancels that race. Each combination runs in a process of its own.
``python -m backends.cuda.tests.hardware.hicache_scenarios --out FILE``.
"""

from __future__ import annotations

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
from devipc.completion.cache import DIRECTORY_VARIABLE
from devipc.registry import load_backend

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
QUICK = ("two_clients_and_two_pools_get_back_what_they_stored", "layers_arrive_group_by_group")
LIMIT_S = 230.0
AT_ONCE = 2 if SIMULATED else 3
"""Contexts of one device are made one after the other: with eight combinations at once trials ran into their limits."""


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


def combination(deployment: str, strategy: str) -> dict[str, Any]:
    """Run one combination in a process of its own; what it did not get to is missing, and counts."""
    names = QUICK if SIMULATED else ()
    command = [sys.executable, "-m", f"{__package__}.hicache_scenarios", "--one", deployment, strategy, *names]
    chosen = {HOLD: holding.__name__, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    with tempfile.TemporaryDirectory(prefix="hs") as trials:
        environment = {**os.environ, **chosen, DIRECTORY_VARIABLE: trials}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
    lines = [json.loads(line) for line in out.splitlines()]
    expected = len(names or scenarios_of(deployment))
    failed = [line for line in lines if "error" in line]
    found = {
        "passed": len(lines) - len(failed),
        "of": expected,
        "failed": failed,
        "exit status": process.returncode,
        "s": {line["scenario"]: line["s"] for line in lines},
    }
    if failed or len(lines) < expected or process.returncode:
        found["said"] = err[-3000:]
    return found


def passed(deployment: str, strategy: str, future: Future[dict[str, Any]]) -> dict[str, Any]:
    """Wait for one combination; say what failed."""
    found = future.result()
    print(deployment, strategy, found["passed"], "of", found["of"], [line["scenario"] for line in found["failed"]])
    if "said" in found:
        raise AssertionError(json.dumps(found, indent=1))
    return found


def sections(device: Any) -> Sequence[evidence.Section]:
    """One a combination; all of them run side by side."""
    pool = ThreadPoolExecutor(AT_ONCE)
    futures = [pool.submit(combination, *each) for each in COMBINATIONS]
    return [
        (f"scenarios, {', '.join(each)}", partial(passed, *each, future))
        for each, future in zip(COMBINATIONS, futures, strict=True)
    ]


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        one(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        sys.exit(evidence.main(str(__doc__), sections))
