"""Any order of operations, as ``machine.py`` says, run by Hypothesis.

As a program it runs as many operations as it is told, in as many processes, each on one engine, and looks whether what
a process holds stays flat: ``python -m tests.hicache.stateful --operations 1000000 --processes 14 --seed 1 --json
FILE``. ``held.py`` has the bounds; it ends with 1 when an operation is wrong or they are passed. With ``--one-client``
each process has one for all, and no Hypothesis. It needs numpy, msgspec and hypothesis, no device and no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from devipc.registry import load_backend
from tests.hicache.deployment import DAEMON, INPROC, MESSAGES, deployed
from tests.hicache.driver import Driver
from tests.hicache.enough import Enough, start, wait_for
from tests.hicache.held import BOUNDS, WARM_UP, Held, Watch
from tests.hicache.machine import PAGE_NBYTES, TIER_PAGES, CacheMachine
from tests.hicache.world import World, world

STEPS = 200
ROUND = 4
"""Examples at once. Hypothesis remembers all of a round: with 20, resident memory had steps of 5 MB."""
LOOK_EVERY = 2000
"""Operations before the next look at what is held; in a short run, a fiftieth of all."""
LAST_S = 120.0
GREW = 3
"""Exit status of a process that held more and more."""


@contextlib.contextmanager
def lent(deployment: str) -> Iterator[World]:
    """Let machines have one engine meanwhile."""
    device: Any = load_backend("host").open_device()
    nbytes = TIER_PAGES * PAGE_NBYTES
    with (
        deployed(deployment),
        world(device, tier_nbytes=nbytes, slab_nbytes=nbytes, extent_pages=1, kept_percent=0) as it,
    ):
        CacheMachine.world = it
        try:
            yield it
        finally:
            CacheMachine.world = None  # the class stays
    device.close()


@cache
def _settings(count: int, steps: int) -> settings:
    """Return the same each time: Hypothesis keeps each."""
    return settings(
        max_examples=count,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def examples(count: int, *, steps: int = STEPS, start: int | None = None) -> None:
    """Run so many examples on the engine that is lent; see :func:`run`."""

    def machine() -> CacheMachine:
        """Hypothesis keeps each class that it has seen, and with a class each seed; of a function it keeps nothing."""
        return CacheMachine()

    made: Any = machine if start is None else seed(start)(machine)
    run_state_machine_as_test(made, settings=_settings(count, steps))


def run(count: int, *, steps: int = STEPS, deployment: str = INPROC, start: int | None = None) -> None:
    """Run so many times, with so many operations each; the same ``start`` brings the same operations."""
    with lent(deployment):
        examples(count, steps=steps, start=start)


def _rounds(start: int) -> Generator[None, None, None]:
    """Run some examples each time."""
    for number in itertools.count(start):
        examples(ROUND, start=number)
        yield


def _of_one_client(start: int) -> Generator[None, None, None]:
    """Run some operations of one client each time."""
    machine = CacheMachine()
    driver = Driver(machine, start)
    try:
        while True:
            driver.run(ROUND * STEPS)
            machine.client.forget()
            yield
    finally:
        machine.teardown()


def _work(chosen: argparse.Namespace, enough: Enough) -> dict[str, Any]:
    """Run until so many operations are done, or it is enough; return how many, and what was held on the way."""
    began, look_at, operations = time.monotonic(), 0, chosen.operations
    warm_up, look_every = min(WARM_UP, operations // 3), min(LOOK_EVERY, operations // 50)
    held = {"process": Watch(warm_up=warm_up)}
    work = (_of_one_client if chosen.one_client else _rounds)(chosen.seed)
    with lent(chosen.deployment) as it, contextlib.closing(work):
        for _ in work:
            if CacheMachine.operations >= look_at:
                look_at = CacheMachine.operations + look_every
                held["process"].look(CacheMachine.operations, Held.now())
                engine = it.deployment.engine_held()
                if engine is not None:
                    held.setdefault("engine", Watch(warm_up=warm_up)).look(CacheMachine.operations, engine)
            if CacheMachine.operations >= operations or enough:
                break
    return {
        "operations": CacheMachine.operations,
        "s": round(time.monotonic() - began, 1),
        "held": {name: watch.account() for name, watch in held.items()},
    }


def _flat(accounts: list[dict[str, Any]]) -> bool | None:
    """Return whether all of them are flat; None when none is known to grow, and not all are known."""
    said = [held["flat"] for account in accounts for held in account["held"].values()]
    return False if False in said else None if None in said or not said else True


def _shared(chosen: argparse.Namespace, enough: Enough) -> int:
    """Share the work out to processes, and say what they said."""
    share = -(-chosen.operations // chosen.processes)
    began = time.monotonic()
    command = ["tests.hicache.stateful", "--operations", str(share), "--processes", "1"]
    command += ["--deployment", chosen.deployment, *(["--one-client"] if chosen.one_client else [])]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        said = [files.enter_context(open(os.path.join(folder, str(n)), "w+")) for n in range(chosen.processes)]
        children = [
            start([*command, "--seed", str(chosen.seed + 1_000_000 * number)], stdout=file, folder=folder)
            for number, file in enumerate(said)
        ]
        why = wait_for(children, lambda: any(child.poll() is None for child in children), enough, LAST_S)
        found = _account([(child.returncode, file) for child, file in zip(children, said, strict=True)])
    why = why if found["operations"] < chosen.operations else ""
    found = {
        "command": f"python -m tests.hicache.stateful --operations {chosen.operations} --processes {chosen.processes}"
        f" --deployment {chosen.deployment} --seed {chosen.seed}{' --one-client' if chosen.one_client else ''}",
        "incomplete": f"{why}: {found['operations']} of {chosen.operations} operations" if why else "",
        "wall_s": round(time.monotonic() - began, 1),
        **found,
    }
    text = json.dumps(found, indent=2)
    print(text)
    if chosen.json:
        Path(chosen.json).write_text(text + "\n")
    return 1 if found["failed"] or found["flat"] is False else enough.exit_code


def _account(ended: list[tuple[int, TextIO]]) -> dict[str, Any]:
    said: list[dict[str, Any]] = []
    for code, file in ended:
        file.seek(0)
        if code in (0, GREW):
            said.append(json.loads(file.read()))
        else:
            print(file.read())  # the operations that failed
    grew = [held["grew"] for one in said for held in one["held"].values() if "grew" in held]
    return {
        "operations": sum(one["operations"] for one in said),
        "failed": len(ended) - len(said),
        "flat": _flat(said),
        "bounds": asdict(BOUNDS),
        "grew_at_most": asdict(Held.most([Held(**each) for each in grew])) if grew else {},
        "processes": said,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hicache.stateful")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--deployment", choices=[INPROC, DAEMON, MESSAGES], default=INPROC)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--one-client", action="store_true", help="one for all, without Hypothesis and without crashes")
    parser.add_argument("--time-limit", type=float, default=0.0, metavar="S", help="end early, after S seconds")
    parser.add_argument("--json", default="", help="also write the account there, of several processes")
    chosen = parser.parse_args()
    enough = Enough(chosen.time_limit)
    if chosen.processes > 1:
        return _shared(chosen, enough)
    account = _work(chosen, enough)
    print(json.dumps(account))
    return GREW if _flat([account]) is False else 0


if __name__ == "__main__":
    sys.exit(main())
