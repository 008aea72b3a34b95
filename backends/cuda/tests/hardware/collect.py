"""Turns a folder of raw results into the files that are kept: each with the device and the versions it holds for.

``python -m backends.cuda.tests.hardware.collect RAW_FOLDER OUT_FOLDER``, on the machine that made them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from . import evidence

KEPT = (
    "smoke",
    "submission",
    "death",
    "pending_wait",
    "namespaces",
    "sticky",
    "torch_session",
    "conformance",
    "handover",
    "sessions",
)
HICACHE = ("latency", "death", "scenarios")
STRATEGIES = ("stream_memop", "host_flag", "polling", "event")


def main(raw: Path, out: Path) -> None:
    device = evidence.open_device()
    facts = evidence.facts(device)
    device.close()
    out.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        path = raw / f"{name}.json"
        if path.exists():
            keep(out / path.name, json.loads(path.read_text()), facts)
    demos = {strategy: raw / f"demo_{strategy}.json" for strategy in STRATEGIES}
    found = {strategy: json.loads(path.read_text()) for strategy, path in demos.items() if path.exists()}
    if found:
        keep(out / "demo.json", {"strategies": found}, facts)
    parts = {part: raw / f"hicache_{part}.json" for part in HICACHE}
    sections: dict[str, Any] = {}
    for path in parts.values():
        sections |= json.loads(path.read_text())["sections"] if path.exists() else {}
    if sections:
        keep(out / "hicache.json", {"sections": sections}, facts)


def keep(path: Path, result: dict[str, Any], facts: dict[str, Any]) -> None:
    """Write one result; what it says about itself beyond the common facts stays."""
    kept = without_paths(result)
    own = kept.pop("facts", {})
    path.write_text(json.dumps({"facts": {**own, **facts}, **kept}, indent=1) + "\n")


def without_paths(value: Any) -> Any:
    """Drop where the machine keeps the driver's library: it says nothing about the result."""
    if isinstance(value, dict):
        return {name: without_paths(each) for name, each in value.items() if name != "libcuda"}
    return [without_paths(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
