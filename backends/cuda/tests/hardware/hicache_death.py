"""Deaths around the cache: who is released when, what comes back, and what the device gets back.

An engine and a daemon with 20 GiB of pinned host memory are killed while a stream of a scheduler waits for a restore;
a scheduler is killed while its pages move.
``python -m backends.cuda.tests.hardware.hicache_death --out FILE``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from devipc.bench.pools import GEOMETRIES, Geometry, Pinned
from devipc.errors import DevIPCError, FencePoisoned
from devipc.hicache.api import UNFENCED
from devipc.hicache.daemon.admin import ask_status
from devipc.hicache.operations import Event

from . import evidence, holding
from . import hicache_latency as latency
from .evidence import MIB, SIMULATED, busy_nbytes

_engine: Any = importlib.import_module("tests.hicache.engine_with_faults")
HOLD: str = importlib.import_module("tests.hicache.holding").HOLD
TIER_NBYTES = 16 * MIB if SIMULATED else 20 * 2**30
POOL_TOKENS = 1024 if SIMULATED else 32 * 1024
MOVED_TOKENS = 256 if SIMULATED else 4096
RELEASED_MS, ATTACHED_S, BACK_S = 100.0, 2.0, 1.0
PAGE_TOKENS = 16
LONG_S = 60.0


def soon(condition: Callable[[], object], timeout_s: float = LONG_S) -> float:
    """Wait for something; return when it was seen, in monotonic seconds."""
    assert evidence.until(condition, timeout_s), "did not happen in time"
    return time.monotonic()


@contextlib.contextmanager
def daemon(folder: str, tier_nbytes: int) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """A daemon whose engine can be held back."""
    chosen = {_engine.FOLDER: folder, HOLD: holding.__name__}
    os.environ.update(chosen)
    try:
        with latency.daemon(folder, "--tier-nbytes", str(tier_nbytes), "--engine-module", _engine.MODULE) as found:
            yield found
    finally:
        for name in chosen:
            os.environ.pop(name, None)


class Scene:
    """A scheduler in this process, 256 tokens of it in the host tier, and a stream that waits for them to come back."""

    def __init__(self, device: Any, path: str, folder: str, engine_pid: int) -> None:
        self.device, self.path = device, path
        self.side = latency.Side(device, path, "layers", tokens=8 * latency.TOKENS, page_tokens=PAGE_TOKENS)
        self.pinned = Pinned(device, 64 * MIB)
        self.side.pool.fill(self.pinned, 7)
        self.stream = device.transfer.create_stream()
        self.marker = device.transfer.create_marker()
        self.source = np.arange(1, 1 + self.side.count)
        self.target = self.source + 2 * self.side.count
        self.content = self.side.pool.read(self.source, self.pinned)
        self.keys = self.side.keys(1)
        self.store()
        with _engine.Faults(folder, engine_pid) as faults:
            faults.stall("restore")
        self.ticket = self.restore()
        assert self.ticket.reached(Event.ADMITTED, LONG_S)
        assert self.ticket.fence is not None
        self.ticket.fence.wait(self.stream, timeout_s=LONG_S)
        device.transfer.record(self.marker, self.stream)
        time.sleep(0.2)
        assert not self.released(), "the stream does not wait"

    def store(self) -> None:
        self.side.client.backup(self.side.handle, self.source, self.keys, ready=UNFENCED).result(LONG_S)

    def restore(self) -> Any:
        return self.side.client.restore(self.side.handle, self.keys, self.target, ready=UNFENCED)

    def released(self) -> bool:
        return bool(self.device.transfer.query_marker(self.marker))

    def degraded(self) -> bool:
        return bool(self.side.client.status()["degraded"])

    def watch(self, kill: Callable[[], object]) -> dict[str, Any]:
        """Kill, and note what the scheduler sees, in milliseconds."""
        began = time.monotonic()
        kill()
        found: dict[str, Any] = {"stream released, ms": (soon(self.released) - began) * 1e3}
        assert self.ticket.fence is not None
        try:
            self.ticket.fence.synchronize(timeout_s=LONG_S)
            found["the fence says"] = "reached"
        except FencePoisoned as error:
            found["the fence says"] = f"poisoned: {error.code}"
        found["fence told, ms"] = (time.monotonic() - began) * 1e3
        found["pages free again, ms"] = 0.0
        found["restore ended as"] = self.ticket.wait(LONG_S).status.value
        found["pages free again, ms"] = (time.monotonic() - began) * 1e3
        return found

    def check_restored(self) -> None:
        """Pages of the tier come to poisoned pages, and are what they were."""
        self.poison()
        self.restore().result(LONG_S)
        assert np.array_equal(self.side.pool.read(self.target, self.pinned), self.content), "wrong bytes"

    def poison(self) -> None:
        device, _, nbytes = self.side.pool.pieces(self.target, 0)
        self.pinned.bytes[: int(nbytes.max())] = 0xEE
        source = np.full(len(device), self.pinned.ptr, np.uint64)
        self.device.transfer.copy_batch(self.pinned.stream, device, source, nbytes)
        self.device.transfer.synchronize_stream(self.pinned.stream)

    def close(self) -> None:
        self.side.close()
        self.device.transfer.destroy_marker(self.marker)
        self.device.transfer.destroy_stream(self.stream)
        self.pinned.close()


def serving(path: str, starts: int) -> bool:
    try:
        status = ask_status(path, timeout_s=5.0)
    except DevIPCError:
        return False
    return bool(status["state"] == "running" and status["engine"]["starts"] == starts)


def engine_killed(device: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hd") as folder, daemon(folder, TIER_NBYTES) as (path, ready, _process):
        scene = Scene(device, path, folder, ready["engine_pid"])
        began = time.monotonic()
        found = scene.watch(lambda: os.kill(ready["engine_pid"], signal.SIGKILL))
        back = soon(lambda: serving(path, 2))
        attached = soon(lambda: not scene.degraded())
        found |= {"next engine serves, s": back - began, "attached after that, s": attached - back}
        scene.check_restored()  # the tier has stayed
        scene.close()
    return judged(found, {"tier": TIER_NBYTES, "pinned": ready["pinned"]})


def daemon_killed(device: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hd") as folder:
        with daemon(folder, TIER_NBYTES) as (path, ready, process):
            scene = Scene(device, path, folder, ready["engine_pid"])
            found = scene.watch(process.kill)
            process.wait()
        began = time.monotonic()
        with daemon(folder, TIER_NBYTES) as (path, ready, _process):
            back = time.monotonic()
            attached = soon(lambda: not scene.degraded())
            found |= {"next daemon ready, s": back - began, "attached after that, s": attached - back}
            scene.store()  # another tier
            scene.check_restored()
            scene.close()
    return judged(found, {"tier": TIER_NBYTES, "pinned": ready["pinned"]})


def judged(found: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}
    print(json.dumps(rounded), flush=True)
    assert found["stream released, ms"] <= RELEASED_MS, rounded
    assert found["attached after that, s"] <= ATTACHED_S, rounded
    return {**facts, **rounded}


def move(path: str, rounds: int) -> None:
    """Be a scheduler that backs up and restores, without end for 0 rounds; say so when the first are under way."""
    device = evidence.open_device()
    latency.TOKENS = MOVED_TOKENS
    side = latency.Side(device, path, "layers", tokens=POOL_TOKENS, page_tokens=PAGE_TOKENS)
    pages = np.arange(1, 1 + side.count)
    side.client.backup(side.handle, pages, side.keys(0), ready=UNFENCED).result(LONG_S)
    seed, tickets = 1, []
    while not (rounds and seed > rounds):
        tickets.append(side.client.backup(side.handle, pages, side.keys(seed), ready=UNFENCED))
        tickets.append(side.client.restore(side.handle, side.keys(0), pages + side.count, ready=UNFENCED))
        seed += 1
        if seed == 4:
            print(side.pool.page_nbytes * side.pool.page_count, flush=True)
        if len(tickets) > 8:
            tickets.pop(0).wait(LONG_S)
    for ticket in tickets:
        ticket.wait(LONG_S)
    side.close()
    device.close()


def scheduler_killed(device: Any) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="hd") as folder,
        daemon(folder, 32 * MIB if SIMULATED else 4 * 2**30) as (path, _, _process),
    ):
        command = [sys.executable, "-m", f"{__package__}.hicache_death", "--move", path]
        # One that leaves in good order goes first: what the engine's driver takes for a first use stays with it.
        subprocess.run([*command, "6"], stdout=subprocess.DEVNULL, timeout=LONG_S, check=True)
        before = busy_nbytes(device)
        process = subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            pool_nbytes = int(process.stdout.readline())
            time.sleep(0.05)
            busy, status = busy_nbytes(device), ask_status(path, timeout_s=5.0)
            pidfd = os.pidfd_open(process.pid)
            began = time.monotonic()
            process.kill()
            importlib.import_module("select").select([pidfd], [], [])
            gone = time.monotonic()
            os.close(pidfd)
            let_go = soon(lambda: not ask_status(path, timeout_s=5.0)["clients"])
            back = soon(lambda: busy_nbytes(device) <= before)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        after = ask_status(path, timeout_s=5.0)
    found = {
        "pool": pool_nbytes,
        "device memory in use more": busy - before,
        "under way": status["operations"],
        "pidfd after the kill, s": round(gone - began, 3),
        "mappings closed after the pidfd, s": round(let_go - gone, 3),
        "device memory back after the pidfd, s": round(back - gone, 3),
        "engine starts": after["engine"]["starts"],
        "holds": after["tier"]["holds"],
        "reservations": after["tier"]["reservations"],
    }
    print(json.dumps(found), flush=True)
    assert status["operations"], "nothing moved"
    assert max(let_go, back) - gone <= BACK_S, found
    assert (found["engine starts"], found["holds"], found["reservations"]) == (1, 0, 0), found
    return found


def sections(device: Any) -> Sequence[evidence.Section]:
    if SIMULATED:
        latency.GEOMETRY = Geometry(2, 2, 64)
    assert GEOMETRIES
    return [
        ("engine killed, a stream waits", partial(engine_killed, device)),
        ("daemon killed, a stream waits", partial(daemon_killed, device)),
        ("scheduler killed in mid-transfer", partial(scheduler_killed, device)),
    ]


if __name__ == "__main__":
    if sys.argv[1] == "--move":
        move(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(evidence.main(str(__doc__), sections))
