"""What a model in another process loses while pages move: its steps with and without transfers, in turn.

Owns the model's process, and the ways to move. Beside the cache the same bytes are moved by contiguous copies of this
process, which is what no cache can do with less harm, and by a gather kernel of it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from devipc.bench.floors import BOTH, Floor
from devipc.bench.model import torch_device
from devipc.bench.pools import GEOMETRIES, Pool
from devipc.bench.service import client_of
from devipc.bench.windows import Mover, Spans, alternate
from devipc.errors import PeerGone
from devipc.hicache.api import UNFENCED, HiCacheClient
from devipc.hicache.keys import KEY_NBYTES, Namespace
from devipc.interfaces.backend import Backend, Device

__all__ = ["measure_interference"]

_TIMEOUT_S = 60.0
_PAGE_TOKENS = 16
_LATE_S = 0.5
"""The model tells its steps a few at a time."""


def measure_interference(
    url: str,
    backend: Backend,
    device: Device,
    *,
    kinds: tuple[str, ...],
    tokens: int,
    rows: int,
    windows: int = 6,
    window_s: float = 1.0,
    gather: bool = True,
) -> list[dict[str, Any]]:
    """Return a row for each kind of model and each way to move pages, both directions at once."""
    found = []
    pool = Pool(device, GEOMETRIES["llama"], "one", rows=rows, page_tokens=_PAGE_TOKENS)
    nbytes = tokens * pool.geometry.token_nbytes
    floor = Floor(device, nbytes)
    try:
        with client_of(url, backend, device, tier_nbytes=6 * nbytes) as client:
            movers: dict[str, Mover] = {
                "cache": _through_cache(client, pool, tokens),
                "contiguous copies": lambda: 2 * nbytes if floor.copy(BOTH) else 0,
            }
            if gather:
                movers["gather kernel"] = _by_kernel(torch_device(backend.name, device.info.uuid), tokens, pool)
            for kind in kinds:
                with _model(backend.name, device.info.uuid, kind) as steps:
                    for name, mover in movers.items():
                        row = alternate(mover, steps, windows=windows, window_s=window_s, late_s=_LATE_S)
                        found.append({"model": kind, "moved_by": name} | row)
    finally:
        floor.close()
        pool.close()
    return found


def _through_cache(client: HiCacheClient, pool: Pool, tokens: int) -> Mover:
    namespace = Namespace.of(pool.built.layout, model="bench", revision="1", dtype="u8")
    handle = client.register_pool(pool.built, namespace=namespace)
    rng, count = np.random.default_rng(3), tokens // pool.page_tokens

    def keys() -> np.ndarray[Any, np.dtype[np.uint8]]:
        return rng.integers(0, 256, (count, KEY_NBYTES), np.uint8)

    known = keys()
    client.backup(handle, np.arange(1, count + 1), known, ready=UNFENCED).result(_TIMEOUT_S)

    def move() -> int:
        nonlocal known
        pages, fresh = rng.permutation(pool.page_count - 1)[: 2 * count] + 1, keys()
        backup = client.backup(handle, pages[:count], fresh, ready=UNFENCED)
        restore = client.restore(handle, known, pages[count:], ready=UNFENCED)
        backup.result(_TIMEOUT_S)
        restore.result(_TIMEOUT_S)
        known = fresh
        return 2 * count * pool.page_nbytes

    return move


def _by_kernel(where: Any, tokens: int, pool: Pool) -> Mover:
    """Gather pages into one piece on the device and copy that, and the way back: what serving systems do in place."""
    import torch

    count, nbytes = tokens // pool.page_tokens, pool.page_nbytes
    planes = len(pool.starts)
    source = torch.zeros((2 * count + 1, planes, nbytes // planes // 8), dtype=torch.int64, device=where)
    pinned = where.type != "cpu"
    host = [torch.zeros((count, *source.shape[1:]), dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
    staging = torch.zeros_like(source[:count])
    rng = np.random.default_rng(4)

    def move() -> int:
        pages = torch.from_numpy(rng.permutation(len(source))[: 2 * count]).to(where)
        host[0].copy_(torch.index_select(source, 0, pages[:count]), non_blocking=True)
        staging.copy_(host[1], non_blocking=True)
        source.index_copy_(0, pages[count:], staging)
        if where.type != "cpu":
            torch.accelerator.synchronize()
        return 2 * count * nbytes

    return move


@contextlib.contextmanager
def _model(backend: str, uuid: str, kind: str) -> Iterator[Spans]:
    """Run a model; give the list that its steps are added to."""
    steps: Spans = []
    command = [sys.executable, "-m", "devipc.bench.model", backend, uuid, kind]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    out = process.stdout
    ready = threading.Event()

    def listen() -> None:
        for line in out:
            ready.set()
            if line.strip() != "ready":
                at, took = line.split()
                steps.append((float(at), float(took)))
        ready.set()

    listener = threading.Thread(target=listen, name="devipc-bench-model")
    listener.start()
    try:
        if not ready.wait(_TIMEOUT_S) or process.poll() is not None:
            raise PeerGone("the model did not start", remedy="run it by hand: python -m devipc.bench.model")
        yield steps
    finally:
        process.stdin.close()
        try:
            process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        listener.join()
        out.close()
