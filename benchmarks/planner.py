"""How long it takes to plan copies, beside allocating and filling arrays of the same size in the same run.

One process, no device. Every repetition plans fresh random pages at fresh random host places and keeps no plan.
``python -m benchmarks.planner [--repetitions 40] [--out FILE]`` prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from devipc.bench.facts import machine, spread, write
from devipc.hicache.layout import Component, Plane, PoolChunk, PoolLayout, Rule
from devipc.hicache.planning.planner import CopyPlan, Direction, HostPages, Planner
from devipc.types import HandleKind

LAYERS, ROW_NBYTES, PAGE_TOKENS, POOL_PAGES = 32, 2048, 16, 60_000
ARENA, POOL = 1 << 44, 1 << 50
SIZES = (16, 256, 2_500, 10_000, 40_000)
LIMITS_US = {("constant", 16): 50.0, ("constant", 10_000): 3_000.0, ("irregular", 10_000): 20_000.0}


def pool(planes: int, chunks: int) -> PoolLayout:
    """K and V of 32 layers, all in one allocation or in one each."""
    plane = POOL_PAGES * PAGE_TOKENS * ROW_NBYTES
    each = planes // chunks
    made = tuple(
        Plane(i // 2, i // each, i % each * plane, ROW_NBYTES, ROW_NBYTES, PAGE_TOKENS * ROW_NBYTES)
        for i in range(planes)
    )
    component = Component("kv", Rule.FULL_ATTENTION, PAGE_TOKENS, PAGE_TOKENS, made)
    return PoolLayout(POOL_PAGES, (PoolChunk(each * plane, HandleKind.LEGACY),) * chunks, (component,), 1)


def planner(chunks: int) -> Planner:
    """Place the chunks at distances that no copy can span."""
    layout = pool(2 * LAYERS, chunks)
    addresses = [POOL + index * (1 << 38) + index**2 * 4096 for index in range(chunks)]
    return Planner(layout, addresses, arena=(ARENA, POOL_PAGES * layout.page_nbytes))


def measure(which: Planner, count: int, repetitions: int, *, runs: bool = False) -> dict[str, Any]:
    """Time ``count`` pages, random or as one run into one extent, and a floor that only makes the same arrays."""
    rng, page = np.random.default_rng(count), which.page_nbytes
    plan_s, floor_s = [], []
    plan: CopyPlan | None = None
    for _ in range(repetitions + 3):
        if runs:
            ids = np.arange(count, dtype=np.int64) + 1 + int(rng.integers(0, POOL_PAGES - count))
            host = HostPages.one_extent(ARENA, count)
        else:
            ids = rng.permutation(POOL_PAGES - 1)[:count] + 1
            host = HostPages.blocks(ARENA + rng.permutation(POOL_PAGES)[:count] * page)
        start = time.perf_counter()
        plan = which.plan(Direction.BACKUP, ids, host)
        plan_s.append(time.perf_counter() - start)
        group = plan.groups[0]
        start = time.perf_counter()
        made = [np.full_like(array, 1) for array in (group.strided, group.dst, group.src, group.nbytes)]
        floor_s.append(time.perf_counter() - start)
        del made
    assert plan is not None
    return {
        "pages": count,
        "strided": len(plan.groups[0].strided),
        "batch_entries": len(plan.groups[0].nbytes),
        "plan": spread(plan_s[3:]),
        "floor_fill": spread(floor_s[3:]),
    }


def main() -> None:
    """Measure all geometries and sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "planner.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for geometry, chunks in (("constant", 1), ("irregular", 64)):
        which = planner(chunks)
        for runs in (False, True):
            for count in SIZES:
                repetitions = options.repetitions * (10 if count < 1000 else 1)
                row: dict[str, Any] = {"geometry": geometry, "pages_are": "one run" if runs else "random"}
                row |= measure(which, count, repetitions, runs=runs)
                limit = None if runs else LIMITS_US.get((geometry, count))
                row |= {"limit_us": limit, "kept": None if limit is None else row["plan"]["median_us"] <= limit}
                rows.append(row)
                plan, floor = row["plan"], row["floor_fill"]
                print(
                    f"{geometry:10} {row['pages_are']:8} {count:6} pages: {plan['median_us']:9.1f} us"
                    f" (min {plan['min_us']:9.1f}), filling the same arrays {floor['median_us']:9.1f} us"
                    + ("" if limit is None else f", limit {limit:.0f}")
                )
    geometry_facts = {"planes": 2 * LAYERS, "row_nbytes": ROW_NBYTES, "page_tokens": PAGE_TOKENS}
    write(options.out, {"machine": machine(), "geometry": geometry_facts, "results": rows})


if __name__ == "__main__":
    main()
