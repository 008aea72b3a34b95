"""Calls that hang, leak or meet a limit, and many at once."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from backends.testing.helpers import pattern, staging
from devipc.spi import CompletionTimeout, ResourceExhausted, call_with_deadline

from .peers import Channel, peer, simulated
from .test_memory import MIB, mirror, reflect


def open_around_a_hang(device: Any, sim: Any, channel: Channel) -> None:
    stuck, fine = channel.receive_extent(), channel.receive_extent()
    sim.inject("zeMemOpenIpcHandle@1=hang")
    began = time.monotonic()
    with pytest.raises(CompletionTimeout):
        call_with_deadline(lambda: device.memory.open(stuck), timeout_s=0.5, what="open", undo=device.memory.close)
    assert time.monotonic() - began < 5
    opened = device.memory.open(fine)
    with staging(device) as host:
        channel.send(host.read(opened.ptr, 4).decode())
    device.memory.close(opened)
    channel.send(len([fd for fd in os.listdir("/proc/self/fd") if int(fd) >= 64]))
    for extent in (stuck, fine):
        os.close(extent.fds[0])
    channel.receive()


@simulated()
def test_an_attach_that_never_returns_holds_up_no_other(device: Any, sim: Any) -> None:
    blocks = [device.memory.allocate(MIB) for _ in range(2)]
    extents = [device.memory.export(block.ptr, MIB) for block in blocks]
    with staging(device) as host, peer(open_around_a_hang) as other:
        host.write(blocks[1].ptr, b"fine")
        for extent in extents:
            other.channel.send_extent(extent)
        assert other.channel.receive() == "fine"
        assert other.channel.receive() == 1  # the duplicate that the hanging call was given
        other.kill()
        other.finish = lambda: None  # type: ignore[method-assign]
    for extent, block in zip(extents, blocks, strict=True):
        device.memory.release(extent)
        device.memory.free(block)


def open_many_times(device: Any, sim: Any, channel: Channel) -> None:
    extent = channel.receive_extent()
    kept = device.memory.open(extent)
    for _ in range(1000):
        device.memory.close(device.memory.open(extent))
    channel.send(sim.counter("leaked"))
    device.memory.close(kept)
    os.close(extent.fds[0])
    os._exit(0)  # the descriptor that the driver leaked stays


@simulated()
def test_an_open_that_leaks_a_descriptor(device: Any, sim: Any) -> None:
    """One allocation is opened once, however many want it."""
    block = device.memory.allocate(MIB)
    extent = device.memory.export(block.ptr, MIB)
    with peer(open_many_times, {**os.environ, "DEVSIM_LEAK_OPEN": "1"}) as other:
        other.channel.send_extent(extent)
        assert other.channel.receive() == 1
    device.memory.release(extent)
    device.memory.free(block)


@simulated(event_limit=64)
def test_a_limit_on_events_is_named(device: Any, sim: Any) -> None:
    made = [device.sync.events.create() for _ in range(64)]
    with pytest.raises(ResourceExhausted):
        device.sync.events.create()
    for event in made:
        device.sync.events.destroy(event)
    device.sync.events.destroy(device.sync.events.create())


@simulated()
def test_concurrent_gets_and_opens(device: Any, sim: Any) -> None:
    block = device.memory.allocate(MIB)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(30):
                extent = device.memory.export(block.ptr, 4096)
                device.memory.close(device.memory.open(extent))
                device.memory.release(extent)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    device.memory.free(block)


@simulated()
def test_many_allocations_at_once(device: Any, sim: Any) -> None:
    """A pool in a hundred parts through one peer, each at its own bytes."""
    blocks = [device.memory.allocate(MIB) for _ in range(20)]
    with staging(device) as host, peer(mirror) as other:
        for seed, block in enumerate(blocks):
            reflect(device, other, host, block.ptr, 4096, seed)
        other.channel.send("end")
        assert host.read(blocks[3].ptr, 16) == pattern(4, 4096)[:16]
    for block in blocks:
        device.memory.free(block)
