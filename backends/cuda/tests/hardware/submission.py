"""What each way to hand many copies to the driver costs, beside one contiguous copy of the same bytes.

Pages of 1, 16 and 64 tokens with 64 planes of 2,048-byte rows: as strided copies one call each or in one batch call, as
plain copies in batches over one to four streams, over one allocation, over 64 that are mapped side by side, and over 64
classic ones; and the rows of two other geometries, in one allocation.
``python -m backends.cuda.tests.hardware.submission --out FILE``; ``--only`` takes some of :data:`CASES`, ``--rows``
how long the pool is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from devipc.bench.pools import GEOMETRIES, Pinned, Pool
from devipc.hicache.expand import CopyList
from devipc.hicache.fan import Fan
from devipc.hicache.mover import MarkerPool
from devipc.hicache.planner import Direction, HostPages, Planner
from devipc.spi import HandleKind

from . import evidence

WAYS = ("d2h", "h2d", "both")
REPETITIONS = 9
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

    def __init__(self, device: Any, tokens: int, geometry: str) -> None:
        self.device = device
        self.tokens = tokens
        self.nbytes = tokens * GEOMETRIES[geometry].token_nbytes
        self.pinned = [Pinned(device, self.nbytes) for _ in range(2)]
        self.block = [device.memory.allocate(self.nbytes, kind=HandleKind.VMM_FD) for _ in range(2)]
        self.markers = MarkerPool(device.transfer)
        self.floor = {way: self.time(partial(self._contiguous, way))[1] for way in WAYS}

    def gb_per_s(self) -> dict[str, float]:
        """What contiguous copies reach."""
        return {way: round(self.nbytes * (1 + (way == "both")) / s / 1e9, 2) for way, s in self.floor.items()}

    def close(self) -> None:
        self.markers.close()
        for pinned, block in zip(self.pinned, self.block, strict=True):
            pinned.close()
            self.device.memory.free(block)

    def _contiguous(self, way: str) -> None:
        for side in self.sides(way):
            to, back = self.pinned[side].ptr, self.block[side].ptr
            to, back = (to, back) if side == 0 else (back, to)
            self.device.transfer.copy(self.pinned[side].stream, to, back, self.nbytes)

    @staticmethod
    def sides(way: str) -> tuple[int, ...]:
        return {"d2h": (0,), "h2d": (1,), "both": (0, 1)}[way]

    def time(self, submit: Callable[[], None]) -> tuple[float, float]:
        """Return medians: seconds until everything was submitted, and until it was done."""
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


def plans(rig: Rig, pool: Pool, bases: list[int], regions: list[int], page_tokens: int) -> dict[Direction, Any]:
    """Return fresh copies for each direction, strided ones and plain ones."""
    rng = np.random.default_rng(5)
    found: dict[Direction, Any] = {}
    for side, direction in enumerate((Direction.BACKUP, Direction.RESTORE)):
        arena = (rig.pinned[side].ptr, rig.pinned[side].nbytes)
        planner = Planner(pool.built.layout, bases, arena=arena, regions=regions)
        pages = rng.permutation(pool.page_count - 1)[: rig.tokens // page_tokens] + 1
        places = HostPages.blocks(arena[0] + np.arange(len(pages)) * pool.page_nbytes)
        copies = planner.plan(direction, pages, places).groups[0]
        device, host, nbytes = pool.pieces(pages, arena[0])
        found[direction] = (copies, (host, device, nbytes) if side == 0 else (device, host, nbytes))
    return found


def compare(rig: Rig, pool: Pool, bases: list[int], regions: list[int], page_tokens: int) -> dict[str, Any]:
    """Measure every method that the pool allows."""
    transfer, found = rig.device.transfer, plans(rig, pool, bases, regions, page_tokens)
    both = [found[Direction.BACKUP], found[Direction.RESTORE]]
    streams = [pinned.stream for pinned in rig.pinned]
    result: dict[str, Any] = {"strided copies": len(both[0][0].strided), "plain copies": len(both[0][1][0])}

    def strided(way: str) -> None:
        for side in rig.sides(way):
            copies = both[side][0]
            if len(copies.strided):
                transfer.copy_strided(streams[side], copies.strided)
            if len(copies.nbytes):
                transfer.copy_batch(streams[side], copies.dst, copies.src, copies.nbytes)

    missing = transfer._submission.missing
    result["planned, in one batch call"] = {way: rig.row(way, partial(strided, way)) for way in WAYS}
    result["missing"] = dict(missing)
    missing["cuMemcpy3DBatchAsync"] = "left out for comparison"
    result["planned, one call each"] = {way: rig.row(way, partial(strided, way)) for way in WAYS}
    del missing["cuMemcpy3DBatchAsync"]
    for count in (1, 2, 4) if page_tokens > 1 else ():
        fans = [Fan(transfer, rig.markers, count=count - 1, priority=0) for _ in streams]
        rows = {way: rig.row(way, partial(fanned, rig, fans, both, way)) for way in WAYS}
        result[f"plain batches over {count} streams"] = rows
        for fan in fans:
            fan.close()
    return result


def fanned(rig: Rig, fans: list[Fan], both: list[Any], way: str) -> None:
    """Submit plain copies over side streams, as the cache does."""
    for side in rig.sides(way):
        fans[side].put(rig.pinned[side].stream, CopyList(CopyList.empty().strided, *both[side][1]))


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
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    rows = options.rows or 3 * options.tokens + 64
    device = evidence.open_device()
    report: dict[str, Any] = {"facts": evidence.facts(device), "rows": rows, "floor_gb_per_s": {}}
    for case in options.only:
        geometry, allocation = CASES[case]
        rig = Rig(device, options.tokens, geometry)
        report["floor_gb_per_s"][case] = rig.gb_per_s()
        for page_tokens in (64, 16) if allocation == "classic" else (64, 16, 1):
            name = f"{case}, {page_tokens} tokens"
            report[name] = measure(rig, allocation, geometry, page_tokens, rows)
            print(name, json.dumps(report[name]), flush=True)
            options.out.write_text(json.dumps(report, indent=1))
        rig.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
