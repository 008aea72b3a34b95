"""A model with no cache, with one in this process, with a daemon, and as a process of its own: one table of one run.

Owns the order of the measurements, in turn over the deployments, and the deaths. Every answer is compared: a figure of
an engine that answers something else is worth nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from devipc.bench.engines import (
    MODELS,
    Sizes,
    Steps,
    fill,
    first_token,
    moving,
    open_process,
    settle,
    steps,
    weights_of,
)
from devipc.bench.facts import quantile, ratio
from devipc.bench.hiding import measure_hiding, measure_throttle, transfer_times
from devipc.bench.model import torch_device
from devipc.bench.service import client_of, daemon
from devipc.errors import DevIPCError
from devipc.hicache.api import HiCacheClient
from devipc.hicache.reference.local import LocalGPURuntime
from devipc.hicache.reference.model import Weights
from devipc.hicache.reference.process import ProcessGPURuntime
from devipc.hicache.reference.runtime import RuntimeInterface
from devipc.hicache.reference.scheduler import Scheduler
from devipc.hicache.reference.spec import RuntimeSpec
from devipc.interfaces.backend import Backend, Device

__all__ = ["DEPLOYMENTS", "measure_engine"]

DEPLOYMENTS = ("none", "inproc", "daemon", "process")
"""No cache, an engine in this process, a daemon, and a runtime in a process of its own that uses the daemon."""
_REVISION = "bench"
_KILL_AT = 3
Answers = dict[str, tuple[int, ...]]


@dataclass(slots=True)
class _Deployment:
    name: str
    runtime: RuntimeInterface
    client: HiCacheClient | None
    memory: dict[str, int]
    exact: bool

    @property
    def local(self) -> LocalGPURuntime | None:
        return self.runtime if isinstance(self.runtime, LocalGPURuntime) else None


def measure_engine(
    backend: Backend, device: Device, *, model: str, deployments: tuple[str, ...], deaths: bool = True
) -> list[dict[str, Any]]:
    """Return a row for each deployment; and, where asked for, one for each who dies.

    Raises
    ------
    DevIPCError
        With code ``wrong_answer`` when an answer is not that of the deployment with no cache.
    """
    sizes = MODELS[model]
    with contextlib.ExitStack() as stack:
        where = torch_device(backend.name, device.info.uuid)
        threads = torch.get_num_threads()
        if where.type == "cpu":
            torch.set_num_threads(1)
            stack.callback(torch.set_num_threads, threads)
        weights = weights_of(model, str(where))
        prompts = _Prompts(weights.shape.vocabulary, sizes)
        opened = _open(stack, backend, device, weights, model, sizes, deployments)
        rows: dict[str, dict[str, Any]] = {one.name: {"deployment": one.name} for one in opened}
        _first_tokens(opened, rows, prompts, sizes)
        _decoding(opened, rows, prompts, sizes)
        for one in opened:
            _transfers(one, rows[one.name], prompts, sizes)
            rows[one.name] |= one.memory
            if isinstance(one.runtime, ProcessGPURuntime):
                batches = max(1, one.runtime.messages["completion"])
                both = one.runtime.messages["plan"] + one.runtime.messages["completion"]
                rows[one.name]["messages_per_batch"] = round(both / batches, 3)
        found: list[dict[str, Any]] = list(rows.values())
        if deaths:
            found += _deaths(opened, prompts, backend, device, weights, model, sizes)
        return found


class _Prompts:
    """Random tokens, the same in every run."""

    def __init__(self, vocabulary: int, sizes: Sizes) -> None:
        rng = np.random.default_rng(1)
        self.long: list[int] = rng.integers(1, vocabulary, sizes.prefix + sizes.suffix).tolist()
        self.short: list[list[int]] = rng.integers(1, vocabulary, (sizes.requests, sizes.context)).tolist()
        self.hidden: list[int] = rng.integers(1, vocabulary, (sizes.hidden or sizes.prefix) + 1).tolist()


def _open(
    stack: contextlib.ExitStack,
    backend: Backend,
    device: Device,
    weights: Weights,
    model: str,
    sizes: Sizes,
    deployments: tuple[str, ...],
) -> list[_Deployment]:
    config = sizes.config(model, revision=_REVISION)
    shape = weights.shape
    page_nbytes = 2 * shape.layers * sizes.page_tokens * shape.kv_row_elements * weights.embed.dtype.itemsize
    tier = max(2 * config.pages * page_nbytes, 4 * 64 * 2**20)
    url, made = "", []
    if {"daemon", "process"} & set(deployments):
        before = _device_used(weights)
        flags = ["--tier-nbytes", str(tier)]
        url, ready = stack.enter_context(daemon(backend.name, device.info.uuid, flags))
        served = {
            "daemon_host_nbytes": _resident(int(ready["pid"])),
            "daemon_device_nbytes": _device_used(weights) - before,
        }
    for name in deployments:
        before, resident = _device_used(weights), _resident(os.getpid())
        client: HiCacheClient | None = None
        runtime: RuntimeInterface
        if name == "process":
            spec = RuntimeSpec(
                backend=backend.name,
                device=device.info.uuid,
                weights=model,
                dtype=str(weights.embed.dtype).removeprefix("torch."),
                cache=url,
                threads=1 if weights.embed.device.type == "cpu" else 0,
                config=config,
            )
            runtime = process = open_process(spec)
            stack.callback(runtime.close)
            memory = {"host_nbytes": _resident(process.pid)}
        else:
            if name != "none":
                place = url if name == "daemon" else "inproc:"
                client = stack.enter_context(client_of(place, backend, device, tier_nbytes=tier))
            runtime = LocalGPURuntime(device, weights, client, config)
            stack.callback(runtime.close)
            memory = {"host_nbytes": _resident(os.getpid()) - resident}
        memory["device_nbytes"] = _device_used(weights) - before
        if name == "daemon":
            memory |= served
        made.append(_Deployment(name, runtime, client, memory, exact=weights.embed.device.type == "cpu"))
    return made


def _device_used(weights: Weights) -> int:
    if weights.embed.device.type == "cpu":
        return 0
    free, total = torch.get_device_module(weights.embed.device).mem_get_info(weights.embed.device)
    return int(total - free)


def _resident(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmRSS"))


def _first_tokens(opened: list[_Deployment], rows: dict[str, dict[str, Any]], prompts: _Prompts, sizes: Sizes) -> None:
    """Time the first token, all computed and restored, in turn over the deployments."""
    computed: dict[str, list[float]] = {one.name: [] for one in opened}
    restored: dict[str, list[float]] = {one.name: [] for one in opened}
    expected: tuple[int, ...] | None = None
    for one in opened:
        first_token(one.runtime, prompts.long, restore=False)  # libraries set themselves up
        if one.name != "none":
            rows[one.name]["backup_behind_prefill_ms"] = round(fill(one.runtime, prompts.long) * 1e3, 3)
            first_token(one.runtime, prompts.long, restore=True)
    for _ in range(sizes.repetitions):
        for one in opened:
            for restore, times in ((False, computed), (True, restored)):
                if restore and one.name == "none":
                    continue
                found = first_token(one.runtime, prompts.long, restore=restore)
                expected = expected or found.tokens
                if found.tokens != expected:
                    raise _wrong(one.name)
                if restore and found.computed > sizes.suffix + sizes.page_tokens:
                    raise DevIPCError(
                        f"{one.name} computed {found.computed} tokens that were cached", code="not_cached"
                    )
                times[one.name].append(found.first_token_s)
    for name, row in rows.items():
        row["ttft_computed_ms"] = round(statistics.median(computed[name]) * 1e3, 3)
        if restored[name]:
            row["ttft_restored_ms"] = round(statistics.median(restored[name]) * 1e3, 3)
            row["ttft_restored_over_computed"] = ratio(
                statistics.median(restored[name]), statistics.median(computed[name])
            )


def _agreement(one: _Deployment, answers: Answers, expected: Answers) -> float:
    """Return the share of answers that are as expected: all of them on a host, whose sums have one order."""
    same = sum(answers[name] == tokens for name, tokens in expected.items())
    if same < len(expected) and one.exact:
        raise _wrong(one.name)
    return same / len(expected)


def _wrong(name: str) -> DevIPCError:
    return DevIPCError(f"{name} answers something else", code="wrong_answer", remedy="report it, with the settings")


_BUSY = {"itl_busy": float("inf"), "itl_paced": 1.0}
"""Backgrounds by the name of their figures: as fast as it goes, and at the pace of :class:`Sizes`."""


def _decoding(opened: list[_Deployment], rows: dict[str, dict[str, Any]], prompts: _Prompts, sizes: Sizes) -> None:
    """Time steps of decoding, quiet and beside transfers, in turn."""
    kept = {(one.name, kind): Steps() for one in opened for kind in ("itl", *_BUSY)}
    rates: dict[tuple[str, str], list[float]] = {key: [] for key in kept}
    expected: Answers | None = None
    for number in range(sizes.repetitions + 1):
        for one in opened:
            for kind in ("itl", *_BUSY):
                if kind in _BUSY and (one.local is None or one.client is None):
                    continue
                with contextlib.ExitStack() as stack:
                    if kind in _BUSY and one.local is not None and one.client is not None:
                        pace = _BUSY[kind] * sizes.pace_nbytes_per_s
                        moved = stack.enter_context(
                            moving(one.local, one.client, sizes.moved_pages, pace_nbytes_per_s=pace)
                        )
                    found, scheduler = steps(one.runtime, prompts.short, sizes.answer)
                    if kind in _BUSY:
                        nbytes, seconds = moved()
                        rates[one.name, kind].append(nbytes / seconds / 1e9)
                answers = {name: done.tokens for name, done in scheduler.finished.items()}
                expected = expected or answers
                rows[one.name]["same_answers"] = min(
                    rows[one.name].get("same_answers", 1.0), _agreement(one, answers, expected)
                )
                if number:  # the first round is a warm-up
                    for part in ("decode_s", "cpu_s", "outside_s"):
                        getattr(kept[one.name, kind], part).extend(getattr(found, part))
    for name, row in rows.items():
        quiet = kept[name, "itl"]
        row |= _spread("itl", quiet.decode_s)
        row["scheduler_cpu_us"] = round(statistics.median(quiet.cpu_s) * 1e6, 1)
        row["bubble_share"] = ratio(sum(quiet.outside_s), sum(quiet.decode_s))
        for kind in _BUSY:
            if busy := kept[name, kind].decode_s:
                row |= _spread(kind, busy)
                row[kind.replace("itl", "moved") + "_gb_per_s"] = round(statistics.median(rates[name, kind]), 2)
                for part, share in (("p50", 0.5), ("p99", 0.99)):
                    before, beside = quantile(quiet.decode_s, share), quantile(busy, share)
                    row[f"{kind}_over_quiet_{part}"] = ratio(beside, before)


def _spread(name: str, samples: list[float]) -> dict[str, Any]:
    found = {
        f"{name}_{part}_ms": round(quantile(samples, share) * 1e3, 3) for part, share in (("p50", 0.5), ("p99", 0.99))
    }
    return {**found, f"{name}_samples": len(samples)}


def _transfers(one: _Deployment, row: dict[str, Any], prompts: _Prompts, sizes: Sizes) -> None:
    """Measure transfers alone, how they hide behind a batch, frames to the daemon, and the throttle."""
    if one.local is None or one.client is None:
        return
    count = sizes.prefix // sizes.page_tokens
    row |= transfer_times(one.local, one.client, count, sizes.repetitions)
    for prompt in (prompts.long, prompts.hidden):  # what moved meanwhile may have taken their places
        fill(one.runtime, prompt)
    most = (3 if one.name == "inproc" else 12) * sizes.repetitions
    row["hiding"] = measure_hiding(one.local, prompts.hidden, sizes, row["restore_ms"] / 1e3 / count, most_pairs=most)
    row["throttle"] = measure_throttle(one.local, prompts.long, sizes, row["itl_p50_ms"] / 1e5)
    status: dict[str, Any] = one.client.status()
    row["strategy"], row["plans"] = status.get("strategy", ""), status.get("plans", {})


# --- deaths ----------------------------------------------------------------------------------------------------------


def _deaths(
    opened: list[_Deployment],
    prompts: _Prompts,
    backend: Backend,
    device: Device,
    weights: Weights,
    model: str,
    sizes: Sizes,
) -> list[dict[str, Any]]:
    """Kill a runtime while it answers; then the daemon below one; each time the answers are compared."""
    found = []
    by_name = {one.name: one for one in opened}
    reference = next((one for one in opened if one.local is not None), None)
    if reference is None:
        return []
    expected = _answers(reference.runtime, prompts, sizes)[0]
    process = by_name.get("process")
    if process is not None and isinstance(process.runtime, ProcessGPURuntime):
        over = process.runtime
        began = time.perf_counter()
        answers, longest, lost = _answers(over, prompts, sizes, at_step=lambda: os.kill(over.pid, signal.SIGKILL))
        seconds = time.perf_counter() - began
        again = first_token(over, prompts.long, restore=True)
        row = {
            "died": "runtime",
            "answers_with_it_s": round(seconds, 3),
            "longest_step_ms": longest,
            "times_lost": lost,
        }
        found.append(row | {"restored_afterwards": again.restored, "same_answers": answers == expected})
    if "daemon" in by_name:
        found.append(_daemon_dies(expected, prompts, backend, device, weights, model, sizes))
    for row in found:
        if not row["same_answers"] and reference.exact:
            raise _wrong(f"what is left after the {row['died']} died")
    return found


def _answers(
    over: RuntimeInterface, prompts: _Prompts, sizes: Sizes, *, at_step: Any = None
) -> tuple[Answers, float, int]:
    scheduler = Scheduler(over)
    for number, prompt in enumerate(prompts.short):
        scheduler.submit(f"d{number}", prompt, max_tokens=sizes.answer)
    longest, count = 0.0, 0
    while scheduler.busy:
        began = time.perf_counter()
        if count == _KILL_AT and at_step is not None:
            at_step()
        scheduler.step()
        longest, count = max(longest, time.perf_counter() - began), count + 1
    scheduler.release_all()
    settle(over)
    return {name: one.tokens for name, one in scheduler.finished.items()}, round(longest * 1e3, 3), scheduler.lost


def _daemon_dies(
    expected: Answers,
    prompts: _Prompts,
    backend: Backend,
    device: Device,
    weights: Weights,
    model: str,
    sizes: Sizes,
) -> dict[str, Any]:
    """A daemon of its own, which is killed in the middle of answers."""
    config = sizes.config(model, revision="death")
    with daemon(backend.name, device.info.uuid, ["--tier-nbytes", str(4 * 64 * 2**20)]) as (url, ready):
        with client_of(url, backend, device, tier_nbytes=0) as client:
            over = LocalGPURuntime(device, weights, client, config)
            try:
                told: list[float] = []
                killed: list[float] = []

                def kill() -> None:
                    killed.append(time.perf_counter())
                    os.kill(int(ready["pid"]), signal.SIGKILL)
                    threading.Thread(target=watch, name="devipc-bench-watch").start()

                def watch() -> None:
                    while not client.status()["degraded"]:
                        time.sleep(1e-3)
                    told.append(time.perf_counter())

                answers, longest, _ = _answers(over, prompts, sizes, at_step=kill)
                deadline = time.monotonic() + 30.0
                while not told and time.monotonic() < deadline:
                    time.sleep(1e-3)
                row = {"died": "daemon", "longest_step_ms": longest, "same_answers": answers == expected}
                return row | {"noticed_after_ms": round((told[0] - killed[0]) * 1e3, 3)}
            finally:
                over.close()
