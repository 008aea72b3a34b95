"""What each way to hand many copies to the driver costs, beside contiguous copies of the same bytes.

Pages of 1, 16 and 64 tokens with 64 planes of 2,048-byte rows: as strided copies one call each or in one batch call, as
plain copies in batches that one to three threads submit to as many streams, over one allocation, over 64 that are
mapped side by side, and over 64 classic ones; and the rows of two other geometries, in one allocation. Several lists of
other pages follow each other, as with several operations in flight.
``python -m backends.cuda.tests.hardware.submission --out FILE``; ``--only`` takes some of :data:`CASES`, ``--rows``
how long the pool is, ``--lists`` how many lists follow each other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from devipc.bench.pools import GEOMETRIES, Pinned, Pool
from devipc.hicache.moving.fan import Fan
from devipc.hicache.moving.mover import MarkerPool
from devipc.hicache.planning.planner import Direction, HostPages, Planner
from devipc.hicache.planning.strips import CostModel
from devipc.spi import HandleKind

from . import evidence

WAYS = ("d2h", "h2d", "both")
REPETITIONS = 7
CASES = {
    "one": ("llama", "one"),
    "layers": ("llama", "layers"),
    "classic": ("llama", "classic"),
    "tp4": ("tp4", "one"),
    "mla": ("mla", "one"),
}
"""Geometry and allocation of the pool, by name."""


class Rig:
    """A device, pinned memory for both ways, and a stream for each."""

    def __init__(self, device: Any, tokens: int, geometry: str, lists: int) -> None:
        self.device = device
        self.tokens = tokens
        self.lists = lists
        self.nbytes = tokens * GEOMETRIES[geometry].token_nbytes
        self.pinned = [Pinned(device, self.nbytes) for _ in range(2)]
        self.block = [device.memory.allocate(self.nbytes, kind=HandleKind.VMM_FD) for _ in range(2)]
        self.markers = MarkerPool(device.transfer)
        self.floor = {way: self.time(partial(self._contiguous, way))[1] for way in WAYS}

    def gb_per_s(self) -> dict[str, float]:
        """What contiguous copies reach."""
        nbytes = self.lists * self.nbytes
        return {way: round(nbytes * (1 + (way == "both")) / s / 1e9, 2) for way, s in self.floor.items()}

    def close(self) -> None:
        self.markers.close()
        for pinned, block in zip(self.pinned, self.block, strict=True):
            pinned.close()
            self.device.memory.free(block)

    def _contiguous(self, way: str) -> None:
        for side in self.sides(way) * self.lists:
            to, back = self.pinned[side].ptr, self.block[side].ptr
            to, back = (to, back) if side == 0 else (back, to)
            self.device.transfer.copy(self.pinned[side].stream, to, back, self.nbytes)

    @staticmethod
    def sides(way: str) -> tuple[int, ...]:
        return {"d2h": (0,), "h2d": (1,), "both": (0, 1)}[way]

    def time(self, submit: Callable[[], None]) -> tuple[float, float]:
        """Return medians: seconds until all lists were submitted, and until they were done."""
        submitted, done = [], []
        for _ in range(REPETITIONS + 2):
            start = time.perf_counter()
            submit()
            submitted.append(time.perf_counter() - start)
            for pinned in self.pinned:
                self.device.transfer.synchronize_stream(pinned.stream)
            done.append(time.perf_counter() - start)
        return statistics.median(submitted[2:]), statistics.median(done[2:])

    def row(self, way: str, submit: Callable[[], None]) -> dict[str, float]:
        submitted, done = self.time(submit)
        return {"submit_ms": round(submitted * 1e3, 3), "share": round(self.floor[way] / done, 3)}


def plans(rig: Rig, pool: Pool, bases: list[int], regions: list[int], page_tokens: int) -> list[Any]:
    """Return fresh copies for each direction, strided ones and plain ones, by list."""
    rng = np.random.default_rng(5)
    found: list[Any] = []
    for side, direction in enumerate((Direction.BACKUP, Direction.RESTORE)):
        arena = (rig.pinned[side].ptr, rig.pinned[side].nbytes)
        strided = Planner(pool.built.layout, bases, arena=arena, regions=regions)
        plain = Planner(pool.built.layout, bases, arena=arena, cost=CostModel(call_s=1.0))
        found.append([])
        for _ in range(rig.lists):
            pages = rng.permutation(pool.page_count - 1)[: rig.tokens // page_tokens] + 1
            places = HostPages.blocks(arena[0] + np.arange(len(pages)) * pool.page_nbytes)
            lists = [planner.plan(direction, pages, places).groups[0] for planner in (strided, plain)]
            found[side].append(lists if page_tokens > 1 else lists[:1])
    return found


def compare(rig: Rig, pool: Pool, bases: list[int], regions: list[int], page_tokens: int) -> dict[str, Any]:
    """Measure every method that the pool allows."""
    transfer, both = rig.device.transfer, plans(rig, pool, bases, regions, page_tokens)
    streams = [pinned.stream for pinned in rig.pinned]
    lists = both[0][0]
    result: dict[str, Any] = {"strided copies": len(lists[0].strided), "plain copies": len(lists[-1].nbytes)}

    def strided(way: str) -> None:
        for number in range(rig.lists):
            for side in rig.sides(way):
                transfer.copy_strided(streams[side], both[side][number][0].strided)

    if result["strided copies"]:
        missing = transfer._submission.missing
        result["strided, in one batch call"] = {way: rig.row(way, partial(strided, way)) for way in WAYS}
        result["missing"] = dict(missing)
        missing["cuMemcpy3DBatchAsync"] = "left out for comparison"
        result["strided, one call each"] = {way: rig.row(way, partial(strided, way)) for way in WAYS}
        del missing["cuMemcpy3DBatchAsync"]
    for threads in (1, 2, 3) if page_tokens > 1 else ():
        fans = [Fan(transfer, rig.markers, count=threads - 1, priority=0, threads=threads) for _ in streams]
        rows = {way: rig.row(way, partial(fanned, rig, fans, both, way)) for way in WAYS}
        result[f"plain batches, {threads} threads and streams each way"] = rows
        for fan in fans:
            fan.close()
    return result


def fanned(rig: Rig, fans: list[Fan], both: list[Any], way: str) -> None:
    """Submit plain copies over side streams, as the cache does, each direction by a thread of its own."""

    def submit(side: int) -> None:
        for lists in both[side]:
            fans[side].put(rig.pinned[side].stream, lists[-1])

    others = [threading.Thread(target=submit, args=(side,)) for side in rig.sides(way)[1:]]
    for thread in others:
        thread.start()
    submit(rig.sides(way)[0])
    for thread in others:
        thread.join()


def measure(rig: Rig, allocation: str, geometry: str, page_tokens: int, rows: int) -> dict[str, Any]:
    """Compare all methods over a fresh pool."""
    memory = rig.device.memory
    pool = Pool(rig.device, GEOMETRIES[geometry], allocation, rows=rows, page_tokens=page_tokens)
    bases, regions = [one.ptr for one in pool.allocations], list(range(len(pool.built.layout.chunks)))
    opened: list[Any] = []
    extents: list[Any] = []
    if allocation == "layers":
        extents = [memory.export(ptr, nbytes) for ptr, nbytes in pool.built.exports]
        opened = list(memory.open_side_by_side(extents))
        bases, regions = [one.ptr for one in opened], [one.region for one in opened]
    found = compare(rig, pool, bases, regions, page_tokens)
    for one, extent in zip(opened, extents, strict=True):
        memory.close(one)
        memory.release(extent)
    pool.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=65600)
    parser.add_argument("--lists", type=int, default=6)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    device = evidence.open_device()
    report: dict[str, Any] = {
        "facts": evidence.facts(device),
        "rows": options.rows,
        "lists": options.lists,
        "floor_gb_per_s": {},
    }
    for case in options.only:
        geometry, allocation = CASES[case]
        rig = Rig(device, options.tokens, geometry, options.lists)
        report["floor_gb_per_s"][case] = rig.gb_per_s()
        for page_tokens in (64, 16) if allocation == "classic" else (64, 16, 1):
            name = f"{case}, {page_tokens} tokens"
            report[name] = measure(rig, allocation, geometry, page_tokens, options.rows)
            print(name, json.dumps(report[name]), flush=True)
            options.out.write_text(json.dumps(report, indent=1))
        rig.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
