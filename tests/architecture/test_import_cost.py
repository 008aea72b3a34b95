"""What ``import devipc`` costs and loads: a cache system imports it long before it knows whether it needs it."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

import pytest

RUNS = 20
MAX_IMPORT_S = 0.025
MAX_VERSION_S = 0.150
HEAVY = {"torch", "numpy", "click", "rich", "pluggy"}

LOADED = """
import json, sys
{statement}
objects = {{line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}}
print(json.dumps([sorted({{name.split(".")[0] for name in sys.modules}}), sorted(objects)]))
"""


def seconds(*command: str) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=30)
    return time.perf_counter() - started


def loaded(statement: str) -> tuple[set[str], set[str]]:
    """Return the top-level modules and the shared objects of a process that ran ``statement``."""
    code = LOADED.format(statement=statement)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=30)
    modules, objects = json.loads(done.stdout)
    return set(modules), set(objects)


@pytest.mark.timing
def test_import_is_cheap() -> None:
    """Bare interpreter and import take turns, so that a busy machine slows both."""
    bare, ours = [], []
    for _ in range(RUNS):
        bare.append(seconds(sys.executable, "-c", "pass"))
        ours.append(seconds(sys.executable, "-c", "import devipc"))
    cost = statistics.median(ours) - statistics.median(bare)
    print(f"import devipc: {cost * 1e3:.1f} ms above {statistics.median(bare) * 1e3:.1f} ms (median of {RUNS})")
    assert cost <= MAX_IMPORT_S


def test_import_loads_nothing_heavy_and_no_driver() -> None:
    modules, objects = loaded("import devipc")
    assert "devipc" in modules
    assert not modules & HEAVY
    # Beyond the standard library's own needs nothing may be mapped but its extension modules.
    _, bare = loaded("import ctypes, hashlib, mmap, select, socket")
    assert not {path for path in objects - bare if "/lib-dynload/" not in path}


def test_the_check_would_see_a_heavy_module_and_a_foreign_library() -> None:
    modules, objects = loaded("import numpy")
    assert "numpy" in modules
    assert any("numpy" in path for path in objects)


@pytest.mark.timing
def test_version_is_printed_at_once() -> None:
    script = os.path.join(os.path.dirname(sys.executable), "devipc")
    took = statistics.median(seconds(script, "--version") for _ in range(RUNS))
    print(f"devipc --version: {took * 1e3:.0f} ms (median of {RUNS})")
    assert took < MAX_VERSION_S
