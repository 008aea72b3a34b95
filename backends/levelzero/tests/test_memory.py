"""Memory of one process and between two: kinds, bounds, offsets, host memory, repeated opens, dead exporters."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from backends.testing.helpers import changed, few_descriptors, pattern, staging
from devipc.spi import (
    BoundsError,
    CapabilityError,
    ClosedError,
    DriverError,
    HandleError,
    HandleKind,
    MemoryKind,
    ResourceExhausted,
    UsageError,
    Verdict,
)

from .peers import Channel, peer, simulated

MIB = 2**20


def mirror(device: Any, sim: Any, channel: Channel) -> None:
    """Open what comes, send what is in it, write what is asked for, close."""
    while (order := channel.receive()) == "open":
        extent = channel.receive_extent()
        opened = device.memory.open(extent)
        for fd in extent.fds:
            os.close(fd)
        assert opened.nbytes == extent.nbytes
        assert device.memory.describe(opened.ptr).kind is MemoryKind.IMPORTED
        with pytest.raises(CapabilityError, match="opened from another process"):
            device.memory.export(opened.ptr, 1)
        with staging(device) as host:
            channel.send(host.read(opened.ptr, min(opened.nbytes, 4096)).hex())
            channel.send(host.read(opened.ptr + opened.nbytes - 1, 1).hex())
            host.write(opened.ptr, bytes.fromhex(channel.receive()))
        device.memory.close(opened)
        with pytest.raises(ClosedError):
            device.memory.close(opened)
        channel.send("closed")
    assert order == "end"


def reflect(device: Any, other: Any, host: Any, ptr: int, nbytes: int, seed: int) -> None:
    """Share ``[ptr, ptr + nbytes)`` with a mirror, check both directions, and take it back."""
    data = pattern(seed, min(nbytes, 4096))
    host.write(ptr, data)
    host.write(ptr + nbytes - 1, data[:1])
    first = data if nbytes > 4096 else data[:-1] + data[:1]
    extent = device.memory.export(ptr, nbytes)
    assert len(extent.fds) == 1
    other.channel.send("open")
    other.channel.send_extent(extent)
    assert other.channel.receive() == first.hex()
    assert other.channel.receive() == data[:1].hex()
    answer = pattern(seed + 1, min(nbytes, 4096))
    other.channel.send(answer.hex())
    assert other.channel.receive() == "closed"
    assert host.read(ptr, len(answer)) == answer
    device.memory.release(extent)


def share_one(device: Any, seed: int = 1) -> None:
    """Share one block with a peer that starts with the present environment, both directions."""
    block = device.memory.allocate(4 * MIB)
    with staging(device) as host, peer(mirror) as other:
        reflect(device, other, host, block.ptr + 4096, 2 * MIB, seed)
        other.channel.send("end")
    device.memory.free(block)


@simulated()
def test_a_peer_reads_and_writes_at_any_offset(device: Any, sim: Any) -> None:
    block = device.memory.allocate(8 * MIB)
    with staging(device) as host, peer(mirror) as other:
        for seed, (offset, nbytes) in enumerate(
            [(0, 8 * MIB), (1, 1), (1, 4095), (2 * MIB - 1, 3), (2 * MIB, 2 * MIB), (8 * MIB - 1, 1)]
        ):
            reflect(device, other, host, block.ptr + offset, nbytes, seed)
        other.channel.send("end")
    device.memory.free(block)
    assert sim.counter("exports") == 6


@simulated()
def test_addresses_are_unsigned(device: Any, sim: Any) -> None:
    block = device.memory.allocate(MIB)
    assert block.ptr > 2**63
    assert device.memory.describe(block.ptr + 5).base == block.ptr
    extent = device.memory.export(block.ptr + 8, 16)
    assert extent.chunks[0].offset == 8
    opened = device.memory.open(extent)
    assert opened.ptr > 2**63
    device.memory.close(opened)
    device.memory.release(extent)
    device.memory.free(block)
    for ptr in (0, -1, 2**64):
        assert device.memory.describe(ptr).kind is MemoryKind.UNKNOWN


def driver_allocation(device: Any, name: str, nbytes: int) -> int:
    """Allocate as another library would."""
    from devipc_levelzero import driver
    from devipc_levelzero.abi import DeviceMemoryDesc, make

    out, desc = ctypes.c_void_p(), make(DeviceMemoryDesc)
    middle = (device.context.device,) if name == "zeMemAllocDevice" else ()
    driver.call(
        name, device.context.handle, ctypes.byref(desc), nbytes, 0, *middle, ctypes.byref(out), device=device.info.uuid
    )
    return int(out.value or 0)


@simulated()
def test_small_memory_of_a_pool_opens_at_its_own_bytes(device: Any, sim: Any) -> None:
    """A driver exports its pool whole and hides the distance in the handle."""
    from devipc_levelzero import driver

    blocks = [driver_allocation(device, "zeMemAllocDevice", 1000) for _ in range(3)]
    with staging(device) as host, peer(mirror) as other:
        for seed, ptr in enumerate(blocks):
            reflect(device, other, host, ptr + 8, 900, seed)
        other.channel.send("end")
    for ptr in blocks:
        driver.call("zeMemFree", device.context.handle, ptr)
    assert "peers get whole" in device.memory.kinds()[HandleKind.OPAQUE].evidence


@simulated()
def test_host_memory_is_shared_by_handle(device: Any, sim: Any) -> None:
    block = device.memory.allocate_host(MIB)
    assert device.memory.describe(block.ptr).kind is MemoryKind.HOST
    ctypes.memmove(block.ptr, b"from the host", 13)
    extent = device.memory.export(block.ptr, 4096)
    with peer(hold_host) as other:
        other.channel.send_extent(extent)
        assert bytes.fromhex(other.channel.receive()) == b"from the host"
    assert ctypes.string_at(block.ptr, 13) == b"from the peer"
    device.memory.release(extent)
    registration = device.transfer.register_host(block.ptr, 4096)  # reachable as it is: nothing is imported
    assert sim.calls("zexDriverImportExternalPointer") == 0
    device.transfer.unregister_host(registration)
    device.memory.free(block)


def hold_host(device: Any, sim: Any, channel: Channel) -> None:
    extent = channel.receive_extent()
    opened = device.memory.open(extent)
    with staging(device) as host:
        channel.send(host.read(opened.ptr, 13).hex())
        host.write(opened.ptr, b"from the peer")
    device.memory.close(opened)
    os.close(extent.fds[0])


@simulated()
def test_what_is_refused(device: Any, sim: Any) -> None:
    memory = device.memory
    block = memory.allocate(MIB)
    assert memory.kinds()[HandleKind.OPAQUE].verdict is Verdict.UNTESTED
    calls: list[Callable[[], object]] = [
        lambda: memory.allocate(0),
        lambda: memory.export(block.ptr, 0),
        lambda: memory.allocate_host(-1),
    ]
    for call in calls:
        with pytest.raises(UsageError):
            call()
    with pytest.raises(UsageError, match="behind its allocation"):
        memory.export(block.ptr + MIB, 2 * MIB)
    with pytest.raises(CapabilityError, match="use opaque"):
        memory.allocate(1, kind=HandleKind.LEGACY)
    with pytest.raises(CapabilityError, match="not as legacy"):
        memory.export(block.ptr, 8, kind=HandleKind.LEGACY)
    memory.free(block)
    with pytest.raises(UsageError, match="freed before"):
        memory.free(block)
    with pytest.raises(CapabilityError, match="does not know the address"):
        memory.export(block.ptr, 8)
    with pytest.raises(CapabilityError, match="does not know the address"):
        memory.export(ctypes.addressof(ctypes.create_string_buffer(8)), 8)
    assert sim.counter("exports") == 0


@simulated()
def test_memory_of_another_device_is_refused(device: Any, sim: Any) -> None:
    from devipc_levelzero.backend import LevelZeroBackend

    backend = LevelZeroBackend()
    other = backend.open_device(backend.devices()[1].uuid)
    block = other.memory.allocate(MIB)
    with pytest.raises(CapabilityError, match="another device"):
        device.memory.export(block.ptr, 8)
    other.memory.free(block)
    other.close()


@simulated()
def test_every_get_has_its_put_whatever_comes_first(device: Any, sim: Any) -> None:
    """With a loader that has the call; without it freeing does the same. Either way no descriptor stays."""
    memory = device.memory
    fds = sim.counter("fds")
    for first in ("release", "free"):
        block = memory.allocate(MIB)
        extents = [memory.export(block.ptr, 4096) for _ in range(3)]
        assert sim.counter("unreturned_handles") == 3
        if first == "free":
            memory.free(block)
            other = memory.allocate(MIB)  # its handle may get the same numbers
            kept = memory.export(other.ptr, 8)
        for extent in extents:
            memory.release(extent)
        if first == "free":
            assert sim.counter("unreturned_handles") == 1
            memory.release(kept)
            block = other
        memory.free(block)
        assert (sim.counter("unreturned_handles"), sim.counter("fds"), sim.counter("double_closes")) == (0, fds, 0)


@simulated()
def test_what_comes_from_elsewhere_is_checked_first(device: Any, sim: Any) -> None:
    block = device.memory.allocate(4 * MIB)
    extent = device.memory.export(block.ptr, MIB)
    good = extent.chunks[0].payload
    opens = sim.calls("zeMemOpenIpcHandle")
    wrong = [
        changed(extent, payload=good[:-1]),
        changed(extent, payload=b"\x09" + good[1:]),
        changed(extent, payload=good[:1] + b"\x03" + good[2:]),
        changed(extent, has_fd=False),
        changed(extent, payload=good[:34] + (2**40).to_bytes(8, "little") + good[42:]),  # a place beyond the buffer
    ]
    for each in wrong:
        with pytest.raises(HandleError):
            device.memory.open(each)
    assert sim.calls("zeMemOpenIpcHandle") == opens
    with pytest.raises(BoundsError):
        device.memory.open(changed(extent, offset=4 * MIB - 1, nbytes=2, allocation_nbytes=64 * MIB))
    with pytest.raises(BoundsError):
        device.memory.open(changed(extent, allocation_nbytes=64 * MIB))
    with pytest.raises(HandleError, match="host memory opened device memory"):
        device.memory.open(changed(extent, payload=good[:1] + b"\x01" + good[2:]))
    assert sim.counter("live_mappings") == 0
    device.memory.release(extent)
    device.memory.free(block)


@simulated()
def test_an_import_without_descriptors_says_so(device: Any, sim: Any) -> None:
    """The driver calls it an invalid argument, while the one that it was given is the last."""
    block = device.memory.allocate(MIB)
    extent = device.memory.export(block.ptr, MIB)
    sim.inject(f"zeMemOpenIpcHandle@1={0x78000004}")
    with few_descriptors(1), pytest.raises(ResourceExhausted) as caught:
        device.memory.open(extent)
    assert caught.value.code == "fds"
    device.memory.close(device.memory.open(extent))
    device.memory.release(extent)
    device.memory.free(block)


@simulated()
def test_a_descriptor_of_something_else_is_refused(device: Any, sim: Any) -> None:
    block = device.memory.allocate(MIB)
    extent = device.memory.export(block.ptr, MIB)
    from dataclasses import replace

    other, empty = os.memfd_create("other"), os.memfd_create("empty")
    os.truncate(other, 4096)
    with pytest.raises(DriverError) as caught:
        device.memory.open(replace(extent, fds=(other,)))
    assert caught.value.status is not None
    assert caught.value.status.call == "zeMemOpenIpcHandle"
    assert caught.value.remedy
    with pytest.raises(HandleError, match="into a buffer of 0"):
        device.memory.open(replace(extent, fds=(empty,)))
    os.close(other)
    os.close(empty)
    device.memory.release(extent)
    device.memory.free(block)


@simulated()
def test_one_allocation_is_opened_once(device: Any, sim: Any) -> None:
    block = device.memory.allocate(4 * MIB)
    extents = [device.memory.export(block.ptr + offset, MIB) for offset in (0, MIB, 0)]
    with peer(open_together) as other:
        for extent in extents:
            other.channel.send_extent(extent)
        assert other.channel.receive() == [1, 0]
    for extent in extents:
        device.memory.release(extent)
    device.memory.free(block)


def open_together(device: Any, sim: Any, channel: Channel) -> None:
    extents = [channel.receive_extent() for _ in range(3)]
    opened = [device.memory.open(extent) for extent in extents]
    assert opened[1].ptr - opened[0].ptr == MIB
    assert opened[2].ptr == opened[0].ptr
    made = sim.counter("driver_opens")
    for each in opened:
        device.memory.close(each)
    channel.send([made, sim.counter("live_mappings")])
    for extent in extents:
        os.close(extent.fds[0])


@simulated()
def test_a_handle_opens_after_its_exporter_died(device: Any, sim: Any) -> None:
    """The descriptor is ours; only an unpatched handle would look for the process."""
    with peer(give_and_wait) as other:
        extent = other.channel.receive_extent()
        other.kill()
        opened = device.memory.open(extent)
        with staging(device) as host:
            assert host.read(opened.ptr, 6) == b"legacy"
        device.memory.close(opened)
        os.close(extent.fds[0])
        other.process = subprocess.Popen(["true"])
        other.process.wait()


def give_and_wait(device: Any, sim: Any, channel: Channel) -> None:
    block = device.memory.allocate(MIB)
    with staging(device) as host:
        host.write(block.ptr, b"legacy")
    channel.send_extent(device.memory.export(block.ptr, MIB))
    channel.receive()


@simulated(memory_mb=64)
def test_memory_runs_out_by_name(device: Any, sim: Any) -> None:
    from devipc.spi import ResourceExhausted

    before = device.transfer.memory_info()
    block = device.memory.allocate(32 * MIB, zero=True)
    assert before.free_nbytes - device.transfer.memory_info().free_nbytes == 32 * MIB
    with pytest.raises(ResourceExhausted) as caught:
        device.memory.allocate(48 * MIB)
    assert caught.value.retryable
    device.memory.free(block)
