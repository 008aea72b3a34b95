"""When an operation passes which function of the daemon: its supervisor and its engine note and write down calls.

Owns the list of what is noted. Run as ``devipc`` is, with ``DEVIPC_TEST_TRACE`` naming a folder; each process leaves
one file there at its end: ``[label, entered, left]`` in nanoseconds of the monotonic clock, which all processes share.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = "DEVIPC_TEST_TRACE"
MODULE = "backends.cuda.tests.hardware.hicache_trace"
SUPERVISOR = (
    ("devipc.hicache.daemon.client:AttachedClient._submit", "supervisor: takes the request"),
    ("devipc.hicache.engine.transfers:_TransferOp._start_when_ready", "supervisor: looks whether it may start"),
    ("devipc.hicache.tier.hosttier:HostTier.reserve", "supervisor: reserves"),
    ("devipc.hicache.daemon.remotecopies:RemoteCopies.start", "supervisor: orders the copies"),
    ("devipc.hicache.daemon.remotecopies:RemoteCarrier._heard", "supervisor: hears a report"),
    ("devipc.hicache.tier.hosttier:HostTier.commit", "supervisor: publishes"),
    ("devipc.hicache.daemon.outbox:Outbox._send", "supervisor: answers"),
)
ENGINE = (
    ("devipc.hicache.engineproc.watch:Watcher._watch", "engine: is asked to watch"),
    ("devipc.hicache.engineproc.joblane:JobLane._begin", "engine: carries the order out"),
    ("devipc.hicache.planning.planner:Planner.plan", "engine: plans"),
    ("devipc.hicache.moving.fan:Fan.put", "engine: submits"),
    ("devipc.hicache.engineproc.timeline:Timeline.signal", "engine: signals"),
    ("devipc.hicache.engine.localcopies:LocalJob.poll", "engine: asks the marker"),
    ("devipc.hicache.engineproc.process:_Parts._report", "engine: reports"),
)
notes: list[tuple[str, int, int]] = []


def watch(places: tuple[tuple[str, str], ...]) -> None:
    """Note every call of these functions, and write the notes at the end of the process."""
    for place, label in places:
        module, _, path = place.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for one in outer:
            owner = getattr(owner, one)
        setattr(owner, name, noted(getattr(owner, name), label))
    atexit.register(write)


def noted(function: Any, label: str) -> Any:
    clock, add = time.monotonic_ns, notes.append

    def call(*arguments: Any, **options: Any) -> Any:
        began = clock()
        try:
            return function(*arguments, **options)
        finally:
            add((label, began, clock()))

    return call


def write() -> None:
    Path(os.environ[FOLDER], f"{os.getpid()}.json").write_text(json.dumps(notes))


def main() -> None:
    """Be an engine process when the only argument is a descriptor, else ``devipc`` with an engine that is noted."""
    if len(sys.argv) == 2 and sys.argv[1].isdigit():
        watch(ENGINE)
        importlib.import_module("devipc.hicache.engineproc.process").main(int(sys.argv[1]))
        return
    watch(SUPERVISOR)
    sys.argv += ["--engine-module", MODULE]
    importlib.import_module("devipc.cli").main()


if __name__ == "__main__":
    main()
