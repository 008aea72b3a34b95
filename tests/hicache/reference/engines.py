"""Engines for the tests: a tiny random model on the host backend, and runs of a scheduler over it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from devipc.hicache.api import HiCacheClient, connect
from devipc.hicache.engine import EngineConfig
from devipc.hicache.reference.config import RuntimeConfig
from devipc.hicache.reference.local import LocalGPURuntime
from devipc.hicache.reference.request import Finished
from devipc.hicache.reference.runtime import BatchPlan, RuntimeInterface
from devipc.hicache.reference.scheduler import Scheduler
from devipc.hicache.reference.weights import TINY, random_weights
from devipc.interfaces.backend import Device
from devipc.registry import load_backend

torch.set_num_threads(1)  # the model is tiny: threads would only wait for each other

CONFIG = RuntimeConfig(model="tiny", poison=True)
SYSTEM = [7 * number % 251 + 1 for number in range(70)]


def prompts(count: int = 6) -> list[list[int]]:
    """Prompts that share a beginning, and differ in length and end."""
    return [SYSTEM + [(3 + number) * step % 250 + 1 for step in range(5 + 7 * number)] for number in range(count)]


def device() -> Device:
    return load_backend("host").open_device(None)


@contextlib.contextmanager
def cache(on: Device, **config: Any) -> Iterator[HiCacheClient]:
    with connect("inproc:", device=on, config=EngineConfig(**{"tier_nbytes": 2**25, **config})) as client:
        yield client


@contextlib.contextmanager
def runtime(on: Device, client: HiCacheClient | None, **config: Any) -> Iterator[LocalGPURuntime]:
    weights = random_weights(TINY, dtype=torch.float32, device="cpu", seed=3)
    made = LocalGPURuntime(on, weights, client, replace(CONFIG, **config))
    try:
        yield made
    finally:
        made.close()


def answer(
    over: RuntimeInterface, asked: Sequence[Sequence[int]], *, max_tokens: int = 12, **options: Any
) -> tuple[Scheduler, dict[str, Finished], list[BatchPlan]]:
    """Answer all prompts; give up when that takes more batches than anything explains."""
    plans: list[BatchPlan] = []
    scheduler = Scheduler(over, trace=plans.append, **options)
    for number, prompt in enumerate(asked):
        scheduler.submit(f"q{number}", prompt, max_tokens=max_tokens)
    for _ in range(5000):
        if not scheduler.busy:
            return scheduler, scheduler.finished, plans
        scheduler.step()
    raise AssertionError("the scheduler does not come to an end")


def texts(finished: dict[str, Finished]) -> dict[str, tuple[int, ...]]:
    return {name: one.tokens for name, one in finished.items()}
