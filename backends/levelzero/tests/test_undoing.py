"""What is undone when memory is not to be had, and what is said when that fails too, on the simulated driver."""

from __future__ import annotations

import _thread
import os
import threading
import time
from typing import Any

import pytest

from backends.testing.undoing import check_allocations, check_opens
from devipc.spi import DevIPCError

from .peers import Channel, peer, simulated

STATUSES = [999, 0x78000003, 0x78000004]
"""A status of no meaning, and those that say that something is not supported and that an argument is wrong."""


@pytest.mark.parametrize("status", STATUSES)
@simulated()
def test_what_stays_of_an_opening_is_said(status: int, device: Any, sim: Any) -> None:
    check_opens(device, "opaque", status=status)


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("kind", ["opaque", None])
@simulated()
def test_what_stays_of_an_allocation_is_said(kind: str | None, status: int, device: Any, sim: Any) -> None:
    check_allocations(kind, status=status)


@simulated()
def test_an_interrupt_frees_no_memory_that_is_being_filled(device: Any, sim: Any) -> None:
    device.memory.free(device.memory.allocate(1, zero=True))
    before = sim.report().counters
    sim.stall(True)
    timers = [threading.Timer(0.3, _thread.interrupt_main), threading.Timer(1.0, sim.stall, [False])]
    for timer in timers:
        timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        device.memory.allocate(1, zero=True)
    for timer in timers:
        timer.join()
    assert time.monotonic() - began > 0.9, "it did not wait for the fill"
    after = sim.report().counters
    assert not after["writes_of_freed"]
    assert all(after[name] == before[name] for name in ("live_allocations", "live_streams"))


@simulated()
def test_memory_that_may_still_be_filled_stays(device: Any, sim: Any) -> None:
    """Whoever cannot put a barrier behind the fill does not know when it is over."""
    with peer(fill_without_barrier) as other:
        assert other.channel.receive() == "done"
        other.channel.send()


def fill_without_barrier(device: Any, sim: Any, channel: Channel) -> None:
    device.memory.free(device.memory.allocate(1, zero=True))
    before = sim.counter("live_allocations")
    sim.stall(True)
    sim.inject("zeCommandListAppendBarrier@*=999")
    with pytest.raises(DevIPCError) as caught:
        device.memory.allocate(1, zero=True)
    (left,) = caught.value.left
    assert "zeCommandListAppendBarrier -> 999" in str(left)
    assert sim.counter("live_allocations") == before + 1
    sim.stall(False)
    time.sleep(0.2)
    assert not sim.counter("writes_of_freed")
    channel.send("done")
    channel.receive()
    os._exit(0)  # with what stays


@simulated()
def test_a_lost_device_fills_nothing_any_more(device: Any, sim: Any) -> None:
    device.memory.free(device.memory.allocate(1, zero=True))
    before = sim.counter("live_allocations")
    sim.inject("zeCommandListAppendBarrier@1=sticky:0x70000001")
    with pytest.raises(DevIPCError) as caught:
        device.memory.allocate(1, zero=True)
    assert (caught.value.left, sim.counter("live_allocations")) == ((), before)
