"""Parts of the documents that are made from the code and from results: the table of cases and what was verified where.

``python docs/generate.py`` writes them in place, between two comments in each document; the tests hold the documents to
what it would write. Owns the tables and knows no backend: each is a folder with results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from devipc.conformance import cases
from devipc.conformance.reports import Run, cell, read_run
from devipc.conformance.results import SCHEMA, Result
from devipc.types import HandleKind, Strategy

ROOT = Path(__file__).resolve().parents[1]
BUILT_IN = "host"

AREAS = {
    "DISC": "Discovery: devices, identity, honest answers",
    "MEM": "Memory: what is shared is the same memory",
    "OFF": "Offsets and sizes",
    "LIFE": "Lifetime: closing, releasing, freeing, ending",
    "CRASH": "Crash: one side is killed or stopped",
    "SYNC": "Sync: words, events, markers and fences",
    "ORD": "Order: generations and hand-overs",
    "XFER": "Transfers: copies, streams, registered memory",
    "STATE": "Random walks beside the host backend",
}


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(text.replace('|', '/') for text in line)} |" for line in lines)


def catalogue(_folder: Path) -> str:
    """Return the cases, one table for each area."""
    parts = [f"{len(cases())} cases."]
    areas = list(dict.fromkeys(case.id.partition("-")[0] for case in cases()))
    for area in sorted(areas, key=list(AREAS).index):
        rows = [
            (f"`{case.id}`", case.demand + (" (on request: large)" if case.large else ""), f"`{case.clause}`")
            for case in cases()
            if case.id.startswith(f"{area}-")
        ]
        parts.append(f"### {AREAS[area]}\n\n{table(('Case', 'Demand', 'Clause'), rows)}")
    return "\n\n".join(parts)


def runs() -> dict[str, list[Run]]:
    """Return the committed runs of each backend, whole ones alone; a backend without any has an empty list."""
    found: dict[str, list[Run]] = {BUILT_IN: []}
    for project in sorted((ROOT / "backends").glob("*/pyproject.toml")):
        found[project.parent.name] = []
    for path in (*sorted((ROOT / "docs/results").glob("*.json")), *sorted(ROOT.glob("backends/*/results/*.json"))):
        if f'"{SCHEMA}"' in path.read_text(encoding="utf-8"):
            run = read_run(path)
            if run.whole:
                found.setdefault(run.backend, []).append(run)
    return found


def link(path: Path, folder: Path) -> str:
    """Return a link target relative to the folder of a document."""
    ups = [] if folder == ROOT else [".."]
    return "/".join([*ups, path.relative_to(ROOT).as_posix()])


def matrix(folder: Path) -> str:
    """Return the capability matrix: rows are memory kinds and completion strategies, columns are backends."""
    by_backend = runs()
    titles = []
    for name in by_backend:
        readme = ROOT / "backends" / name / "README.md"
        if not readme.is_file():
            titles.append(f"`{name}` (built in)")
        else:  # the book of documents holds no page outside of its folder
            titles.append(f"[`{name}`]({link(readme, folder)})" if folder == ROOT else f"`{name}`")
    rows = []
    for kind in HandleKind:
        cells = [cell(found, kind=kind.value) for found in by_backend.values()]
        if any(text not in ("-", "untested on hardware") for text in cells):
            rows.append([f"memory `{kind.value}`", *cells])
    for strategy in Strategy:
        rows.append(
            [f"sync `{strategy.value}`", *(cell(found, strategy=strategy.value) for found in by_backend.values())]
        )
    return table(("", *titles), rows)


def evidence(folder: Path) -> str:
    """Return the runs behind the matrix."""
    rows = []
    for name, found in runs().items():
        for run in found:
            counts = ", ".join(f"{run.count(result)} {result.value}" for result in Result if run.count(result))
            note = ", simulated" if run.simulated else ", not the vendor's own" if run.foreign else ""
            device = run.device + note
            versions = ", ".join(filter(None, (run.driver, run.bindings and f"bindings {run.bindings}")))
            results = f"[{run.path.name}]({link(run.path, folder)})"
            rows.append((f"`{name}`", device, versions, run.date, counts, results))
        if not found:
            rows.append((f"`{name}`", "none", "", "", "untested on hardware", ""))
    return table(("Backend", "Device", "Driver", "Date", "Cases", "Results"), rows)


def skips(_folder: Path) -> str:
    """Return what was skipped on real devices, and why."""
    rows = [
        (f"`{name}`", run.device, f"`{case}`", reason)
        for name, found in runs().items()
        for run in found
        if not run.simulated
        for case, reason in run.skips().items()
    ]
    return table(("Backend", "Device", "Case", "Reason"), rows) if rows else "Nothing was skipped."


def scenarios(_folder: Path) -> str:
    """Return under what the cache's scenarios were run on simulated drivers, as ``make test-scenarios`` wrote it."""
    rows = []
    for path in sorted(ROOT.glob("backends/*/results/scenarios.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        for one in found["combinations"].values():
            switches = ", ".join(f"`{name}={value}`" for name, value in one["switches"].items())
            asked = one["asked"] + (f" ({switches})" if switches else "")
            passed = f"{one['passed']} of {one['of']}"
            if alone := len(one.get("alone", ())):  # by hand, of what failed beside others
                passed += f", {alone} run again alone"
            rows.append((f"`{found['backend']}`", one["deployment"], asked, one["used"], passed, one["date"]))
    return table(("Backend", "Deployment", "Asked for", "In use", "Passed", "Date"), rows)


def device_scenarios(folder: Path) -> str:
    """Return under what the cache's scenarios were run on real devices; what a limit cut off is said."""
    rows = []
    for path in sorted(ROOT.glob("backends/*/results/hicache.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        for name, one in found["sections"].items():
            kind, _, line = name.partition(", ")
            if kind != "scenarios":
                continue
            deployment, strategy = line.split(", ")
            passed, missing = f"{one['found']['passed']} of {one['found']['of']}", one["found"].get("not reached")
            passed += f", {len(one['found']['failed'])} failed, {missing} not reached" if missing else ""
            date = one.get("date", found["facts"]["date"])[:10]
            rows.append(
                (found["facts"]["device"], deployment, strategy, passed, date, f"[{path.name}]({link(path, folder)})")
            )
    return table(("Device", "Deployment", "Asked for", "Passed", "Date", "Results"), rows)


def bars(_folder: Path) -> str:
    """Return what the benchmarks on a device found, beside what they are to reach."""
    rows = []
    for path in sorted(ROOT.glob("benchmarks/results/h200*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        dates = {step["machine"]["date"] for step in found["steps"].values()}
        for bar in found["bars"]:
            met = "met" if bar["met"] else "missed"
            rows.append((bar["what"], f"{bar['sense']} {bar['target']}", str(bar["found"]), met, min(dates)))
    return table(("What", "Bar", "Found", "", "Date"), rows)


def requests(_folder: Path) -> str:
    """Return what requests to the daemon cost without an accelerator, beside what they may."""
    found = json.loads((ROOT / "benchmarks/results/control.json").read_text(encoding="utf-8"))
    rows = []
    for place, one in found["placements"].items():
        calls = {**one["calls"], **{f"match_{row['keys']}_{row['kind']}": row["match"] for row in one["match"]}}
        for name, times in calls.items():
            limit = next((named for named in one["limits"].items() if named[0].startswith(name)), None)
            bar = ("", "", "")
            if limit is not None:
                figure, held = limit
                bar = (f"{held['value']} {_UNITS[figure.rpartition('_')[2]]}", f"at most {held['limit']:g}", "")
                bar = (*bar[:2], "met" if held["kept"] else "missed")
            p50, p99 = f"{times['median_us']:.0f}", f"{times['p99_us']:.0f}"
            rows.append((place, name.replace("_", " "), p50, p99, *bar))
    return table(("Processes", "Request", "p50, us", "p99, us", "Found", "Bar", ""), rows)


_UNITS = {"bare": "of the bare round trip", "us": "us"}

PARTS: dict[str, Callable[[Path], str]] = {
    "cases": catalogue,
    "matrix": matrix,
    "evidence": evidence,
    "skips": skips,
    "scenarios": scenarios,
    "device_scenarios": device_scenarios,
    "bars": bars,
    "requests": requests,
}
"""What can be asked for in a document, by a comment ``generated NAME``."""

_PART = re.compile(r"<!-- generated (?P<name>\w+): begin -->\n.*?<!-- generated (?P=name): end -->", re.DOTALL)


def renewed(text: str, folder: Path) -> str:
    """Return a document of ``folder`` with its generated parts made anew."""

    def part(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- generated {name}: begin -->\n\n{PARTS[name](folder)}\n\n<!-- generated {name}: end -->"

    return _PART.sub(part, text)


def documents() -> list[Path]:
    """Return the documents that have generated parts."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [path for path in every if _PART.search(path.read_text(encoding="utf-8"))]


def main() -> None:
    """Write all of them."""
    for path in documents():
        before = path.read_text(encoding="utf-8")
        after = renewed(before, path.parent)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"{path.relative_to(ROOT)} is renewed")  # noqa: T201 - a script that says what it did


if __name__ == "__main__":
    main()
