"""Runs driver calls with edge arguments and prints what each answered, as JSON.

The same script runs on hardware and on the simulator; the simulator is right when
both print the same.  Usage::

    trace_calls.py                      all cases, JSON on standard output
    trace_calls.py --list               names only
    trace_calls.py --one NAME           one case
    trace_calls.py --compare A B        differences between two outputs; exit 1 if any
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cuda import bindings
from cuda.bindings import driver as cu

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

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
from tests.simulator.trace_cases.world import CASES, Case, Unexpected, World, need, run_child, text

# Facts that belong to a machine, not to the meaning of a call.
INFORMATIVE = ("fact_attributes", "fact_memory")


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


def run_all() -> dict[str, dict[str, object]]:
    """Every case, in order; isolated ones in a child of their own."""
    world = World()
    cases: dict[str, object] = {}
    for name, one in CASES.items():
        cases.update(flat(name, run_child(["--one", name]) if one.isolated else observe(world, one)))
        state = cu.cuCtxSynchronize()
        if state[0] != cu.CUresult.CUDA_SUCCESS:
            cases[f"{name}.context"] = text(state)
            break
    about = {
        "driver": need(cu.cuDriverGetVersion()),
        "bindings": bindings.__version__,
        "device": need(cu.cuDeviceGetName(64, world.device)).split(b"\0")[0].decode(),
    }
    return {"about": about, "cases": cases}


def compare(left: str, right: str) -> int:
    """Prints each case that differs; returns how many do."""
    first, second = (json.loads(Path(name).read_text())["cases"] for name in (left, right))
    differing = 0
    for name in {**first, **second}:
        a, b = first.get(name, "absent"), second.get(name, "absent")
        if a != b and name.split(".")[0] not in INFORMATIVE:
            differing += 1
            print(f"{name}\n  {left}: {json.dumps(a)}\n  {right}: {json.dumps(b)}")
    print(f"{differing} of {len({**first, **second})} cases differ")
    return differing


def main(arguments: list[str]) -> int:
    """Command line; see the module's text."""
    if arguments[:1] == ["--list"]:
        print("\n".join(CASES))
    elif arguments[:1] == ["--one"]:
        print(json.dumps(observe(World(), CASES[arguments[1]])))
    elif arguments[:1] == ["--peer"]:
        print(json.dumps(text(peers.PEERS[arguments[1]](*arguments[2:]))))
    elif arguments[:1] == ["--compare"]:
        return 1 if compare(arguments[1], arguments[2]) else 0
    else:
        print(json.dumps(run_all(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
