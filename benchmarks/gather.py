"""What a gather in the process that owns the pool would do for random pages of one token, and what it costs its model.

A copy engine pays for every row, so random one-token pages end at a third of the wire. Here the owner of the pool
gathers pages with a kernel of its own into one of two staging buffers, and a copy engine moves the other one to pinned
host memory in one piece; and the way back. Copies of one piece cost a cache in another process the same, so one
process is enough to see what the way could give, and what the kernels take from a model beside them.
``python -m benchmarks.gather [--backend cuda] [--out FILE]`` prints a table and writes JSON. It needs torch.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from devipc.bench.facts import machine, ratio, spread, write
from devipc.bench.model import Model, torch_device
from devipc.bench.windows import Spans, alternate
from devipc.registry import load_backend

BACKUP, RESTORE = "backup", "restore"
PLANES, ROW_WORDS = 64, 256  # Llama-3-8B: K and V of 32 layers, rows of 2,048 bytes
ONE, PLANE = "one kernel over all planes", "a kernel a plane"


class OwnersPool:
    """A pool, two staging buffers, and pinned host memory for ``tokens`` tokens.

    Parameters
    ----------
    where : torch.device
        Of the pool.
    rows, tokens, chunk : int
        Tokens in the pool, moved at a time, and in one staging buffer.
    form : str
        ``ONE``: the pool is one tensor; ``PLANE``: one tensor a plane, as serving systems allocate.
    """

    def __init__(self, where: torch.device, *, rows: int, tokens: int, chunk: int, form: str) -> None:
        self.where, self.tokens, self.chunk, self.form = where, tokens, chunk, form
        self.nbytes = tokens * PLANES * ROW_WORDS * 8
        self.pool = torch.randint(2**62, (PLANES, rows, ROW_WORDS), device=where)
        self.host = torch.zeros(self.pieces, PLANES, chunk, ROW_WORDS, dtype=torch.int64, pin_memory=not self.is_cpu)
        shape = (PLANES, chunk, ROW_WORDS)
        self.staging = [torch.zeros(shape, dtype=torch.int64, device=where) for _ in range(2)]
        # Kernels on a stream that gives way to the model's; copies on another.
        self._streams = [] if self.is_cpu else [torch.Stream(where, priority=0) for _ in range(2)]

    @property
    def is_cpu(self) -> bool:
        """True where there are neither streams nor pinned memory."""
        return self.where.type == "cpu"

    @property
    def pieces(self) -> int:
        """Staging buffers that it takes to move all tokens."""
        return -(-self.tokens // self.chunk)

    def _on(self, number: int) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self.is_cpu else self._streams[number]

    def _mark(self, number: int) -> Callable[[int], None]:
        """Return what has another stream wait for all that is now in stream ``number``."""
        if self.is_cpu:
            return lambda other: None
        event = torch.Event(self.where)
        event.record(self._streams[number])
        return lambda other: event.wait(self._streams[other])

    def move(self, direction: str, pages: torch.Tensor) -> None:
        """Move tokens of the pool to host memory, or back; return when they are there."""
        first, second = (0, 1) if direction == BACKUP else (1, 0)
        over: list[Callable[[int], None]] = []
        for piece in range(self.pieces):
            some = pages[piece * self.chunk : (piece + 1) * self.chunk]
            staging, host = self.staging[piece % 2][:, : len(some)], self.host[piece, :, : len(some)]
            if piece >= 2:
                over[piece - 2](first)  # this buffer is free again
            with self._on(first):
                self._gather(some, staging) if direction == BACKUP else staging.copy_(host, non_blocking=True)
            self._mark(first)(second)
            with self._on(second):
                host.copy_(staging, non_blocking=True) if direction == BACKUP else self._scatter(some, staging)
            over.append(self._mark(second))
        for stream in self._streams:
            stream.synchronize()

    def _gather(self, pages: torch.Tensor, staging: torch.Tensor) -> None:
        if self.form == ONE:
            torch.index_select(self.pool, 1, pages, out=staging)
        else:
            for plane in range(PLANES):
                torch.index_select(self.pool[plane], 0, pages, out=staging[plane])

    def _scatter(self, pages: torch.Tensor, staging: torch.Tensor) -> None:
        if self.form == ONE:
            self.pool.index_copy_(1, pages, staging)
        else:
            for plane in range(PLANES):
                self.pool[plane].index_copy_(0, pages, staging[plane])

    def copy_contiguous(self, direction: str) -> None:
        """Move as many bytes in one piece a staging buffer, without kernels: the floor."""
        with self._on(1):
            for piece in range(self.pieces):
                staging, host = self.staging[piece % 2], self.host[piece]
                host.copy_(staging, non_blocking=True) if direction == BACKUP else staging.copy_(
                    host, non_blocking=True
                )
        for stream in self._streams:
            stream.synchronize()

    def check(self, pages: torch.Tensor) -> None:
        """Raise unless host memory has what the pool has at ``pages``."""
        found = self.host.transpose(1, 2).reshape(-1, PLANES, ROW_WORDS)[: len(pages)]
        wanted = self.pool[:, pages].transpose(0, 1).cpu()
        if not torch.equal(found, wanted):
            raise AssertionError("bytes differ")


def draw(pool: OwnersPool, rng: np.random.Generator) -> torch.Tensor:
    """Return pages that were not asked for in this order before."""
    return torch.from_numpy(rng.permutation(pool.pool.shape[1])[: pool.tokens]).to(pool.where)


def throughput(pool: OwnersPool, repetitions: int) -> list[dict[str, Any]]:
    """Return a row for each direction, beside the contiguous copy of the same bytes in the same run."""
    rng, found = np.random.default_rng(5), []
    for direction in (BACKUP, RESTORE):
        taken: dict[str, list[float]] = {"gather": [], "floor": []}
        for repetition in range(-2, repetitions):
            pages = draw(pool, rng)
            start = time.perf_counter()
            pool.copy_contiguous(direction)
            between = time.perf_counter()
            pool.move(direction, pages)
            if repetition >= 0:
                taken["floor"].append(between - start)
                taken["gather"].append(time.perf_counter() - between)
        pages = draw(pool, rng)
        pool.move(BACKUP, pages)
        pool.check(pages)
        if direction == RESTORE:
            pool.pool[:, pages] = -1
            pool.move(RESTORE, pages)
            pool.check(pages)
        fastest, floor = statistics.median(taken["gather"]), statistics.median(taken["floor"])
        row = {"direction": direction, "form": pool.form, "chunk_tokens": pool.chunk, "tokens": pool.tokens}
        row |= {"share_of_floor": ratio(floor, fastest), "gb_per_s": round(pool.nbytes / fastest / 1e9, 2)}
        found.append(row | {"gather": spread(taken["gather"]), "floor": spread(taken["floor"])})
    return found


def beside_model(pool: OwnersPool, kind: str, windows: int, window_s: float) -> dict[str, Any]:
    """Return the steps of a model of the same process with and without transfers, in turn."""
    model = Model(pool.where, kind)
    steps: Spans = []
    over = threading.Event()

    def run() -> None:
        own = contextlib.nullcontext() if pool.is_cpu else torch.Stream(pool.where, priority=-1)
        with own:
            for step in model.steps():
                steps.append(step)
                if over.is_set():
                    return

    thread = threading.Thread(target=run, name="model")
    thread.start()
    rng = np.random.default_rng(6)

    def mover() -> int:
        for direction in (BACKUP, RESTORE):
            pool.move(direction, draw(pool, rng))
        return 2 * pool.nbytes

    try:
        time.sleep(window_s)
        found = alternate(mover, steps, windows=windows, window_s=window_s)
    finally:
        over.set()
        thread.join()
    return {"model": kind, "form": pool.form, "chunk_tokens": pool.chunk} | found


def measure(
    where: torch.device,
    *,
    rows: int = 65_600,
    tokens: int = 4096,
    chunks: tuple[int, ...] = (256, 1024),
    repetitions: int = 30,
    windows: int = 6,
    window_s: float = 1.0,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table."""
    for form in (ONE, PLANE):
        for chunk in chunks:
            pool = OwnersPool(where, rows=rows, tokens=tokens, chunk=chunk, form=form)
            yield from throughput(pool, repetitions)
            for kind in ("decode_launched", "prefill"):
                yield beside_model(pool, kind, windows, window_s)
            del pool


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    facts = machine()
    device = load_backend(options.backend).open_device()
    where = torch_device(options.backend, device.info.uuid)
    facts["device"] = device.info.name
    found = []
    for row in measure(where):
        found.append(row)
        named = row.get("direction") or f"{row['model']} beside it"
        figures = {name: row[name] for name in ("share_of_floor", "mean_over_quiet", "p99_over_quiet") if name in row}
        print(f"{row['form']:26} {row['chunk_tokens']:5} tokens  {named:18} {row['gb_per_s']:6} GB/s  {figures}")
    if options.out is not None:
        write(options.out, {"machine": facts | {"torch": torch.__version__}, "results": found})


if __name__ == "__main__":
    main()
