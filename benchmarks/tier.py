"""What a page costs in the cache beside its copies: admission to submission, and completion to visible, by stage.

One process, an engine in it, memory of the host backend. The driver calls that copy are left out, as they run on the
device while the processor goes on; everything else is as it always is, for fresh random pages and keys each time.
Times are those of the thread that does the work. ``python -m benchmarks.tier [--repetitions 20] [--out FILE]`` prints
a table and writes JSON.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from devipc.bench.facts import machine, write
from devipc.hicache.api import UNFENCED, HiCacheClient
from devipc.hicache.builders import TensorView, mla_token_pool
from devipc.hicache.engine import EngineConfig
from devipc.hicache.engine.pools import Pool
from devipc.hicache.engine.session import Session
from devipc.hicache.engine.transfers import BackupOp, RestoreOp
from devipc.hicache.keys import KEY_NBYTES, Namespace
from devipc.hicache.local import LocalEngine, LocalLink
from devipc.hicache.moving.fan import Fan
from devipc.hicache.moving.mover import PinnedMover
from devipc.hicache.tier.hosttier import HostTier
from devipc.registry import load_backend

LAYERS, ROW_NBYTES = 32, 64
CASES = ((256, 16), (1024, 16), (256, 1), (4096, 1))  # pages, tokens in a page
LIMIT_US = 1.5
TIMEOUT_S = 60.0

PARTS: dict[str, tuple[tuple[type, str], ...]] = {
    "admission to submission": (
        (Pool, "check_pages"),
        (Pool, "names"),
        (HostTier, "present"),
        (HostTier, "hold"),
        (HostTier, "reserve"),
        (PinnedMover, "move"),
    ),
    "completion to visible": ((HostTier, "commit"), (HostTier, "release")),
}
WHOLE = {
    "admission to submission": (
        (Session, "_submit_transfer"),
        (BackupOp, "_start_when_ready"),
        (RestoreOp, "_start_when_ready"),
    ),
    "completion to visible": ((BackupOp, "_look"), (RestoreOp, "_look")),
}


class Account:
    """Seconds of thread time in named functions, less those in functions that are left out."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._out = threading.local()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the functions, and put them back."""
        kept: list[tuple[type, str, Any]] = []
        functions = [(owner, name) for table in (PARTS, WHOLE) for group in table.values() for owner, name in group]
        for owner, name in functions:
            kept.append((owner, name, owner.__dict__.get(name)))
            setattr(owner, name, self._timed(f"{owner.__name__}.{name}", getattr(owner, name)))
        kept.append((Fan, "put", Fan.put))
        Fan.put = self._left_out  # type: ignore[method-assign]
        try:
            yield
        finally:
            for owner, name, function in reversed(kept):
                delattr(owner, name) if function is None else setattr(owner, name, function)

    def _timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self.spent[label] += time.thread_time() - start

        return timed

    def _left_out(self, *_arguments: Any, **_options: Any) -> None:
        """Copy nothing."""


def pool_of(device: Any, pages: int, page_tokens: int) -> tuple[Any, Any]:
    """One allocation with a row a token and layer."""
    rows = pages * page_tokens
    allocation = device.memory.allocate(LAYERS * rows * ROW_NBYTES)
    tensors = [
        TensorView.contiguous(allocation.ptr + layer * rows * ROW_NBYTES, (rows, ROW_NBYTES), 1)
        for layer in range(LAYERS)
    ]
    infos = [device.memory.describe(allocation.ptr)]
    return allocation, mla_token_pool(tensors, page_tokens=page_tokens, allocations=infos)


def measure(pages: int, page_tokens: int, repetitions: int) -> list[dict[str, Any]]:
    """Run backups and restores of ``pages`` random pages; return a row for each direction."""
    device: Any = load_backend("host").open_device()
    rng = np.random.default_rng(pages + page_tokens)
    allocation, built = pool_of(device, 2 * pages + 1, page_tokens)
    page_nbytes = built.layout.page_nbytes
    tier = 4 * pages * page_nbytes + 2**20  # most backups have to evict
    rows = []
    with LocalEngine(device, EngineConfig(tier_nbytes=tier, slab_nbytes=min(2**20, tier))) as local:
        client = HiCacheClient(LocalLink(local, owned=False))
        namespace = Namespace.of(built.layout, model="bench", revision="1", dtype="u8")
        handle = client.register_pool(built, namespace=namespace)
        samples: dict[str, list[dict[str, float]]] = {"backup": [], "restore": []}
        for _ in range(repetitions + 3):
            keys = rng.integers(0, 256, (pages, KEY_NBYTES), np.uint8)
            for direction, kept in samples.items():
                account, chosen = Account(), rng.permutation(2 * pages)[:pages] + 1
                with account.installed():
                    if direction == "backup":
                        ticket = client.backup(handle, chosen, keys, ready=UNFENCED)
                    else:
                        ticket = client.restore(handle, keys, chosen, ready=UNFENCED)
                    ticket.result(TIMEOUT_S)
                    while local.engine.status()["operations"]:
                        time.sleep(1e-4)
                kept.append(dict(account.spent))
        for direction, kept in samples.items():
            rows.append(row_of(direction, pages, page_tokens, kept[3:]))
        client.close()
    device.memory.free(allocation)
    device.close()
    return rows


def row_of(direction: str, pages: int, page_tokens: int, samples: list[dict[str, float]]) -> dict[str, Any]:
    """Microseconds a page: medians of each stage, and of the whole."""

    def median(names: list[str]) -> float:
        return round(statistics.median(sum(one.get(name, 0.0) for name in names) for one in samples) / pages * 1e6, 3)

    row: dict[str, Any] = {"direction": direction, "pages": pages, "page_tokens": page_tokens, "samples": len(samples)}
    for stage, parts in PARTS.items():
        names = {name: f"{owner.__name__}.{name}" for owner, name in parts}
        took = median([f"{owner.__name__}.{name}" for owner, name in WHOLE[stage]])
        stages = {name: found for name, label in names.items() if (found := median([label]))}
        row[stage] = {"us_a_page": took, "of_which": stages, "limit_us": LIMIT_US, "kept": took <= LIMIT_US}
    return row


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "tier.json")
    options = parser.parse_args()
    rows = []
    for pages, page_tokens in CASES:
        for row in measure(pages, page_tokens, options.repetitions):
            rows.append(row)
            for stage in PARTS:
                found = row[stage]
                parts = ", ".join(f"{name} {us:.2f}" for name, us in found["of_which"].items())
                print(
                    f"{row['direction']:7} {pages:5} pages of {page_tokens:2}, {stage}:"
                    f" {found['us_a_page']:.2f} us a page (limit {LIMIT_US}); {parts}"
                )
    write(
        options.out, {"machine": machine(), "geometry": {"layers": LAYERS, "row_nbytes": ROW_NBYTES}, "results": rows}
    )


if __name__ == "__main__":
    main()
