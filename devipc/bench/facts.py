"""What a result says about the machine, and the spread of its samples.

Owns the common form of all results: machine facts, distributions, ratios. It measures nothing.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from devipc import __version__

__all__ = ["machine", "quantile", "ratio", "spread", "write"]


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


def quantile(samples: Sequence[float], share: float) -> float:
    """Return the sample below which ``share`` of them lie; the largest for few samples."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def spread(samples_s: Sequence[float]) -> dict[str, float]:
    """Return minimum, median, 99th percentile (microseconds) and the number of samples."""
    return {
        "min_us": round(min(samples_s) * 1e6, 2),
        "median_us": round(statistics.median(samples_s) * 1e6, 2),
        "p99_us": round(quantile(samples_s, 0.99) * 1e6, 2),
        "samples": len(samples_s),
    }


def ratio(value: float, floor: float) -> float:
    """Return ``value / floor``, rounded to what is worth to be read."""
    return round(value / floor, 3)


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write ``result`` as indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
