"""The reference engine in each deployment, and what one asks of it: first tokens, steps, background transfers.

Owns how runtimes are made, filled and asked. What is done with the figures, and what dies, is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from devipc.hicache.api import UNFENCED, HiCacheClient
from devipc.hicache.keys import KEY_NBYTES
from devipc.hicache.reference.config import RuntimeConfig
from devipc.hicache.reference.local import LocalGPURuntime
from devipc.hicache.reference.model import Weights
from devipc.hicache.reference.process import ProcessGPURuntime
from devipc.hicache.reference.request import BackupPolicy, Finished
from devipc.hicache.reference.runtime import BatchCompletion, BatchPlan, PreparedBatchHandle, RuntimeInterface
from devipc.hicache.reference.scheduler import Scheduler
from devipc.hicache.reference.weights import LLAMA_3_8B, TINY, load_smollm2, random_weights

__all__ = ["MODELS", "Sizes", "Steps", "Timed", "fill", "first_token", "moving", "settle", "steps", "weights_of"]

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is asked.

    Parameters
    ----------
    prefix, suffix : int
        Tokens of a prompt that are cached, and that are not.
    context, answer, requests : int
        Tokens of the prompts and answers, and how many are decoded at a time, where decoding is measured.
    page_tokens, chunk_tokens : int
        As :class:`~devipc.hicache.reference.runtime.RuntimeLimits`.
    repetitions : int
        Of each measurement.
    hidden : int
        Tokens that are restored behind a batch at most, where it is measured what of that can be hidden; ``prefix``
        when 0.
    moved_pages : int
        Of one operation of the background.
    pace_nbytes_per_s : float
        Of a background that is held back, both ways together.
    """

    prefix: int
    suffix: int
    context: int
    answer: int
    requests: int
    page_tokens: int
    chunk_tokens: int
    repetitions: int
    hidden: int = 0
    moved_pages: int = 64
    pace_nbytes_per_s: float = 16e9

    def config(self, model: str, **options: Any) -> RuntimeConfig:
        """Return the sizes of a runtime that has room for all of it, and for pages that move beside."""
        prompt = max(self.prefix + self.suffix, self.hidden + self.chunk_tokens)
        longest = max(prompt, self.context) + self.answer
        pages = 2 * prompt + self.requests * (self.context + self.answer)
        pages = -(-pages // self.page_tokens) + 2 * self.moved_pages + 4 * self.requests
        return RuntimeConfig(
            model=model,
            pages=pages,
            page_tokens=self.page_tokens,
            chunk_tokens=self.chunk_tokens,
            max_requests=self.requests,
            max_tokens=-(-longest // self.chunk_tokens) * self.chunk_tokens + self.chunk_tokens,
            **options,
        )


MODELS = {
    "tiny": Sizes(
        prefix=256,
        suffix=8,
        context=32,
        answer=48,
        requests=4,
        page_tokens=16,
        chunk_tokens=64,
        hidden=384,
        repetitions=3,
    ),
    "smollm2": Sizes(
        prefix=512, suffix=8, context=32, answer=16, requests=2, page_tokens=16, chunk_tokens=64, repetitions=2
    ),
    "llama-3-8b": Sizes(
        prefix=8192,
        suffix=64,
        context=512,
        answer=128,
        requests=8,
        page_tokens=16,
        chunk_tokens=2048,  # 512 took 23 to 49 ms on an H200: too unsteady to hide anything behind
        hidden=16384,  # .8 of such a batch
        repetitions=7,
        moved_pages=256,
    ),
}
"""Sizes by the name of a model: random and small, real and small, random and of the shape of Llama-3-8B."""


def weights_of(model: str, where: str) -> Weights:
    """Load or make weights; in float32 on the host, bfloat16 on a device."""
    dtype = torch.float32 if where == "cpu" else torch.bfloat16
    if model == "smollm2":
        return load_smollm2(dtype=dtype, device=where)[0]
    return random_weights(LLAMA_3_8B if model == "llama-3-8b" else TINY, dtype=dtype, device=where)


@dataclass(slots=True)
class Steps:
    """Seconds of each step, and what it cost beside the computation."""

    decode_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    outside_s: list[float] = field(default_factory=list)


class Timed:
    """A runtime that notes how much time its caller spends in it. Fulfils what a scheduler needs of a runtime."""

    def __init__(self, inner: RuntimeInterface) -> None:
        self.inner = inner
        self.cpu_s = 0.0
        self.plans: dict[int, BatchPlan] = {}
        self.last: BatchCompletion | None = None

    def forget(self) -> None:
        """Begin anew."""
        self.last, self.cpu_s = None, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def prepare_batch(self, plan: BatchPlan) -> PreparedBatchHandle:
        """Announce, and note the processor's time."""
        self.plans[plan.number] = plan
        began = time.thread_time()
        try:
            return self.inner.prepare_batch(plan)
        finally:
            self.cpu_s += time.thread_time() - began

    def execute_batch(self, handle: PreparedBatchHandle) -> BatchCompletion:
        """Execute, and note the processor's time."""
        began = time.thread_time()
        try:
            self.last = self.inner.execute_batch(handle)
            return self.last
        finally:
            self.cpu_s += time.thread_time() - began


def first_token(over: RuntimeInterface, prompt: Sequence[int], *, restore: bool) -> Finished:
    """Ask for one token with nothing on the device; restored from below, or all computed."""
    scheduler = Scheduler(over, policy=BackupPolicy.NONE, restore=restore, prefix_cache=False)
    scheduler.submit("one", prompt, max_tokens=1)
    return scheduler.run()["one"]


def fill(over: RuntimeInterface, prompt: Sequence[int]) -> float:
    """Compute a prompt and back its pages up; return the seconds until all of it was below."""
    scheduler = Scheduler(over, restore=False)
    scheduler.submit("fill", prompt, max_tokens=1)
    scheduler.run()
    began = time.perf_counter()
    scheduler.release_all()
    settle(over)
    return time.perf_counter() - began


def settle(over: RuntimeInterface) -> None:
    """Wait until no backup runs."""
    deadline = time.monotonic() + TIMEOUT_S
    while over.stats().backups_open and time.monotonic() < deadline:
        time.sleep(1e-3)


def steps(over: RuntimeInterface, prompts: Sequence[Sequence[int]], answer: int) -> tuple[Steps, Scheduler]:
    """Decode answers to all prompts; time the steps that only decode."""
    timed = Timed(over)
    scheduler = Scheduler(timed, policy=BackupPolicy.NONE, restore=False, prefix_cache=False)
    for number, prompt in enumerate(prompts):
        scheduler.submit(f"d{number}", prompt, max_tokens=answer)
    found = Steps()
    while scheduler.busy:
        timed.forget()
        began, cpu = time.perf_counter(), time.thread_time()
        scheduler.step()
        took, cpu = time.perf_counter() - began, time.thread_time() - cpu
        if timed.last is None:
            continue
        plan = timed.plans[timed.last.number]
        if plan.decode and not plan.prefill:
            found.decode_s.append(took)
            found.cpu_s.append(cpu - timed.cpu_s)
            found.outside_s.append(max(0.0, took - timed.last.compute_s))
    return found, scheduler


@contextlib.contextmanager
def moving(
    over: LocalGPURuntime, client: HiCacheClient, count: int, *, pace_nbytes_per_s: float = float("inf")
) -> Iterator[Callable[[], tuple[int, float]]]:
    """Back up and restore ``count`` spare pages of a runtime all the time; give what returns bytes and seconds.

    At most ``pace_nbytes_per_s`` on the average, both ways together.
    """
    pool = over._handle
    assert pool is not None
    pages = over._table.allocate(2 * count)
    physical = np.array(over._table.physical(pages))
    rng, over_with = np.random.default_rng(5), threading.Event()
    moved, began = [0], time.perf_counter()

    def keys() -> np.ndarray[Any, np.dtype[np.uint8]]:
        return rng.integers(0, 256, (count, KEY_NBYTES), np.uint8)

    def move() -> None:
        known = keys()
        client.backup(pool, physical[:count], known, ready=UNFENCED).result(TIMEOUT_S)
        while not over_with.is_set():
            fresh = keys()
            backup = client.backup(pool, physical[:count], fresh, ready=UNFENCED)
            client.restore(pool, known, physical[count:], ready=UNFENCED).result(TIMEOUT_S)
            backup.result(TIMEOUT_S)
            moved[0] += 2 * count * over.pool.page_nbytes
            known = fresh
            over_with.wait(max(0.0, began + moved[0] / pace_nbytes_per_s - time.perf_counter()))

    thread = threading.Thread(target=move, name="devipc-bench-mover")
    thread.start()
    try:
        yield lambda: (moved[0], time.perf_counter() - began)
    finally:
        over_with.set()
        thread.join()
        over._table.drop(pages)


def open_process(spec: Any) -> ProcessGPURuntime:
    """Start a runtime in a process of its own; the caller closes it."""
    return ProcessGPURuntime(spec, start_timeout_s=300.0, batch_timeout_s=120.0)
