"""How long a backup of 256 tokens takes from its submission until every client finds its pages.

A daemon, one client that backs up 32 MiB of a Llama-3-8B pool, and another, in a process of its own, that does nothing
but search. A second round notes where the time goes.
``python -m backends.cuda.tests.hardware.hicache_latency --out FILE``.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from devipc.bench.pools import GEOMETRIES, Geometry, Pinned, Pool
from devipc.hicache.api import UNFENCED, HiCacheClient, connect
from devipc.hicache.keys import KEY_NBYTES, Namespace
from devipc.hicache.operations import Event

from . import evidence, hicache_trace
from .evidence import SIMULATED

BAR_MS = 1.3
DAEMONS = 1 if SIMULATED else 4
TOKENS = 256
REPETITIONS, WARM_UP = (5, 1) if SIMULATED else (80, 20)
GEOMETRY = Geometry(2, 2, 64) if SIMULATED else GEOMETRIES["llama"]
TIMEOUT_S = 30.0


@contextlib.contextmanager
def daemon(folder: str, *flags: str, trace: bool = False) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """A daemon on the first device; gives its socket, what it said when it was ready, and the process."""
    path = os.path.join(folder, "h.sock")
    module = hicache_trace.MODULE if trace else "devipc"
    command = [
        sys.executable,
        "-m",
        module,
        "hicache",
        "serve",
        "--json",
        "--socket",
        path,
        "--backend",
        "cuda",
        *flags,
    ]
    with open(os.path.join(folder, "log"), "ab") as log:
        process = subprocess.Popen(
            [*command, *flags], stdout=subprocess.PIPE, stderr=log, env={**os.environ, hicache_trace.FOLDER: folder}
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, Path(folder, "log").read_text()
        yield path, json.loads(line), process
    finally:
        process.terminate()
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


class Side:
    """A client, with a pool."""

    def __init__(self, device: Any, path: str, allocation: str, *, tokens: int, page_tokens: int) -> None:
        self.device = device
        self.pool = Pool(device, GEOMETRY, allocation, rows=tokens + page_tokens, page_tokens=page_tokens)
        self.client: HiCacheClient = connect("unix:" + path, device=device, wait_s=TIMEOUT_S)
        layout = self.pool.built.layout
        self.handle = self.client.register_pool(
            self.pool.built, namespace=Namespace.of(layout, model="latency", revision="1", dtype="u8")
        )
        self.count = TOKENS // page_tokens

    def keys(self, seed: int) -> Any:
        return np.random.default_rng(seed).integers(0, 256, (self.count, KEY_NBYTES), np.uint8)

    def close(self) -> None:
        self.client.unregister(self.handle)
        self.client.close()
        self.pool.close()


def look(path: str, allocation: str, page_tokens: int) -> None:
    """Be the other client: for each seed that comes in, search until all pages are found, and say when that was."""
    device = evidence.open_device()
    side = Side(device, path, allocation, tokens=TOKENS, page_tokens=page_tokens)
    print("ready", flush=True)
    for line in sys.stdin:
        keys, match, handle, count = side.keys(int(line)), side.client.match, side.handle, side.count
        began = time.monotonic_ns()
        print(match(handle, keys), flush=True)
        searched = time.monotonic_ns() - began
        while match(handle, keys) < count:
            pass
        print(time.monotonic_ns(), searched, flush=True)
    side.close()
    device.close()


@contextlib.contextmanager
def looking(path: str, allocation: str, page_tokens: int) -> Iterator[Any]:
    """The other client, as a process."""
    command = [sys.executable, "-m", f"{__package__}.hicache_latency", "--look", path, allocation, str(page_tokens)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def work(busy_s: float) -> None:
    """Be as busy as a scheduler is between two submissions; the daemon's processes sleep meanwhile."""
    until, values = time.monotonic() + busy_s, list(range(1000))
    while time.monotonic() < until:
        values.sort(key=lambda value: -value)
        values.reverse()


def back_up(side: Side, other: Any, seed: int, ready: Any) -> dict[str, int]:
    """One backup of random pages; when what happened, in nanoseconds."""
    other.stdin.write(f"{seed}\n")
    other.stdin.flush()
    assert other.stdout.readline() == "0\n"
    work(0.002)
    pages = np.random.default_rng(seed).permutation(side.pool.page_count - 1)[: side.count] + 1
    keys = side.keys(seed)
    began = time.monotonic_ns()
    ticket = side.client.backup(side.handle, pages, keys, ready=ready)
    submitted = time.monotonic_ns()
    assert ticket.reached(Event.VISIBLE, TIMEOUT_S)
    told = time.monotonic_ns()
    ticket.result(TIMEOUT_S)
    found, searched = map(int, other.stdout.readline().split())
    return {"began": began, "submitted": submitted, "told": told, "found": found, "one search": searched}


def measure(device: Any, allocation: str, page_tokens: int, *, trace: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hl") as folder:
        with daemon(folder, "--tier-nbytes", str(2**24 if SIMULATED else 2**32), trace=trace) as (path, _, _process):
            side = Side(device, path, allocation, tokens=8 * TOKENS, page_tokens=page_tokens)
            stream = device.transfer.create_stream()
            found: dict[str, Any] = {}
            with looking(path, allocation, page_tokens) as other:
                for name, ready in (("nothing to wait for", UNFENCED), ("behind a stream", stream)):
                    many = [back_up(side, other, hash((name, n)) % 2**31, ready) for n in range(WARM_UP + REPETITIONS)]
                    found[name] = many[WARM_UP:]
            side.close()
            device.transfer.destroy_stream(stream)
        if trace:
            noted = [note for file in Path(folder).glob("*.json") for note in json.loads(file.read_text())]
            return {name: way(many, noted) for name, many in found.items()}
    return {name: spread(many) for name, many in found.items()}


def spread(many: list[dict[str, int]]) -> dict[str, Any]:
    """Milliseconds from the beginning of the submission."""
    result: dict[str, Any] = {"n": len(many)}
    for name in ("submitted", "told", "found"):
        times = sorted((one[name] - one["began"]) / 1e6 for one in many)
        cuts = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        result[name] = {cut: round(times[min(int(len(times) * at), len(times) - 1)], 3) for cut, at in cuts.items()}
    result["share within the bar"] = round(
        sum(one["found"] - one["began"] <= BAR_MS * 1e6 for one in many) / len(many), 3
    )
    result["one search, us"] = round(statistics.median(one["one search"] for one in many) / 1e3, 1)
    return result


def way(many: list[dict[str, int]], noted: list[Any]) -> dict[str, Any]:
    """Medians of when each noted call was first entered and last left, in microseconds from the submission."""
    entered: dict[str, list[float]] = {}
    left: dict[str, list[float]] = {}
    calls: dict[str, list[int]] = {}
    for one in many:
        inside = [note for note in noted if one["began"] <= note[1] <= one["told"]]
        for label in {note[0] for note in inside}:
            spans = [note for note in inside if note[0] == label]
            entered.setdefault(label, []).append((spans[0][1] - one["began"]) / 1e3)
            left.setdefault(label, []).append((max(note[2] for note in spans) - one["began"]) / 1e3)
            calls.setdefault(label, []).append(len(spans))
    middle = statistics.median
    rows = sorted((middle(times), label) for label, times in entered.items())
    return {
        **spread(many),
        "us from the submission: [first entered, last left, calls]": {
            label: [round(at, 1), round(middle(left[label]), 1), middle(calls[label])] for at, label in rows
        },
    }


def floor(device: Any) -> dict[str, float]:
    """One contiguous copy of as many bytes to pinned memory, in milliseconds."""
    nbytes = TOKENS * GEOMETRY.token_nbytes
    pinned, block, times = Pinned(device, nbytes), device.memory.allocate(nbytes), []
    for _ in range(20):
        began = time.perf_counter()
        device.transfer.copy(pinned.stream, pinned.ptr, block.ptr, nbytes)
        device.transfer.synchronize_stream(pinned.stream)
        times.append((time.perf_counter() - began) * 1e3)
    device.memory.free(block)
    pinned.close()
    return evidence.quantiles(times, 3)


def again(device: Any, allocation: str, page_tokens: int) -> dict[str, Any]:
    """Several daemons one after the other: each has other processors, and there they are fast or slow for its life."""
    found = [measure(device, allocation, page_tokens, trace=False) for _ in range(DAEMONS)]
    return {
        name: {
            "found, p50 of each daemon": [one[name]["found"]["p50"] for one in found],
            "share within the bar": [one[name]["share within the bar"] for one in found],
            "the fastest": min((one[name] for one in found), key=lambda one: float(one["found"]["p50"])),
        }
        for name in found[0]
    }


def sections(device: Any) -> Sequence[evidence.Section]:
    found: list[evidence.Section] = [
        ("one contiguous copy, ms", partial(floor, device)),
        ("a loop on each processor, ms", processors),
    ]
    for allocation in ("layers", "one"):
        for page_tokens in (16, 64):
            name = f"{allocation}, pages of {page_tokens} tokens"
            found.append((name, partial(again, device, allocation, page_tokens)))
    for page_tokens in (16, 64):
        name = f"layers, pages of {page_tokens} tokens, noted"
        found.append((name, partial(measure, device, "layers", page_tokens, trace=True)))
    return found


def processors() -> list[float]:
    """The same code on each processor in turn: those of a virtual machine may run at half their speed for a while."""
    before, times = os.sched_getaffinity(0), []
    try:
        for processor in sorted(before):
            os.sched_setaffinity(0, {processor})
            began = time.perf_counter()
            for number in range(100_000):
                str(number)
            times.append(round((time.perf_counter() - began) * 1e3, 2))
    finally:
        os.sched_setaffinity(0, before)
    return times


if __name__ == "__main__":
    if sys.argv[1] == "--look":
        look(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        sys.exit(evidence.main(str(__doc__), sections))
