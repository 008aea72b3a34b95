"""What a result file says about the machine and the spread of its samples. Shared by the benchmarks of this folder."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from devipc import __version__


def machine() -> dict[str, Any]:
    """Describe the machine and the software that were measured."""
    cpu = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": cpu[0] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "devipc": __version__,
    }


def spread(samples_s: Sequence[float]) -> dict[str, float]:
    """Return minimum, median, 99th percentile (microseconds) and the number of samples."""
    ordered = sorted(samples_s)
    return {
        "min_us": round(ordered[0] * 1e6, 2),
        "median_us": round(statistics.median(ordered) * 1e6, 2),
        "p99_us": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e6, 2),
        "samples": len(ordered),
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """Write ``result`` as indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
