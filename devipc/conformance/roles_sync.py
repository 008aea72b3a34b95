"""Roles of peers that signal fences and follow them.

Owns what a peer does on request. A peer's waits have deadlines of their own; work that is held back by a latch stays
so until ``open_latch`` or the end of the peer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from devipc.completion import (
    ConsumerFence,
    ProducerFence,
    create_fence,
    decode_fence_handle,
    encode_fence_handle,
    open_fence,
)
from devipc.conformance.rig import Latch
from devipc.conformance.staging import Staging, compare, content, until
from devipc.conformance.worker import Reply, Worker, role
from devipc.errors import CompletionTimeout, DevIPCError, FencePoisoned
from devipc.interfaces.transfer import Stream
from devipc.spi import close_fds
from devipc.types import Strategy
from devipc.wire import Reader

__all__ = [
    "bogus_events",
    "close_fence",
    "collect",
    "copy_after",
    "drop",
    "finish_stream",
    "follow",
    "follow_fence",
    "hand_back",
    "hold",
    "make_fence",
    "open_event",
    "query",
    "query_event",
    "signal",
    "signal_imported",
    "synchronize",
    "wait_briefly",
    "wait_on_device",
]

Fds = tuple[int, ...]
Body = dict[str, Any]


def fence_of(worker: Worker, key: int) -> Any:
    """Return a kept fence; typed loosely because both roles are kept."""
    fence = worker.get(key)
    assert isinstance(fence, ProducerFence | ConsumerFence)
    return fence


# --- producing ------------------------------------------------------------------------------------------------------


@role
def make_fence(worker: Worker, fds: Fds, strategy: str) -> Reply:
    """Make a fence and export it once."""
    fence = create_fence(worker.rig.device, Strategy(strategy))
    key = worker.keep(fence, lambda: fence.close(0.5))
    handle = fence.export()
    worker.keep(handle, lambda: close_fds(handle.fds))
    return Reply({"key": key, "handle": encode_fence_handle(handle).hex()}, handle.fds)


@role
def signal(worker: Worker, fds: Fds, key: int, value: int) -> None:
    """Signal behind the work of the rig's stream."""
    fence_of(worker, key).signal(worker.rig.stream, value)


@role
def hold(worker: Worker, fds: Fds) -> Body:
    """Put a latch on the rig's stream."""
    latch = Latch(worker.rig, worker.rig.stream)
    return {"key": worker.keep(latch, latch.close)}


@role
def close_fence(worker: Worker, fds: Fds, key: int) -> None:
    """Close a fence without waiting long for its consumers."""
    worker.drop(key)


# --- following ------------------------------------------------------------------------------------------------------


@role
def follow_fence(worker: Worker, fds: Fds, handle: str) -> Body:
    """Open a fence and keep it."""
    fence = open_fence(worker.rig.device, decode_fence_handle(Reader(bytes.fromhex(handle)), fds))
    return {"key": worker.keep(fence, lambda: fence.close(0.5))}


@role
def query(worker: Worker, fds: Fds, key: int, value: int) -> Body:
    """Ask whether a value is reached."""
    fence = fence_of(worker, key)
    return {"done": fence.query(value), "issued": fence.issued}


@role
def synchronize(worker: Worker, fds: Fds, key: int, value: int, limit_s: float) -> Body:
    """Block until a value is reached; return how long that took."""
    started = time.monotonic()
    fence_of(worker, key).synchronize(value, limit_s)
    return {"seconds": time.monotonic() - started}


@role
def wait_briefly(worker: Worker, fds: Fds, key: int, value: int, limit_s: float) -> Body:
    """Block until a value is reached or the time is over; return which it was."""
    try:
        fence_of(worker, key).synchronize(value, limit_s)
    except CompletionTimeout:
        return {"reached": False}
    return {"reached": True}


@role
def signal_imported(worker: Worker, fds: Fds, key: int) -> None:
    """Try to signal a fence that another process made."""
    fence_of(worker, key).signal(worker.rig.stream, 1)


@role
def follow(worker: Worker, fds: Fds, key: int, last: int) -> Body:
    """Look until ``last`` is reached; return every new value seen."""
    fence = fence_of(worker, key)
    seen: list[int] = []

    def look() -> bool:
        value = fence.value
        if not seen or value != seen[-1]:
            seen.append(value)
        return bool(value >= last)

    if not until(look, worker.deadline_s, pause_s=0.0002):
        raise AssertionError(f"{last} was not seen within {worker.deadline_s:g} s, only {seen[-5:]}")
    return {"seen": seen}


# --- waiting on a stream, then using memory -------------------------------------------------------------------------


@dataclass(slots=True)
class Pending:
    """A copy that was put behind a wait."""

    stream: Stream
    staging: Staging
    nbytes: int
    fence: ConsumerFence
    value: int


@role
def copy_after(worker: Worker, fds: Fds, key: int, value: int, mapping: int, nbytes: int) -> Body:
    """Let a stream wait for a value and then copy from a mapping; does not wait for the copy."""
    rig = worker.rig
    fence = fence_of(worker, key)
    stream = rig.transfer.create_stream()
    staging = Staging(rig.transfer, nbytes)
    pending = Pending(stream, staging, nbytes, fence, value)

    def undo() -> None:
        rig.transfer.destroy_stream(stream)
        staging.close()

    kept = worker.keep(pending, undo)
    fence.wait(stream, value, timeout_s=worker.deadline_s, block_timeout_s=worker.deadline_s)
    rig.transfer.copy(stream, staging.ptr, worker.get(mapping).ptr, nbytes)
    return {"key": kept}


@role
def collect(worker: Worker, fds: Fds, key: int, seed: int) -> None:
    """Wait for such a copy and compare."""
    pending = worker.get(key)
    worker.rig.finish(pending.stream, "a copy behind a fence")
    compare(bytes(pending.staging.view[: pending.nbytes]), content(seed, pending.nbytes), "a copy behind a fence")
    worker.drop(key)


@role
def wait_on_device(worker: Worker, fds: Fds, key: int, value: int) -> Body:
    """Put a wait on the rig's stream, where fences of this strategy wait on the device; returns at once."""
    fence = fence_of(worker, key)
    if fence.waits_on_device:
        fence.wait(worker.rig.stream, value)
    return {"on_device": fence.waits_on_device}


@role
def finish_stream(worker: Worker, fds: Fds, key: int, value: int) -> Body:
    """Wait for the rig's stream, and say how the fence failed."""
    worker.rig.finish(worker.rig.stream, "a stream that waited for a poisoned fence")
    try:
        fence_of(worker, key).synchronize(value, worker.deadline_s)
    except FencePoisoned as error:
        return {"code": error.code}
    raise AssertionError("the fence of a dead process was reached")


@role
def hand_back(worker: Worker, fds: Fds, keys: list[int], nbytes: int, rounds: int) -> None:
    """Use memory in turns: wait for one fence, copy round ``n`` out, signal the other; compare at the end.

    ``keys`` are those of the fence to wait for, the fence to signal, and the mapping.
    """
    rig = worker.rig
    going, coming, mapping = fence_of(worker, keys[0]), fence_of(worker, keys[1]), worker.get(keys[2])
    with rig.new_staging(nbytes * rounds) as staging:
        for n in range(1, rounds + 1):
            going.wait(rig.stream, n, timeout_s=worker.deadline_s, block_timeout_s=worker.deadline_s)
            rig.transfer.copy(rig.stream, staging.ptr + (n - 1) * nbytes, mapping.ptr, nbytes)
            coming.signal(rig.stream, n)
        rig.finish(rig.stream, "the last round")
        for n in range(1, rounds + 1):
            found = bytes(staging.view[(n - 1) * nbytes : n * nbytes])
            compare(found, content(n, nbytes), f"round {n}")


# --- events ---------------------------------------------------------------------------------------------------------


@role
def open_event(worker: Worker, fds: Fds, payload: str) -> Body:
    """Open an event and keep it."""
    events = worker.rig.events
    event = events.open(bytes.fromhex(payload))
    return {"key": worker.keep(event, lambda: events.destroy(event))}


@role
def query_event(worker: Worker, fds: Fds, key: int) -> Body:
    """Ask an event."""
    events = worker.rig.events
    return {"done": events.query(worker.get(key))}


@role
def bogus_events(worker: Worker, fds: Fds, payloads: list[str]) -> Body:
    """Open event handles that are made up; return those that were accepted."""
    events = worker.rig.events
    accepted = []
    for payload in payloads:
        try:
            event = events.open(bytes.fromhex(payload))
        except DevIPCError:
            continue
        accepted.append(payload)
        events.destroy(event)
    return {"accepted": accepted}


@role
def drop(worker: Worker, fds: Fds, key: int) -> None:
    """Give back a kept thing."""
    worker.drop(key)
