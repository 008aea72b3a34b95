"""Runs driver calls with edge arguments and prints what each answered, as JSON.

The same script runs on hardware and on the simulator; the simulator is right when
both print the same.  Each case has a process of its own, several at a time, so that a
crash is an answer ("signal 11") and no case sees what another left.  Usage::

    trace_calls.py                      all cases, JSON on standard output, progress on standard error
    trace_calls.py --together           quicker: one process for all cases that cannot crash
    trace_calls.py --list               names only
    trace_calls.py --one NAME           one case
    trace_calls.py --compare A B        differences between two outputs; exit 1 if any
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.simulator.trace_cases.world import CASES, Case, Unexpected, World, run_child, text

# Facts that belong to a machine, not to the meaning of a call.
INFORMATIVE = ("fact_attributes", "fact_memory")
AT_ONCE = 8


def load() -> None:
    """Imports the cases, which registers them; a crash while importing has no case to name."""
    from tests.simulator.trace_cases import (  # noqa: F401
        copies,
        events,
        handles,
        memory,
        peers,
        physical,
        pools,
        values,
    )


def observe(world: World, one: Case) -> object:
    """The case's answer; a refusal by the binding, or a failed preparation, is text too."""
    try:
        with world.scope():
            return text(one.run(world))
    except Unexpected as error:
        return f"unprepared: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def flat(name: str, answer: object) -> dict[str, object]:
    """One entry per call: the parts of a case become ``case.part``."""
    if not isinstance(answer, dict):
        return {name: answer}
    found: dict[str, object] = {}
    for part, value in answer.items():
        found.update(flat(f"{name}.{part}", value))
    return found


def alone(name: str) -> object:
    """The answer of a case in its own process."""
    print(name, file=sys.stderr, flush=True)
    return run_child(["--one", name])


def run_all(*, together: bool) -> dict[str, dict[str, object]]:
    """Every case, in order of registration."""
    apart = [name for name, one in CASES.items() if one.isolated or not together]
    with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
        answers: dict[str, Any] = dict(zip(apart, pool.map(alone, apart), strict=True))
    if together:
        world = World()
        answers.update({name: observe(world, one) for name, one in CASES.items() if not one.isolated})
    cases: dict[str, object] = {}
    for name in CASES:
        cases.update(flat(name, answers[name]))
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return {"about": {"date": today, "of": run_child(["--about"])}, "cases": cases}


def about() -> dict[str, object]:
    """What the answers are of."""
    from cuda import bindings
    from cuda.bindings import driver as cu

    world = World()
    name = cu.cuDeviceGetName(64, world.device)[1].split(b"\0")[0].decode()
    kernel = Path("/proc/driver/nvidia/version")
    module = kernel.read_text().split("Module")[-1].split("(")[0].split() if kernel.exists() else []
    return {
        "device": name,
        "driver": int(cu.cuDriverGetVersion()[1]),
        "kernel_driver": " ".join(word for word in module if word[:1].isdigit()),
        "bindings": bindings.__version__,
        "python": sys.version.split()[0],
    }


def differences(first: dict[str, object], second: dict[str, object]) -> list[str]:
    """Names of the cases whose answers differ, or that one side lacks."""
    names = {**first, **second}
    return [
        name
        for name in names
        if first.get(name, "absent") != second.get(name, "absent") and name.split(".")[0] not in INFORMATIVE
    ]


def compare(left: str, right: str) -> int:
    """Prints each case that differs; returns how many do."""
    first, second = (json.loads(Path(name).read_text())["cases"] for name in (left, right))
    found = differences(first, second)
    for name in found:
        print(f"{name}\n  {left}: {json.dumps(first.get(name))}\n  {right}: {json.dumps(second.get(name))}")
    print(f"{len(found)} of {len({**first, **second})} cases differ")
    return len(found)


def finish(value: object) -> None:
    """Prints an answer and leaves at once: what a case broke must not show in the tear-down."""
    print(json.dumps(value), flush=True)
    os._exit(0)


def main(arguments: list[str]) -> int:
    """Command line; see the module's text."""
    if arguments[:1] == ["--compare"]:
        return 1 if compare(arguments[1], arguments[2]) else 0
    load()
    if arguments[:1] == ["--list"]:
        print("\n".join(CASES))
    elif arguments[:1] == ["--one"]:
        finish(observe(World(), CASES[arguments[1]]))
    elif arguments[:1] == ["--peer"]:
        from tests.simulator.trace_cases.peers import PEERS

        finish(text(PEERS[arguments[1]](*arguments[2:])))
    elif arguments[:1] == ["--about"]:
        finish(about())
    else:
        print(json.dumps(run_all(together="--together" in arguments), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
