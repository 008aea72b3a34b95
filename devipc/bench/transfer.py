"""Throughput and latency of backups and restores through the cache's client, beside contiguous copies.

Owns the repetitions: warm-up apart, page ids and keys fresh each time, no plan kept, floor and measurement in turn, and
the comparison of bytes at the end of each configuration.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from devipc.bench.facts import quantile, ratio
from devipc.bench.floors import BACKUP, BOTH, RESTORE, Floor, baselines
from devipc.bench.pools import GEOMETRIES, PageIds, Pinned, Pool
from devipc.bench.service import client_of
from devipc.errors import DevIPCError
from devipc.hicache.api import UNFENCED, HiCacheClient, PoolHandle
from devipc.hicache.client.ticket import Ticket
from devipc.hicache.keys import KEY_NBYTES, Keys, Namespace
from devipc.hicache.operations import Kind
from devipc.hicache.results import PageResult
from devipc.interfaces.backend import Backend, Device

__all__ = ["Case", "measure_cases"]

TIMEOUT_S = 60.0
RUN_TOKENS = 512
_VERIFIED_TOKENS = 512
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration.

    Parameters
    ----------
    geometry, allocation : str
        See :mod:`devipc.bench.pools`.
    page_tokens, tokens : int
        Tokens in a page, and moved by one operation.
    shape : str
        ``random`` pages, or ``runs`` of neighbouring ones, of 512 tokens each.
    in_flight : int
        Operations of each direction at a time. One that has ended is followed by the next, until a repetition has moved
        four times as many; a single operation is a repetition by itself.
    """

    geometry: str = "llama"
    allocation: str = "one"
    page_tokens: int = 16
    tokens: int = 4096
    shape: str = "random"
    in_flight: int = 1

    @property
    def rounds(self) -> int:
        """How many times as many operations as are in flight a repetition has."""
        return _ROUNDS if self.in_flight > 1 else 1

    @property
    def window_nbytes(self) -> int:
        """Bytes that are in flight at a time, one way."""
        return self.in_flight * self.tokens * GEOMETRIES[self.geometry].token_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes that one repetition moves, one way."""
        return self.rounds * self.window_nbytes


def measure_cases(
    url: str,
    backend: Backend,
    device: Device,
    cases: Sequence[Case],
    *,
    rows: int,
    repetitions: int,
    slow_repetitions: int = 0,
    warm_up: int = 3,
    extent_pages: int = 16,
) -> Iterator[dict[str, Any]]:
    """Yield a result for each case and direction. One service and one client serve all cases.

    Parameters
    ----------
    url : str
        See :func:`devipc.bench.service.client_of`.
    backend, device : Backend, Device
        Whose memory is moved.
    cases : sequence of Case
        What is measured.
    rows : int
        Tokens in each pool; when 0, room for all that is in flight and for one page more, as serving systems have it.
    repetitions, slow_repetitions, warm_up : int
        Of the cache and the floors (half of that with several operations in flight), of the baselines (0: none), and
        before anything counts.
    extent_pages : int
        Pages in one extent of host memory.
    """
    largest = max(case.window_nbytes for case in cases)
    room = max((2 * case.in_flight + 1) * case.tokens for case in cases)
    pinned = Pinned(device, max(*(case.window_nbytes // case.in_flight for case in cases), 64 * 2**20))
    try:
        with client_of(
            url, backend, device, tier_nbytes=(2 + _ROUNDS) * largest + 2**28, extent_pages=extent_pages
        ) as client:
            for case in cases:
                bench = _Bench(device, client, case, pinned, rows=rows or room + case.page_tokens)
                try:
                    yield from bench.run(repetitions, warm_up, slow_repetitions)
                finally:
                    bench.close()
    finally:
        pinned.close()


class _Bench:
    """One case at work."""

    def __init__(self, device: Device, client: HiCacheClient, case: Case, pinned: Pinned, *, rows: int) -> None:
        self._client = client
        self._case = case
        self._rows = rows
        self._pinned = pinned
        self._rng = np.random.default_rng(case.tokens * 131 + case.page_tokens)
        self._count = case.tokens // case.page_tokens
        self._pool = Pool(device, GEOMETRIES[case.geometry], case.allocation, rows=rows, page_tokens=case.page_tokens)
        self._floor = Floor(device, case.window_nbytes)
        self._pool.fill(pinned, seed=7)
        layout = self._pool.built.layout
        namespace = Namespace.of(layout, model=f"bench/{case}", revision="1", dtype="u8")
        self._handle: PoolHandle = client.register_pool(self._pool.built, namespace=namespace)
        self._first: list[float] = []  # when the first layer of an operation was there, as a share of its time

    def run(self, repetitions: int, warm_up: int, slow: int) -> Iterator[dict[str, Any]]:
        """Measure all directions, then compare bytes."""
        samples: dict[str, list[float]] = {name: [] for name in (BACKUP, RESTORE, BOTH)}
        floors: dict[str, list[float]] = {name: [] for name in samples}
        forms: dict[str, Counter[str]] = {name: Counter() for name in samples}
        if self._case.in_flight > 1:
            repetitions = -(-repetitions // 2)
        for number in range(warm_up + repetitions):
            if number == warm_up:
                self._first.clear()
            for direction, times in samples.items():
                floor_s, before = self._floor.copy(direction, times=self._case.rounds), self._forms()
                took_s = self._once(direction)
                if number >= warm_up:
                    forms[direction].update(self._forms() - before)
                    floors[direction].append(floor_s)
                    times.append(took_s)
        self._verify()
        common = {field: getattr(self._case, field) for field in Case.__slots__}
        common |= {"rows": self._rows, "nbytes": self._case.nbytes, "advice": [one.code for one in self._handle.advice]}
        for direction, times in samples.items():
            row = {**common, "method": "cache", "direction": direction}
            row |= self._row(times, floors[direction], moved=2 if direction == BOTH else 1)
            row["forms"] = {name: round(count / len(times)) for name, count in forms[direction].items()}
            row |= self._submitting()
            if direction == RESTORE:
                row["first_layer_share"] = round(statistics.median(self._first), 3)
            yield row
        for name, move in baselines(self._pool, self._pinned).items() if slow and self._case.in_flight == 1 else ():
            for direction in (BACKUP, RESTORE):
                times = [move(direction, self._pages()) for _ in range(slow + 1)][1:]
                row = {**common, "method": name, "direction": direction}
                yield row | self._row(times, floors[direction], moved=1)

    def _row(self, times: Sequence[float], floors: Sequence[float], *, moved: int) -> dict[str, Any]:
        median, floor = statistics.median(times), statistics.median(floors)
        return {
            "floor": self._floor.how,
            "share_of_floor": ratio(floor, median),
            "p99_over_floor": ratio(quantile(times, 0.99), floor),
            "gb_per_s": round(moved * self._case.nbytes / median / 1e9, 2),
            "floor_gb_per_s": round(moved * self._case.nbytes / floor / 1e9, 2),
            "median_ms": round(median * 1e3, 3),
            "p99_ms": round(quantile(times, 0.99) * 1e3, 3),
            "samples": len(times),
        }

    def _forms(self) -> Counter[str]:
        """Count the copies of the engine's life by direction and form: "backup, strided"."""
        plans: Any = self._client.status().get("plans", {})
        return Counter({f"{way}, {form}": count for way, forms in plans.items() for form, count in forms.items()})

    def _submitting(self) -> dict[str, Any]:
        """Return what the engine process says about how it submits, by which it chooses forms; empty without one."""
        status: Any = self._client.status()
        facts = status.get("engine", {}).get("facts", {})
        return {name: facts[name] for name in ("submitting_threads", "submitting_s") if name in facts}

    def _once(self, direction: str) -> float:
        """Run operations one way, or each way, with fresh pages; return seconds from the first call to the last end."""
        at_once, operations = self._case.in_flight, self._case.in_flight * self._case.rounds
        known = [] if direction == BACKUP else [self._stored() for _ in range(at_once)]
        # Whoever follows another has its pages: that one has let go of them.
        pages = self._pages(self._count * at_once * (2 if direction == BOTH else 1)).reshape(-1, self._count)
        keys = [] if direction == RESTORE else [self._keys() for _ in range(operations)]
        start = time.perf_counter()
        flying: deque[list[Ticket]] = deque()
        for number in range(operations):
            if len(flying) == at_once:
                self._await(flying.popleft())
            place, tickets = number % at_once, []
            if keys:
                tickets.append(self._client.backup(self._handle, pages[place], keys[number], ready=UNFENCED))
            if known:
                tickets.append(self._client.restore(self._handle, known[place], pages[~place], ready=UNFENCED))
            flying.append(tickets)
            if direction == RESTORE and number == at_once - 1:
                self._time_first(flying[0][0], start)
        while flying:
            self._await(flying.popleft())
        return time.perf_counter() - start

    def _await(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            moved = PageResult.STORED if ticket.kind is Kind.BACKUP else PageResult.RESTORED
            if (ticket.result(TIMEOUT_S) != moved).any():
                raise DevIPCError(f"{ticket.kind.value}: not all pages were moved", code="not_moved")

    def _time_first(self, first: Ticket, start: float) -> None:
        """Note when the first layer of the first restore could be used, as a share of its time."""
        if first.fence is not None:
            first.fence.synchronize(layer=self._handle.groups[0][0], timeout_s=TIMEOUT_S)
            layer_s = time.perf_counter() - start
            first.result(TIMEOUT_S)
            self._first.append(layer_s / (time.perf_counter() - start))

    def _stored(self) -> Keys:
        """Back pages up, outside of what is timed; return their keys."""
        keys = self._keys()
        self._client.backup(self._handle, self._pages(), keys, ready=UNFENCED).result(TIMEOUT_S)
        return keys

    def _keys(self) -> Keys:
        return self._rng.integers(0, 256, (self._count, KEY_NBYTES), np.uint8)

    def _pages(self, count: int = 0) -> PageIds:
        """Return fresh distinct page ids of the case's shape."""
        count = count or self._count
        if self._case.shape == "random":
            return self._rng.permutation(self._pool.page_count - 1)[:count] + 1
        length = min(max(RUN_TOKENS // self._case.page_tokens, 1), count)
        starts = self._rng.permutation((self._pool.page_count - 1) // length)[: -(-count // length)] * length + 1
        return (starts[:, None] + np.arange(length)).reshape(-1)[:count]

    def _verify(self) -> None:
        """Back pages up and restore them elsewhere; compare with what was there, read without the cache."""
        self._pool.fill(self._pinned, seed=8)  # restores have spread the content of few pages over all
        source, keys = self._pages(2 * self._count), self._keys()
        source, target = source[: self._count], source[self._count :]
        before = self._pool.read(source[: self._some], self._pinned)
        self._client.backup(self._handle, source, keys, ready=UNFENCED).result(TIMEOUT_S)
        self._client.restore(self._handle, keys, target, ready=UNFENCED).result(TIMEOUT_S)
        after = self._pool.read(target[: self._some], self._pinned)
        if not np.array_equal(before, after):
            wrong = int(np.flatnonzero((before != after).any(axis=1))[0])
            raise DevIPCError(f"page {wrong} of {self._case} came back with other bytes", code="wrong_bytes")
        if np.array_equal(before[0], before[-1]) and len(before) > 1:
            raise DevIPCError("all pages hold the same bytes: nothing was compared", code="weak_check")

    @property
    def _some(self) -> int:
        return max(min(self._count, _VERIFIED_TOKENS // self._case.page_tokens), 1)

    def close(self) -> None:
        """Leave the pool, then free it."""
        self._client.unregister(self._handle)
        self._floor.close()
        self._pool.close()
