"""What a request costs that moves little or nothing, beside a bare SEQPACKET round trip between two processes.

Owns the interleaving: each repetition times the bare round trip and every request in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from devipc.bench.echo import Echo
from devipc.bench.facts import quantile, ratio, spread
from devipc.bench.pools import GEOMETRIES, Pool
from devipc.bench.service import client_of
from devipc.hicache.api import UNFENCED
from devipc.hicache.keys import KEY_NBYTES, Namespace
from devipc.interfaces.backend import Backend, Device

__all__ = ["measure_control"]

_TIMEOUT_S = 30.0
_PAGE_TOKENS = 16
_ROWS = 64 * _PAGE_TOKENS
_KEYS = 256


def measure_control(
    url: str, backend: Backend, device: Device, *, repetitions: int, warm_up: int = 50
) -> list[dict[str, Any]]:
    """Return one row for each request: no-op, lookups, a search of the index, and one page there and back."""
    pool = Pool(device, GEOMETRIES["tp4"], "one", rows=_ROWS, page_tokens=_PAGE_TOKENS)
    samples: dict[str, list[float]] = {}
    try:
        with client_of(url, backend, device, tier_nbytes=2**28) as client, Echo() as echo:
            layout = pool.built.layout
            namespace = Namespace.of(layout, model="bench", revision="1", dtype="u8")
            handle = client.register_pool(pool.built, namespace=namespace)
            rng = np.random.default_rng(1)
            known = rng.integers(0, 256, (1, KEY_NBYTES), np.uint8)
            client.backup(handle, [1], known, ready=UNFENCED).result(_TIMEOUT_S)

            def some_keys(count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
                return rng.integers(0, 256, (count, KEY_NBYTES), np.uint8)

            none, many = some_keys(0), some_keys(_KEYS)

            def backup() -> None:
                client.backup(handle, [2], some_keys(1), ready=UNFENCED).result(_TIMEOUT_S)

            timed: dict[str, Callable[[], object]] = {
                "bare round trip": echo.round_trip,
                "no-op": client.ping,
                "lookup of no key": lambda: client.lookup(handle, none).result(_TIMEOUT_S),
                f"lookup of {_KEYS} unknown keys": lambda: client.lookup(handle, many).result(_TIMEOUT_S),
                f"match of {_KEYS} unknown keys": lambda: client.match(handle, many),
                "backup of one page": backup,
                "restore of one page": lambda: client.restore(handle, known, [3], ready=UNFENCED).result(_TIMEOUT_S),
            }
            for number in range(warm_up + repetitions):
                for name, action in timed.items():
                    start = time.perf_counter()
                    action()
                    if number >= warm_up:
                        samples.setdefault(name, []).append(time.perf_counter() - start)
            client.unregister(handle)
    finally:
        pool.close()
    bare = samples["bare round trip"]
    return [
        {
            "request": name,
            **spread(times),
            "median_over_bare": ratio(quantile(times, 0.5), quantile(bare, 0.5)),
            "p99_over_bare": ratio(quantile(times, 0.99), quantile(bare, 0.99)),
        }
        for name, times in samples.items()
    ]
