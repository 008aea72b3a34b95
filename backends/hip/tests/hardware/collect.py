"""Turns a folder of raw results into the files that are kept, each with what it ran on: no AMD device.

``python -m backends.hip.tests.hardware.collect RAW_FOLDER OUT_FOLDER``, on the machine that made them.
"""

from __future__ import annotations

import datetime
import importlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

KEPT = ("conformance", "handover")
STRATEGIES = ("stream_memop", "host_flag", "polling", "event")
HARDWARE = "NVIDIA via forwarding"


def facts() -> dict[str, Any]:
    """Return what every kept file says about the run."""
    backend = importlib.import_module("devipc_hip.backend").HipBackend()
    module = Path("/proc/driver/nvidia/version")
    said = {name: value for name, value in backend.facts().items() if name not in ("libamdhip64", "ROCM_PATH")}
    return {
        **said,
        "hardware": HARDWARE,
        "device": backend.devices()[0].name,
        "nvidia kernel module": module.read_text(encoding="utf-8").splitlines()[0] if module.exists() else "none",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def main(raw: Path, out: Path) -> None:
    common = facts()
    out.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        path = raw / f"{name}.json"
        if path.exists():
            keep(out / path.name, json.loads(path.read_text()), common)
    demos = {strategy: raw / f"demo_{strategy}.json" for strategy in STRATEGIES}
    found = {strategy: json.loads(path.read_text()) for strategy, path in demos.items() if path.exists()}
    if found:
        keep(out / "demo.json", {"strategies": found}, common)


def keep(path: Path, result: dict[str, Any], common: dict[str, Any]) -> None:
    """Write one result; what it says about itself beyond the common facts stays."""
    kept = without_paths(result)
    own = kept.pop("facts", {})
    path.write_text(json.dumps({"hardware": HARDWARE, "facts": {**own, **common}, **kept}, indent=1) + "\n")


def without_paths(value: Any) -> Any:
    """Drop where the machine keeps its libraries: it says nothing about the result."""
    if isinstance(value, dict):
        return {name: without_paths(each) for name, each in value.items() if name not in ("libamdhip64", "ROCM_PATH")}
    return [without_paths(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
