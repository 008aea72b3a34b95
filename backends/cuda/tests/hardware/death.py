"""A process is killed while it shares device memory or fences: what its peer sees, and when.

Late writes: a child that imported our buffer has queued copies into it when SIGKILL comes; the moments at which its
socket hung up, its robust mutex told "dying" and its pidfd "gone", and how many bytes landed after each. Exporter
killed: its memory stays readable through our mapping, charged until we close it. Producer killed: a stream of ours
that waits for its fence is released by poison. ``python -m backends.cuda.tests.hardware.death --out FILE``.
"""

from __future__ import annotations

import importlib
import os
import select
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from backends.testing.ends import exporter, importer
from backends.testing.helpers import staging
from devipc.spi import HandleKind

from ..peers import Channel, Peer
from . import evidence
from .ends import Clock, hold_stream, sleep_until_killed, victims
from .evidence import MIB, SIMULATED, busy_nbytes, quantiles, until

np: Any = importlib.import_module("numpy")

GIB = 2**30
ROUNDS = 2 if SIMULATED else 20
PINNED_NBYTES = 16 * MIB if SIMULATED else 4 * GIB
SLOT_NBYTES = 64 * 1024 if SIMULATED else MIB
SLOTS = 512 if SIMULATED else 4096
SOURCE_NBYTES = 4 * MIB if SIMULATED else 64 * MIB
QUIET_S = 1.2
RELEASE_LIMIT_MS = 1000.0 if SIMULATED else 100.0
WORD = 4096


# --- late writes ---


def late_writer(device: Any, channel: Channel, sim: Any) -> None:
    """Import the target, queue one copy into each slot, in order, and wait to be killed."""
    path, name, pinned = channel.receive()
    with staging(device, max(pinned, SOURCE_NBYTES)) as host, importer(device, path) as session:
        host.view[:SOURCE_NBYTES] = b"\xa5" * SOURCE_NBYTES
        target = session.open(name).ptr
        channel.send("ready")
        channel.receive()
        for slot in range(SLOTS):
            source = host.device_ptr + slot * SLOT_NBYTES % SOURCE_NBYTES
            host.transfer.copy(host.stream, target + slot * SLOT_NBYTES, source, SLOT_NBYTES)
        sleep_until_killed(channel)


class Sampler:
    """Looks at the first word of every slot, again and again, by one strided copy."""

    def __init__(self, host: Any, ptr: int) -> None:
        self._host = host
        self._ptr = ptr
        self._rows = np.array([(host.device_ptr, ptr, 8, SLOT_NBYTES, 8, SLOTS)], dtype=np.uint64)
        self.samples: list[tuple[float, float, int]] = []

    def look(self) -> int:
        """Return how many slots have been written, and remember between which moments that was seen."""
        began = time.perf_counter()
        self._host.transfer.copy_strided(self._host.stream, self._rows)
        self._host.transfer.synchronize_stream(self._host.stream)
        ended = time.perf_counter()
        written = int(np.count_nonzero(np.frombuffer(self._host.view[: 8 * SLOTS], dtype=np.uint64)))
        self.samples.append((began, ended, written))
        return written

    def around(self, slot: int) -> bytes:
        """Every byte of the slots beside ``slot``."""
        first = max(0, slot - 2) * SLOT_NBYTES
        return bytes(self._host.read(self._ptr + first, min(SLOTS * SLOT_NBYTES - first, 5 * SLOT_NBYTES)))

    def landed_after(self, moment: float) -> int:
        """Bytes that certainly landed later than ``moment``: those that the first look begun after it did not see."""
        last = self.samples[-1][2]
        return (last - next((n for began, _, n in self.samples if began >= moment), last)) * SLOT_NBYTES

    def last_change(self) -> float:
        """When the last new slot was seen."""
        final = self.samples[-1][2]
        return next(ended for _, ended, written in self.samples if written == final)


def late_writes(device: Any, pinned: int) -> dict[str, Any]:
    rounds = []
    nbytes = SLOTS * SLOT_NBYTES
    with exporter(device) as session, staging(device, 16 * MIB) as host:
        orders = [(session.path, f"target.{n}", pinned) for n in range(ROUNDS)]
        targets = [session.allocate(nbytes, kind=HandleKind.VMM_FD, zero=True) for _ in range(ROUNDS)]
        for n, target in enumerate(targets):
            session.share(f"target.{n}", target)
        with victims(late_writer, orders) as children:
            for (child, _), target in zip(children, targets, strict=False):
                rounds.append(late_round(session, host, child, target.ptr))
    return {
        "pinned by the victim": pinned,
        "hang-up, ms": quantiles([r["hang-up, ms"] for r in rounds]),
        "dying, ms": quantiles([r["dying, ms"] for r in rounds]),
        "pidfd, ms": quantiles([r["pidfd, ms"] for r in rounds]),
        "last late write seen, ms": quantiles([r["last write seen, ms"] for r in rounds]),
        "MB landed after hang-up": quantiles([r["landed after hang-up"] / 1e6 for r in rounds]),
        "MB landed after dying": quantiles([r["landed after dying"] / 1e6 for r in rounds]),
        "rounds with bytes after hang-up": sum(r["landed after hang-up"] > 0 for r in rounds),
        "rounds with bytes after pidfd": sum(r["landed after pidfd"] > 0 for r in rounds),
        "rounds": rounds,
    }


def late_round(session: Any, host: Any, child: Peer, ptr: int) -> dict[str, Any]:
    clock, sampler = Clock(), Sampler(host, ptr)
    clock.on_state(session)
    pidfd = os.pidfd_open(child.process.pid)
    try:
        clock.when("hang-up", child.channel._socket.fileno(), select.POLLHUP | select.POLLRDHUP)
        clock.when("pidfd", pidfd)
        child.channel.send("go")
        assert until(lambda: sampler.look() >= SLOTS // 10, 30.0), "the child copies nothing"
        clock.kill(child.process)
        assert until(lambda: (sampler.look(), "pidfd" in clock.at)[1], 30.0), "the child does not end"
        written = sampler.look()
        frontier = sampler.around(written)
        until(lambda: sampler.look() != written, QUIET_S, pause_s=0.005)
        assert sampler.around(written) == frontier, "bytes landed after the pidfd told the end"
    finally:
        child.process.kill()
        clock.join()
        os.close(pidfd)
    child.process.wait()
    assert until(lambda: "gone" in clock.at, 10.0), "the session did not tell the end"
    at = clock.at
    result: dict[str, Any] = {f"{name}, ms": clock.ms(name) for name in ("hang-up", "dying", "pidfd", "gone")}
    result["last write seen, ms"] = round((sampler.last_change() - at["kill"]) * 1e3, 3)
    result["one look, ms"] = round(sorted(e - b for b, e, _ in sampler.samples)[len(sampler.samples) // 2] * 1e3, 3)
    for name in ("kill", "hang-up", "dying", "pidfd"):
        result[f"landed after {name}"] = sampler.landed_after(at[name])
    result["written in all"] = sampler.samples[-1][2] * SLOT_NBYTES
    assert result["landed after pidfd"] == 0
    assert result["written in all"] < SLOTS * SLOT_NBYTES, "all copies were over before the kill: nothing was shown"
    return result


# --- an exporter dies ---


def die_holding(device: Any, channel: Channel, sim: Any) -> None:
    kind, nbytes = channel.receive()
    block = device.memory.allocate(nbytes, kind=HandleKind(kind))
    with staging(device) as host:
        host.write(block.ptr + 5, b"last words")
    channel.send_extent(device.memory.export(block.ptr, nbytes))
    sleep_until_killed(channel)


def dead_exporter(device: Any, kind: str) -> dict[str, Any]:
    """The exporter is killed while its memory is mapped here: readable, writable, charged, given back once closed."""
    nbytes = 64 * MIB if SIMULATED else GIB
    rounds = []
    for _ in range(min(ROUNDS, 5)):
        before = busy_nbytes(device)
        child = Peer(die_holding)
        child.channel.send([kind, nbytes])
        extent = child.channel.receive_extent()
        opened = device.memory.open(extent)
        device.memory.release(extent)
        child.kill()
        child.channel.close()
        with staging(device) as host:
            assert host.read(opened.ptr + 5, 10) == b"last words"
            host.write(opened.ptr + nbytes - 9, b"survivor")
            assert host.read(opened.ptr + nbytes - 9, 8) == b"survivor"
        until(lambda: busy_nbytes(device) <= before + nbytes + 2 * MIB, 3.0, pause_s=0.01)  # noqa: B023
        held = busy_nbytes(device) - before
        device.memory.close(opened)
        until(lambda: busy_nbytes(device) <= before, 3.0, pause_s=0.01)  # noqa: B023
        rounds.append((held, busy_nbytes(device) - before))
    held_nbytes, left = [held for held, _ in rounds], [left for _, left in rounds]
    assert min(held_nbytes) >= nbytes, "nothing is charged for a mapping"
    assert max(left) <= 0, f"not given back after the close: {left}"
    return {"allocation": nbytes, "charged while mapped": quantiles(held_nbytes), "left after close": quantiles(left)}


# --- a producer dies ---


def mute_producer(device: Any, channel: Channel, sim: Any) -> None:
    """Signal a fence behind work that never ends."""
    strategy, pinned = channel.receive()
    with staging(device, max(pinned, MIB)) as host, exporter(device) as session:
        fence = session.create_fence("f", strategy=strategy)
        hold_stream(device, host, WORD)
        fence.signal(host.stream, 1)
        channel.send(session.path)
        sleep_until_killed(channel)


def killed_producer(device: Any, strategy: str, pinned: int, count: int) -> dict[str, Any]:
    rounds = []
    with victims(mute_producer, [(strategy, pinned)] * count) as children:
        rounds = [release_round(device, child, path) for child, path in children]
    names = ("dying", "released", "gone")
    summary: dict[str, Any] = {f"{name}, ms": quantiles([r[name] for r in rounds], 3) for name in names}
    assert max(r["released"] for r in rounds) <= RELEASE_LIMIT_MS, summary
    return {"pinned by the victim": pinned, **summary, "rounds": rounds}


def release_round(device: Any, child: Peer, path: str) -> dict[str, float]:
    errors = importlib.import_module("devipc.errors")
    transfer, clock = device.transfer, Clock()
    stream, marker = transfer.create_stream(), transfer.create_marker()
    with importer(device, path) as session:
        clock.on_state(session)
        fence = session.open_fence("f")
        assert not fence.query(1)
        if fence.waits_on_device:
            fence.wait(stream, 1)
            transfer.record(marker, stream)
            assert not transfer.query_marker(marker)
            clock.kill(child.process)
            assert until(lambda: transfer.query_marker(marker), 30.0), "the stream is not released"
            clock.note("released")
        else:
            clock.kill(child.process)
        with pytest.raises(errors.FencePoisoned) as failed:
            fence.synchronize(1, 30.0)
        clock.note("released")
        assert failed.value.code == "peer_died"
        child.process.wait()
        assert until(lambda: "gone" in clock.at, 30.0)
        transfer.synchronize_stream(stream)
        fence.close()
    transfer.destroy_marker(marker)
    transfer.destroy_stream(stream)
    return {name: clock.ms(name) for name in ("dying", "released", "gone")}


def sections(device: Any) -> Sequence[evidence.Section]:
    few = min(ROUNDS, 5)
    return [
        *((f"late writes, {p // MIB} MiB pinned", partial(late_writes, device, p)) for p in (0, PINNED_NBYTES)),
        *((f"dead exporter, {kind}", partial(dead_exporter, device, kind)) for kind in ("vmm_fd", "legacy", "pool")),
        *(
            (f"stream_memop, {p // MIB} MiB pinned", partial(killed_producer, device, "stream_memop", p, ROUNDS))
            for p in (0, PINNED_NBYTES)
        ),
        *(
            (f"{strategy}, host waits", partial(killed_producer, device, strategy, 0, few))
            for strategy in ("host_flag", "polling", "event")
        ),
    ]


if __name__ == "__main__":
    sys.exit(evidence.main(str(__doc__), sections))
