"""What asking the cache daemon costs: beside a bare SEQPACKET round trip, in the same interleaved run.

Processes: this scheduler, ``devipc hicache serve`` with its engine on the host backend, a process that echoes 64 bytes,
and, for ``match``, a second scheduler that backs pages up as fast as it can. The scheduler waits itself (ticket by
ticket); everything takes turns, a block each. ``python -m benchmarks.control [--blocks 60] [--out FILE]`` prints a
table and writes JSON.

A round trip between two processes costs four times as much across cores as on one core, and the kernel may place the
echo otherwise than the daemon. So all processes are kept on chosen cores, the echo where the supervisor is:

- ``apart``: the scheduler and the engine process on one core, the supervisor on the other. The limits are for this:
  scheduler and daemon have a core each wherever there are enough.
- ``one core``: all of them on one.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from devipc.bench.facts import machine, spread, write
from devipc.hicache.api import UNFENCED, HiCacheClient, PoolHandle
from devipc.hicache.builders import TensorView, token_pool
from devipc.hicache.client.daemonlink import DaemonLink
from devipc.hicache.keys import Namespace, page_keys
from devipc.hicache.operations import Event
from devipc.hicache.wire.transport import Way
from devipc.interfaces.backend import Device
from devipc.memfd import round_up
from devipc.registry import load_backend

BLOCK = 50
NBYTES = 64
WARM = 5
TOKENS, LAYERS, ROW = 16, 8, 512  # 128 KiB a page: K and V of 8 layers
PAGES = 33
LIMIT_RINGS, LIMIT_MESSAGES, LIMIT_BACKUP_US = 2.0, 2.5, 150.0
LIMIT_MATCH_US = {256: 400.0, 2048: 2_000.0}
FOUND = 2048
Keys = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Placement:
    """Which core is whose; all on one when there is no other."""

    name: str
    scheduler: Set[int]
    supervisor: Set[int]

    @classmethod
    def all(cls) -> list[Placement]:
        """Return both, in this machine's first cores."""
        first, *others = sorted(os.sched_getaffinity(0))
        apart = [cls("apart", {first}, {others[0]})] if others else []
        return [*apart, cls("one core", {first}, {first})]


@contextmanager
def on_cores(cores: Set[int]) -> Iterator[None]:
    """Keep this thread, and what it starts meanwhile, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def move_children(pid: int, cores: Set[int]) -> None:
    """Keep the threads of a process's children on these cores: of a supervisor, its engine."""
    children = [
        child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    threads = [int(task.name) for child in children for task in Path(f"/proc/{child}/task").iterdir()]
    assert threads
    for thread in threads:
        os.sched_setaffinity(thread, cores)


class Scheduler:
    """A client with one pool, on the daemon at ``path``."""

    def __init__(self, path: str, device: Device, way: Way) -> None:
        self.client = HiCacheClient(DaemonLink(path, device=device, way=way))
        memory = device.memory
        assert memory is not None
        half = round_up(PAGES * TOKENS * ROW, 64)
        self._memory = memory
        self._allocations = [memory.allocate(2 * half) for _ in range(LAYERS)]
        k, v = (
            [TensorView.contiguous(one.ptr + at, (PAGES * TOKENS, ROW), 1) for one in self._allocations]
            for at in (0, half)
        )
        infos = [memory.describe(one.ptr) for one in self._allocations]
        built = token_pool(k, v, page_tokens=TOKENS, allocations=infos, first_page=1)
        space = Namespace.of(built.layout, model=f"benchmark-{os.getpid()}-{way}", revision="1", dtype="u8")
        self.handle: PoolHandle = self.client.register_pool(built, namespace=space)
        self._seed = 0

    def keys(self, count: int) -> Keys:
        """Keys that were never used."""
        self._seed += 1
        tokens = np.arange(count * TOKENS) + self._seed * 1_000_003
        return page_keys(tokens, page_tokens=TOKENS, parent=self.handle.namespace)

    def backup(self, keys: Keys) -> None:
        """Store a page for each key, and wait for that."""
        self.client.backup(self.handle, [1 + n % (PAGES - 1) for n in range(len(keys))], keys, ready=UNFENCED).result(
            10
        )

    def close(self) -> None:
        """Leave, then free the pool."""
        self.client.close()
        for one in self._allocations:
            self._memory.free(one)


@contextmanager
def daemon(placement: Placement) -> Iterator[str]:
    """Run a daemon of 512 MiB; yield its socket."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "h.sock")
        command = [str(Path(sys.executable).with_name("devipc")), "hicache", "serve", "--json", "--socket", path]
        with on_cores(placement.supervisor):
            process = subprocess.Popen([*command, "--tier-nbytes", "512MiB"], stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            json.loads(process.stdout.readline())
            move_children(process.pid, placement.scheduler)
            yield path
        finally:
            process.terminate()
            process.wait(30)
            process.stdout.close()


def echo(fd: int) -> None:
    """Send back whatever comes, until the parent leaves."""
    with socket.socket(fileno=fd) as bare:
        while data := bare.recv(4096):
            bare.send(data)


def write_always(path: str) -> None:
    """Back pages up until the parent closes the pipe to this process; print how many."""
    scheduler = Scheduler(path, load_backend("host").open_device(), Way.RINGS)
    count = 0
    print("begun", flush=True)
    while not select.select([0], [], [], 0)[0]:
        scheduler.backup(scheduler.keys(4))
        count += 4
    scheduler.close()
    print(count, flush=True)


def interleaved(calls: dict[str, Callable[[], object]], blocks: int) -> dict[str, list[float]]:
    """Return the seconds of each call of each kind; kinds take turns, a block each."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    clock = time.perf_counter
    for block in range(blocks + WARM):
        for name, call in calls.items():
            row = taken[name]
            for _ in range(BLOCK):
                begun = clock()
                call()
                row.append(clock() - begun)
            if block == WARM - 1:
                row.clear()
    return taken


def measure_calls(placement: Placement, rings: Scheduler, messages: Scheduler, blocks: int) -> dict[str, list[float]]:
    """Return seconds of: a bare round trip, a no-op over rings and over messages, a backup of one page."""
    bare, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = theirs.fileno()
    command = [sys.executable, "-m", "benchmarks.control", "--echo", str(fd)]
    with on_cores(placement.supervisor):
        process = subprocess.Popen(command, pass_fds=[fd], cwd=Path(__file__).resolve().parents[1])
    theirs.close()
    payload = bytes(NBYTES)
    prepared = iter([rings.keys(1) for _ in range((blocks + WARM) * BLOCK)])

    def bare_call() -> None:
        bare.send(payload)
        bare.recv(4096)

    with bare:
        found = interleaved(
            {
                "bare_seqpacket": bare_call,
                "no_op_rings": rings.client.ping,
                "no_op_messages": messages.client.ping,
                "backup_page": lambda: rings.backup(next(prepared)),
            },
            blocks,
        )
    process.wait(20)
    return found


def measure_matches(rings: Scheduler, path: str, repetitions: int) -> tuple[list[dict[str, Any]], int]:
    """Return a row for each number of keys, hits and misses, while another scheduler writes; and how much it wrote."""
    there = rings.keys(FOUND)
    for at in range(0, FOUND, 32):
        rings.backup(there[at : at + 32])
    absent = rings.keys(FOUND)
    writer = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.control", "--write", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[1],
    )
    assert writer.stdout is not None
    assert writer.stdin is not None
    writer.stdout.readline()
    rows = []
    for count in LIMIT_MATCH_US:
        for kind, source in (("hits", there), ("misses", absent)):
            taken, hits = [], 0
            for number in range(repetitions):
                at = number % (FOUND - count + 1)
                begun = time.perf_counter()
                hits += rings.client.match(rings.handle, source[at : at + count])
                taken.append(time.perf_counter() - begun)
            row = {"keys": count, "kind": kind, "hit_share": hits / (count * repetitions), "match": spread(taken)}
            rows.append(row)
            lease = rings.client.lookup(rings.handle, there)  # what is looked up is evicted last
            lease.reached(Event.LEASED, 10)
            rings.client.release(lease)
    writer.stdin.close()
    wrote = int(writer.stdout.readline())
    writer.wait(20)
    writer.stdout.close()
    return rows, wrote


def main() -> None:
    """Measure, or be one of the other processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--repetitions", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "control.json")
    parser.add_argument("--echo", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--write", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.echo is not None:
        echo(options.echo)
        return
    if options.write:
        write_always(options.write)
        return
    facts = machine()  # the load before this run
    device = load_backend("host").open_device()
    found = {one.name: measure(one, device, options.blocks, options.repetitions) for one in Placement.all()}
    device.close()
    print(f"load before {facts['load_1min']} on {facts['cores']} cores")
    write(options.out, {"machine": facts, "placements": found})


def measure(placement: Placement, device: Device, blocks: int, repetitions: int) -> dict[str, Any]:
    """Measure everything in one placement, print it, and return it JSON-ready."""
    with daemon(placement) as path, on_cores(placement.scheduler):
        rings, messages = (Scheduler(path, device, way) for way in (Way.RINGS, Way.MESSAGES))
        calls = {name: spread(row) for name, row in measure_calls(placement, rings, messages, blocks).items()}
        matches, wrote = measure_matches(rings, path, repetitions)
        rings.close()
        messages.close()
    bare, no_op = calls["bare_seqpacket"]["median_us"], calls["no_op_rings"]["median_us"]
    values = {
        "no_op_rings_over_bare": (round(no_op / bare, 2), LIMIT_RINGS),
        "no_op_messages_over_bare": (round(calls["no_op_messages"]["median_us"] / bare, 2), LIMIT_MESSAGES),
        "backup_page_above_no_op_us": (round(calls["backup_page"]["median_us"] - no_op, 1), LIMIT_BACKUP_US),
    }
    for row in matches:
        values[f"match_{row['keys']}_{row['kind']}_us"] = (row["match"]["median_us"], LIMIT_MATCH_US[row["keys"]])
    where = f"scheduler and engine on {set(placement.scheduler)}, supervisor on {set(placement.supervisor)}"
    print(f"{placement.name}: {where}")
    rows = [*calls.items(), *((f"match {row['keys']} {row['kind']}", row["match"]) for row in matches)]
    for name, row in rows:
        print(f"  {name:17} p50 {row['median_us']:7.1f} us  p99 {row['p99_us']:8.1f} us")
    for name, (value, limit) in values.items():
        print(f"  {name}: {value} of {limit}{'' if value <= limit else '  MISSED'}")
    print(f"  the writer stored {wrote} pages meanwhile", flush=True)
    limits = {name: {"value": value, "limit": limit, "kept": value <= limit} for name, (value, limit) in values.items()}
    return {"calls": calls, "match": matches, "written_pages": wrote, "limits": limits}


if __name__ == "__main__":
    main()
