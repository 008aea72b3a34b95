"""What every script of this folder does around its own: sections, facts, GPU memory at the end, one JSON file.

Owns the form of a result file. A section that fails is written down with its traceback and the next one runs. On the
simulated driver the same scripts run small, so that a test can keep them alive; such files say so and are no evidence.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from backends.testing.helpers import staging

__all__ = ["SIMULATED", "Section", "busy_nbytes", "main", "quantiles", "until"]

SIMULATED = "DEVSIM_ROOM" in os.environ
"""Whether this process runs on the simulated driver: sizes are small then."""
SETTLE_S = 10.0
MIB = 2**20

Section = tuple[str, Callable[[], Any]]


def open_device() -> Any:
    return importlib.import_module("devipc_cuda.backend").CudaBackend().open_device()


def until(condition: Callable[[], object], timeout_s: float, *, pause_s: float = 0.0) -> bool:
    """Ask until ``condition()`` is true, or the time is over; return whether it became true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True


def quantiles(values: Sequence[float], digits: int = 2) -> dict[str, float]:
    """Smallest, middle and largest of some numbers, and how many there are."""
    ordered = sorted(values)
    return {
        "min": round(ordered[0], digits),
        "median": round(ordered[len(ordered) // 2], digits),
        "max": round(ordered[-1], digits),
        "n": len(ordered),
    }


def busy_nbytes(device: Any) -> int:
    """Device memory in use by anybody."""
    info = device.transfer.memory_info()
    return int(info.total_nbytes - info.free_nbytes)


def warm_up(device: Any) -> None:
    """Use every primitive once: what a driver keeps from a first use is no leak."""
    for kind in device.memory.kinds():
        device.memory.free(device.memory.allocate(4096, kind=kind, zero=True))
    with staging(device) as host:
        block = device.memory.allocate(4096)
        host.read(block.ptr, 4096)
        device.sync.word_writes.write(host.stream, host.device_ptr, 1)
        device.transfer.synchronize_stream(host.stream)
        device.memory.free(block)
    device.sync.events.destroy(device.sync.events.create())


def facts(device: Any) -> dict[str, Any]:
    """What a result holds for: device, driver, bindings, torch, Python, date."""
    driver = importlib.import_module("devipc_cuda.driver")
    backend = importlib.import_module("devipc_cuda.backend")
    known = dict(backend.CudaBackend().facts())
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "simulated": SIMULATED,
        "device": device.info.name,
        "device memory": device.info.total_nbytes,
        "driver": known.get("driver", ""),
        "kernel module": known.get("kernel_driver", ""),
        "cuda-bindings": driver.bindings_version(),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "devipc": importlib.import_module("devipc").__version__,
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def main(what: str, sections: Callable[[Any], Sequence[Section]]) -> int:
    """Run the sections on the first device and write the file; the exit status says whether all went well.

    Parameters
    ----------
    what : str
        The script's text: what its numbers mean.
    sections : callable
        Given the opened device, returns names and functions; what a function returns is written down.
    """
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="run sections whose name contains this")
    options = parser.parse_args()
    device = open_device()
    warm_up(device)
    before = busy_nbytes(device)
    report: dict[str, Any] = {"about": " ".join(what.split()), "facts": facts(device), "sections": {}}
    failed = 0
    for name, run in sections(device):
        if options.only not in name:
            continue
        result = _run(name, run)
        failed += not result["ok"]
        report["sections"][name] = result
        _write(options.out, report)
    until(lambda: busy_nbytes(device) <= before, SETTLE_S, pause_s=0.05)
    report["device memory at start"] = before
    report["device memory not given back"] = busy_nbytes(device) - before
    device.close()
    _write(options.out, report)
    print(f"device memory not given back: {report['device memory not given back']}")
    print(f"{failed} of {len(report['sections'])} sections failed")
    return 1 if failed or report["device memory not given back"] > 0 else 0


def _run(name: str, run: Callable[[], Any]) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        result: dict[str, Any] = {"ok": True, "found": run()}
    except BaseException:
        result = {"ok": False, "error": traceback.format_exc()}
    result["s"] = round(time.perf_counter() - began, 2)
    print(f"{'ok ' if result['ok'] else 'BAD'} {result['s']:6.2f} s  {name}", flush=True)
    if not result["ok"]:
        print(result["error"], file=sys.stderr, flush=True)
    return result


def _write(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, default=str) + "\n")
