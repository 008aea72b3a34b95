"""How much of a restore hides behind the batch before it, and how fast write-back gives way.

Owns single batches that are announced by hand, without a scheduler: one that computes, and one behind it whose prefix
is on the device already, or is restored meanwhile.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from devipc.bench.engines import TIMEOUT_S, Sizes
from devipc.bench.facts import ratio
from devipc.errors import DevIPCError
from devipc.hicache.api import UNFENCED, HiCacheClient
from devipc.hicache.keys import page_keys
from devipc.hicache.reference.local import LocalGPURuntime
from devipc.hicache.reference.runtime import BatchPlan, Decode, Keep, OpenRequest, Prefill, RestorePages
from devipc.hicache.reference.throttle import BackupThrottle

__all__ = ["measure_hiding", "measure_throttle", "transfer_times"]

_SHARES = (0.2, 0.5, 0.8)
_ERROR = 0.03  # of the transfer's time: pairs are added until the median's standard error is below that
Keys = npt.NDArray[np.uint8]


def transfer_times(over: LocalGPURuntime, client: HiCacheClient, count: int, repetitions: int) -> dict[str, float]:
    """Back up and restore ``count`` spare pages alone; return medians in ms and the rates in GB/s."""
    pool = over._handle
    assert pool is not None
    pages = over._table.allocate(count)
    physical, rng = np.array(over._table.physical(pages)), np.random.default_rng(6)
    times: dict[str, list[float]] = {"backup": [], "restore": []}
    for _ in range(repetitions + 1):
        keys = rng.integers(0, 256, (count, 16), np.uint8)
        began = time.perf_counter()
        client.backup(pool, physical, keys, ready=UNFENCED).result(TIMEOUT_S)
        times["backup"].append(time.perf_counter() - began)
        began = time.perf_counter()
        client.restore(pool, keys, physical, ready=UNFENCED).result(TIMEOUT_S)
        times["restore"].append(time.perf_counter() - began)
    over._table.drop(pages)
    found: dict[str, float] = {"moved_nbytes": count * over.pool.page_nbytes}
    for name, some in times.items():
        median = statistics.median(some[1:])
        found |= {
            f"{name}_ms": round(median * 1e3, 3),
            f"{name}_gb_per_s": round(found["moved_nbytes"] / median / 1e9, 2),
        }
    return found


class _Pairs:
    """Pairs of batches on a runtime that nobody else uses."""

    def __init__(self, over: LocalGPURuntime, prompt: list[int], sizes: Sizes) -> None:
        self._over, self._prompt, self._sizes = over, prompt, sizes
        parent = over.limits.namespace
        self._keys: Keys = page_keys(prompt, page_tokens=sizes.page_tokens, parent=parent)
        self._number = 0

    def run(self, count: int, *, restored: bool) -> tuple[float, float]:
        """Return the seconds of the batch that computes, and of the one behind it, whose prefix has ``count`` pages."""
        over, size = self._over, self._sizes
        first, second = over.open_request(), over.open_request()
        keep = None if restored else self._kept(count)
        chunk = Prefill(handle=first, start=0, tokens=tuple(self._prompt[: size.chunk_tokens]), sample=True)
        opened = OpenRequest(handle=second, prefix=() if keep is None else (keep,))
        orders = (RestorePages(handle=second, first_page=0, keys=self._keys[:count].tobytes()),) if restored else ()
        at = count * size.page_tokens
        end = min(at + 1, len(self._prompt))
        suffix = Prefill(handle=second, start=at, tokens=tuple(self._prompt[at:end]), sample=True)
        plans = (
            BatchPlan(number=self._next(), open=(OpenRequest(handle=first),), prefill=(chunk,)),
            BatchPlan(number=self._next(), open=(opened,), restore=orders, prefill=(suffix,)),
        )
        handles = [over.prepare_batch(plan) for plan in plans]
        times = []
        for handle in handles:
            began = time.perf_counter()
            done = over.execute_batch(handle)
            times.append(time.perf_counter() - began)
            assert not done.discarded, done.failed
        self._execute(close=(first, second), release=() if keep is None else (keep,))
        return times[0], times[1]

    def _kept(self, count: int) -> Any:
        """Return an extent of the prefix on the device, restored there beforehand."""
        over, size = self._over, self._sizes
        handle = over.open_request()
        at = count * size.page_tokens
        order = RestorePages(handle=handle, first_page=0, keys=self._keys[:count].tobytes())
        one = Prefill(handle=handle, start=at, tokens=tuple(self._prompt[at : at + 1]), sample=True)
        keep = Keep(handle=handle, first_page=0, page_count=count)
        done = self._execute(open=(OpenRequest(handle=handle),), restore=(order,), prefill=(one,), keep=(keep,))
        self._execute(close=(handle,))
        return done.kept[0]

    def _execute(self, **parts: Any) -> Any:
        return self._over.execute_batch(self._over.prepare_batch(BatchPlan(number=self._next(), **parts)))

    def _next(self) -> int:
        self._number += 1
        return self._number


def _stalls(pairs: _Pairs, count: int, enough_s: float, least: int, most: int) -> list[float]:
    """Return how much longer neighbouring pairs took with a restore than without, of either order in turn.

    From ``least`` on until the median's standard error is at most ``enough_s``; at most ``most``. A stall is a small
    difference of long times. Neighbours are compared because a clock that drifts takes both along.
    """
    stalls: list[float] = []
    while len(stalls) < most and (len(stalls) < least or _median_error(stalls) > enough_s):
        first = len(stalls) % 2 == 1
        took = {restored: sum(pairs.run(count, restored=restored)) for restored in (first, not first)}
        stalls.append(took[True] - took[False])
    return stalls


def _median_error(samples: list[float]) -> float:
    """Return the standard error of the median of samples that are spread like a bell, but for some far away."""
    low, _, high = statistics.quantiles(samples)
    return 1.253 * (high - low) / 1.349 / math.sqrt(len(samples))


def measure_hiding(
    over: LocalGPURuntime, prompt: list[int], sizes: Sizes, restore_s_a_page: float, *, most_pairs: int
) -> list[dict[str, Any]]:
    """Return a row for each share of the computation that a restore takes; the prompt's prefix must be below.

    At most ``most_pairs`` of batches with and without a restore are run for each.
    """
    pairs = _Pairs(over, prompt, sizes)
    most = len(prompt) // sizes.page_tokens
    pairs.run(1, restored=True)
    compute_s = statistics.median(pairs.run(1, restored=False)[0] for _ in range(sizes.repetitions))
    rows = []
    for share in _SHARES:
        count = max(1, min(most, int(share * compute_s / restore_s_a_page)))
        h2d_s = count * restore_s_a_page
        stalls = _stalls(pairs, count, _ERROR * h2d_s, min(most_pairs, 3 * sizes.repetitions), most_pairs)
        low, stall_s, high = statistics.quantiles(stalls)
        rows.append(
            {
                "pages": count,
                "h2d_ms": round(h2d_s * 1e3, 3),
                "batch_ms": round(compute_s * 1e3, 3),
                "h2d_over_compute": ratio(h2d_s, compute_s),
                "stall_ms": round(stall_s * 1e3, 3),
                "stall_quartiles_ms": [round(low * 1e3, 3), round(high * 1e3, 3)],
                "stall_error_over_h2d": ratio(_median_error(stalls), h2d_s),
                "pairs": len(stalls),
                "stall_over_h2d": ratio(stall_s, h2d_s),
                "overlap": round(1 - min(1.0, max(0.0, stall_s / h2d_s)), 3),
            }
        )
    return rows


def measure_throttle(over: LocalGPURuntime, prompt: list[int], sizes: Sizes, target_s: float) -> dict[str, Any]:
    """Decode with a target that is missed; return how long it took until write-back was halved, or raise."""
    before, least = over._throttle, over.pool.page_nbytes
    pairs = _Pairs(over, prompt, sizes)
    handle = over.open_request()
    first = Prefill(handle=handle, start=0, tokens=tuple(prompt[:1]), sample=True)
    pairs._execute(open=(OpenRequest(handle=handle),), prefill=(first,))
    pairs._execute(decode=(Decode(handle=handle),))  # a graph of another size is captured at its first use
    over._throttle = throttle = BackupThrottle(target_s, most_nbytes=64 * least, least_nbytes=least)
    began, batches = time.perf_counter(), 0
    while not throttle.halvings and batches < 100:
        pairs._execute(decode=(Decode(handle=handle),))
        batches += 1
    took = time.perf_counter() - began
    pairs._execute(close=(handle,))
    over._throttle = before
    if not throttle.halvings:
        raise DevIPCError(f"write-back was not halved in {batches} late batches", code="throttle")
    return {"halved_after_ms": round(took * 1e3, 3), "batches": batches}
