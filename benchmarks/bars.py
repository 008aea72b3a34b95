"""Gathers the results of ``benchmarks/h200.sh`` into one file, and says which bars they meet.

``python -m benchmarks.bars FOLDER --out FILE`` reads the results of a run, ``python -m benchmarks.bars FILE`` a file
that was made so. A bar is a share of a floor of the same run, or a ratio to one; see ``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from devipc.bench.facts import write

AT_LEAST, AT_MOST = "at least", "at most"
SHARES: dict[str, list[tuple[dict[str, Any], dict[str, float]]]] = {
    "one": [
        ({"page_tokens": 64}, {"backup": 0.97, "restore": 0.97, "both": 0.95}),
        ({"page_tokens": 16}, {"backup": 0.93, "restore": 0.93, "both": 0.88}),
    ],
    "one_1": [({"page_tokens": 1}, {"backup": 0.34, "restore": 0.44, "both": 0.30})],
    "layers": [
        ({"page_tokens": 64}, {"backup": 0.95, "restore": 0.95}),
        ({"page_tokens": 16}, {"backup": 0.88, "restore": 0.88}),
    ],
    "classic": [
        ({"page_tokens": 64}, {"backup": 0.95, "restore": 0.95}),
        ({"page_tokens": 16}, {"backup": 0.80, "restore": 0.80}),
    ],
    "geometries": [
        ({"page_tokens": pages, "geometry": geometry}, {"backup": share, "restore": share})
        for geometry in ("tp4", "mla")
        for pages, share in ((64, 0.94), (16, 0.85))
    ],
    "runs": [({"page_tokens": pages}, {"backup": 0.95, "restore": 0.95}) for pages in (64, 16, 1)],
    "small": [({"page_tokens": pages}, {"backup": 0.8, "restore": 0.8}) for pages in (64, 16)],
}
"""By step and row: the least share of the contiguous floor. Of ``small``, at most 1.25 times the bare copy's time."""
FIRST_LAYER = 1 / 6
INTERFERENCE = {"decode": {"mean_over_quiet": 1.05, "p99_over_quiet": 1.10}, "prefill": {"mean_over_quiet": 1.03}}
NAMES = {"decode": "decode, a recorded graph,", "prefill": "prefill"}
ENGINE = {
    "ttft_restored_over_computed": 1 / 6,
    "itl_busy_over_quiet_p50": 1.03,
    "itl_busy_over_quiet_p99": 1.10,
    "itl_paced_over_quiet_p50": 1.03,
    "itl_paced_over_quiet_p99": 1.10,
}
DAEMON_FIRST_TOKEN, STALL, HALVED_AFTER_MS = 1.03, 0.10, 100.0
DEVICE_NBYTES_A_CLIENT, RSS_NBYTES = 8 * 2**20, 60 * 2**20


def bars(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every bar that ``results`` has a figure for."""
    for step, wanted in SHARES.items():
        rows = results.get(step, {}).get("results", [])
        for match, shares in wanted:
            for row in rows:
                share = shares.get(row["direction"])
                if share is not None and row["method"] == "cache" and match.items() <= row.items():
                    what = (
                        f"{step}: {row['geometry']}, pages of {row['page_tokens']}, {row['direction']}{_at_once(row)}"
                    )
                    yield _bar(what, AT_LEAST, share, row["share_of_floor"])
    for row in results.get("one", {}).get("results", []):
        if row.get("direction") == "restore" and row["method"] == "cache" and row["page_tokens"] in (16, 64):
            what = f"first layer of a restore, pages of {row['page_tokens']}{_at_once(row)}"
            yield _bar(what, AT_MOST, FIRST_LAYER, row["first_layer_share"])
    for row in results.get("interference", {}).get("results", []):
        for figure, most in INTERFERENCE.get(row["model"], {}).items() if row["moved_by"] == "cache" else ():
            yield _bar(f"{NAMES[row['model']]} beside transfers, {figure}", AT_MOST, most, row[figure])
    for row in results.get("footprint", {}).get("results", []):
        if "device_over_control_nbytes" in row:
            clients = int(row["process"].split()[1])
            most = clients * DEVICE_NBYTES_A_CLIENT
            yield _bar(f"{row['process']}: device memory", AT_MOST, most, row["device_over_control_nbytes"])
            yield _bar(f"{row['process']}: memory of its own", AT_MOST, RSS_NBYTES, row["own_rss_over_control_nbytes"])
    yield from _engine_bars(results.get("engine", {}).get("results", []))


def _engine_bars(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    by_name = {row["deployment"]: row for row in rows if "deployment" in row}
    for name, row in by_name.items():
        for figure, most in ENGINE.items():
            if figure in row:
                yield _bar(f"engine, {name}: {figure}", AT_MOST, most, row[figure])
        for hidden in row.get("hiding", []):
            what = f"engine, {name}: stall of a restore of {hidden['h2d_over_compute']} of a batch"
            yield _bar(what, AT_MOST, STALL, hidden["stall_over_h2d"])
        if "throttle" in row:
            yield _bar(
                f"engine, {name}: write-back halved after ms",
                AT_MOST,
                HALVED_AFTER_MS,
                row["throttle"]["halved_after_ms"],
            )
    first = {name: row["ttft_restored_ms"] for name, row in by_name.items() if "ttft_restored_ms" in row}
    if {"inproc", "daemon"} <= set(first):
        found = round(first["daemon"] / first["inproc"], 3)
        yield _bar("engine: first token by daemon over in process", AT_MOST, DAEMON_FIRST_TOKEN, found)


def _at_once(row: dict[str, Any]) -> str:
    """Name how many operations were in flight, where that is not one."""
    count = row.get("in_flight", 1)
    return "" if count == 1 else f", {count} in flight"


def _bar(what: str, sense: str, target: float, found: float) -> dict[str, Any]:
    met = found >= target if sense == AT_LEAST else found <= target
    return {"what": what, "sense": sense, "target": round(target, 3), "found": found, "met": met}


def main() -> None:
    """Gather, judge, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.results.is_dir():
        results = {path.stem: json.loads(path.read_text()) for path in sorted(options.results.glob("*.json"))}
    else:
        results = json.loads(options.results.read_text())["steps"]
    judged = list(bars(results))
    for bar in judged:
        print(f"{'met ' if bar['met'] else 'MISS'} {bar['what']:60} {bar['found']:>12} {bar['sense']} {bar['target']}")
    print(f"{sum(bar['met'] for bar in judged)} of {len(judged)} bars met")
    if options.out is not None:
        write(options.out, {"schema": "devipc.benchmarks/1", "bars": judged, "steps": results})


if __name__ == "__main__":
    main()
