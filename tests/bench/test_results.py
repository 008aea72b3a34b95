"""What the scripts beside the package make of results; left out where only the package is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

bars = pytest.importorskip("benchmarks.bars").bars
draw = pytest.importorskip("benchmarks.plot").draw
ROOT = Path(__file__).parents[2]


def row(page_tokens: int, direction: str, share: float, **more: Any) -> dict[str, Any]:
    common = {"geometry": "llama", "method": "cache", "gb_per_s": 50 * share, "floor_gb_per_s": 50.0}
    return {**common, "page_tokens": page_tokens, "direction": direction, "share_of_floor": share, **more}


def test_bars_hold_shares_against_their_targets() -> None:
    rows = [
        row(64, "backup", 0.98),
        row(16, "backup", 0.92),
        row(16, "restore", 0.93, first_layer_share=0.2),
        row(128, "backup", 0.1),
        row(64, "backup", 0.1, method="loop"),
    ]
    found = {bar["what"]: (bar["sense"], bar["target"], bar["met"]) for bar in bars({"one": {"results": rows}})}
    assert found == {
        "one: llama, pages of 64, backup": ("at least", 0.97, True),
        "one: llama, pages of 16, backup": ("at least", 0.93, False),
        "one: llama, pages of 16, restore": ("at least", 0.93, True),
        "first layer of a restore, pages of 16": ("at most", 0.167, False),
    }


def test_bars_hold_what_a_process_has_against_the_control_process() -> None:
    one = {"process": "engine, 2 client(s)", "device_over_control_nbytes": 2**24, "own_rss_over_control_nbytes": 2**26}
    calls = {"process": "calls of an engine in this process", "calls": []}
    assert [bar["met"] for bar in bars({"footprint": {"results": [one, calls]}})] == [True, False]
    slow = {"model": "decode", "moved_by": "cache", "mean_over_quiet": 1.05, "p99_over_quiet": 1.2}
    steps = {"interference": {"results": [slow, {**slow, "moved_by": "gather kernel"}]}}
    steps["interference"]["results"].append({**slow, "model": "decode_launched"})
    assert [bar["met"] for bar in bars(steps)] == [True, False]


def test_the_picture_has_a_line_for_every_allocation_that_was_measured() -> None:
    rows = [row(pages, way, 0.5) for pages in (1, 16, 64) for way in ("backup", "restore", "both")]
    picture = draw({"one": {"results": rows}, "classic_1": {"results": rows[:3]}})
    lines = [one for one in ElementTree.fromstring(picture).iter() if one.tag.endswith("polyline")]
    assert [len(one.attrib["points"].split()) for one in lines] == [3, 3, 0, 0, 1, 1]


def test_an_engines_figures_are_judged() -> None:
    hidden = {"h2d_over_compute": 0.5, "stall_over_h2d": 0.2}
    rows = [
        {"deployment": "none", "ttft_computed_ms": 60.0},
        {"deployment": "inproc", "ttft_restored_ms": 10.0, "ttft_restored_over_computed": 0.16, "hiding": [hidden]},
        {"deployment": "daemon", "ttft_restored_ms": 10.2, "throttle": {"halved_after_ms": 101.0}},
        {"died": "daemon"},
    ]
    judged = {bar["what"]: bar["met"] for bar in bars({"engine": {"results": rows}})}
    assert judged == {
        "engine, inproc: ttft_restored_over_computed": True,
        "engine, inproc: stall of a restore of 0.5 of a batch": False,
        "engine, daemon: write-back halved after ms": False,
        "engine: first token by daemon over in process": True,
    }


def test_the_picture_is_drawn_from_the_results() -> None:
    steps = json.loads((ROOT / "benchmarks/results/h200.json").read_text())["steps"]
    drawn = (ROOT / "docs/h200.svg").read_text()
    assert drawn == draw(steps), "python -m benchmarks.plot benchmarks/results/h200.json --out docs/h200.svg"
