"""Extents of several allocations in one reserved range: one copy over all, each closed on its own, all or none."""

from __future__ import annotations

import importlib
import os
from itertools import pairwise
from typing import Any

import pytest

from backends.testing.helpers import staging
from devipc.spi import CapabilityError, DevIPCError, HandleKind, Verdict, close_fds

from .peers import Channel, peer, simulated

np: Any = importlib.import_module("numpy")

BLOCK = 2 * 2**20
COUNT = 6
STEPS = ("cuMemImportFromShareableHandle@4", "cuMemAddressReserve@1", "cuMemMap@1", "cuMemMap@5", "cuMemSetAccess@1")


def span_all(device: Any, sim: Any, channel: Channel) -> None:
    memory = device.memory
    extents = [channel.receive_extent() for _ in range(COUNT)]
    opened = memory.open_side_by_side(extents)
    assert len({one.region for one in opened}) == 1
    assert opened[0].region
    assert {b.ptr - a.ptr for a, b in pairwise(opened)} == {2 * BLOCK}
    assert sim.counter("live_reservations") == 1
    with staging(device) as host:
        calls = sim.calls("cuMemcpy2DAsync")
        copy = (host.device_ptr, opened[0].ptr + 4096, 64, 2 * BLOCK, 64, COUNT)
        host.transfer.copy_strided(host.stream, np.array([copy], np.uint64))
        host.transfer.synchronize_stream(host.stream)
        assert sim.calls("cuMemcpy2DAsync") == calls + 1
        assert bytes(host.view[: 64 * COUNT]) == b"".join(bytes([number + 1]) * 64 for number in range(COUNT))
        for number in (2, 0, 5, 1, 4):
            memory.close(opened[number])
            assert sim.counter("live_reservations") == 1
        assert host.read(opened[3].ptr, 4) == b"\x04" * 4
    memory.close(opened[3])
    assert (sim.counter("live_reservations"), sim.counter("live_maps")) == (0, 0)
    for extent in extents:
        close_fds(extent.fds)


def fail_at_every_step(device: Any, sim: Any, channel: Channel) -> None:
    extents = [channel.receive_extent() for _ in range(COUNT)]
    device.memory.describe(4096)  # makes the device's own stream, which stays
    live = sim.report().counters
    fds = len(os.listdir("/proc/self/fd"))
    for step in STEPS:
        sim.inject(f"{step}=2")
        with pytest.raises(DevIPCError) as caught:
            device.memory.open_side_by_side(extents)
        assert caught.value.status is not None
        assert caught.value.status.call == step.partition("@")[0]
        after = sim.report().counters
        names = [name for name in live if name.startswith("live_")]
        assert {name: after[name] for name in names} == {name: live[name] for name in names}
        assert len(os.listdir("/proc/self/fd")) == fds
        sim.clear_faults()
    for extent in extents:
        close_fds(extent.fds)


@pytest.mark.parametrize("role", ["span_all", "fail_at_every_step"])
@simulated()
def test_allocations_of_a_peer_form_one_range(role: str, device: Any, sim: Any) -> None:
    blocks = [device.memory.allocate(2 * BLOCK, kind=HandleKind.VMM_FD) for _ in range(COUNT)]
    extents = [device.memory.export(block.ptr, block.nbytes) for block in blocks]
    with staging(device) as host:
        for number, block in enumerate(blocks):
            host.write(block.ptr, bytes([number + 1]) * 8192)
    with peer({"span_all": span_all, "fail_at_every_step": fail_at_every_step}[role]) as other:
        for extent in extents:
            other.channel.send_extent(extent)
    for extent, block in zip(extents, blocks, strict=True):
        device.memory.release(extent)
        device.memory.free(block)


@simulated()
def test_kinds_that_the_driver_places_say_why(device: Any, sim: Any) -> None:
    assert device.memory.side_by_side(HandleKind.VMM_FD).verdict is Verdict.UNTESTED
    assert device.memory.open_side_by_side([]) == ()
    block = device.memory.allocate(BLOCK, kind=HandleKind.LEGACY)
    extent = device.memory.export(block.ptr, BLOCK)
    calls = sim.calls("cuIpcOpenMemHandle")
    answer = device.memory.side_by_side(HandleKind.LEGACY)
    assert answer.verdict is Verdict.NO
    assert "vmm_fd" in answer.remedy
    with pytest.raises(CapabilityError, match="chooses the address"):
        device.memory.open_side_by_side([extent, extent])
    assert sim.calls("cuIpcOpenMemHandle") == calls
    device.memory.release(extent)
    device.memory.free(block)
