"""Grown ranges of many blocks, and what is undone when any step of mapping them fails."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

from backends.testing.helpers import changed, pattern, staging
from devipc.spi import (
    CapabilityError,
    DevIPCError,
    HandleError,
    HandleKind,
    MemoryKind,
    UsageError,
    close_fds,
)

from .peers import Channel, peer, simulated

BLOCK = 2 * 2**20


class Grown:
    """A reservation that grows block by block, as torch's expandable segments do. The context is current."""

    def __init__(
        self, sizes: list[int], *, reserved: int = 64 * BLOCK, handle_types: int = 1, ordinal: int = 0
    ) -> None:
        self.cu: Any = importlib.import_module("cuda.bindings.driver")
        self.reserved = reserved
        self.base = int(self.check(self.cu.cuMemAddressReserve(reserved, 0, 0, 0)))
        self.mapped: list[tuple[int, int]] = []
        self._driver: Any = importlib.import_module("devipc_cuda.driver")
        self._handle_types, self._ordinal = 1, 0
        at = 0
        for nbytes in sizes:
            self.grow(at, nbytes)
            at += nbytes

    @staticmethod
    def check(result: Any) -> Any:
        assert int(result[0]) == 0, result
        return result[1] if len(result) == 2 else None

    def grow(self, at: int, nbytes: int) -> None:
        prop = self._driver.allocation_prop(self._ordinal)
        prop.requestedHandleTypes = self.cu.CUmemAllocationHandleType(self._handle_types)
        handle = self.check(self.cu.cuMemCreate(nbytes, prop, 0))
        self.check(self.cu.cuMemMap(self.base + at, nbytes, 0, handle, 0))
        self.check(self.cu.cuMemSetAccess(self.base + at, nbytes, [self._driver.access_desc(self._ordinal)], 1))
        self.check(self.cu.cuMemRelease(handle))
        self.mapped.append((at, nbytes))

    def shrink(self, at: int) -> None:
        (found,) = (entry for entry in self.mapped if entry[0] == at)
        self.check(self.cu.cuMemUnmap(self.base + at, found[1]))
        self.mapped.remove(found)

    def free(self) -> None:
        for at, _ in list(self.mapped):
            self.shrink(at)
        self.check(self.cu.cuMemAddressFree(self.base, self.reserved))


@simulated()
def test_a_grown_range_is_one_allocation(device: Any, sim: Any) -> None:
    with device.context:
        range_ = Grown([BLOCK, 5 * BLOCK, BLOCK])
        for offset in (0, BLOCK, 7 * BLOCK - 1):
            info = device.memory.describe(range_.base + offset)
            assert (info.kind, info.base, info.nbytes) == (MemoryKind.VMM, range_.base, 7 * BLOCK)
            assert info.exportable == (HandleKind.VMM_FD,)
        seen = {info.allocation_id}
        range_.grow(7 * BLOCK, BLOCK)
        info = device.memory.describe(range_.base)
        assert info.nbytes == 8 * BLOCK
        seen.add(info.allocation_id)
        range_.shrink(6 * BLOCK)
        assert device.memory.describe(range_.base).nbytes == 6 * BLOCK
        range_.grow(6 * BLOCK, BLOCK)
        seen.add(device.memory.describe(range_.base).allocation_id)
        assert len(seen) == 3, "a replaced block is another allocation"
        assert device.memory.describe(range_.base + 9 * BLOCK).kind is MemoryKind.UNKNOWN
        range_.free()
        assert device.memory.describe(range_.base).kind is MemoryKind.UNKNOWN
    assert sim.counter("live_physical") == 0


@simulated()
def test_neighbours_in_the_address_space_are_not_one_range(device: Any, sim: Any) -> None:
    blocks = [device.memory.allocate(BLOCK, kind=HandleKind.VMM_FD) for _ in range(4)]
    for block in blocks:
        info = device.memory.describe(block.ptr + 5)
        assert (info.base, info.nbytes) == (block.ptr, block.nbytes)
    for block in blocks:
        device.memory.free(block)


@simulated()
def test_a_hole_ends_the_range(device: Any, sim: Any) -> None:
    with device.context:
        range_ = Grown([BLOCK, BLOCK, BLOCK])
        range_.shrink(BLOCK)
        assert device.memory.describe(range_.base).nbytes == BLOCK
        assert device.memory.describe(range_.base + 2 * BLOCK).base == range_.base + 2 * BLOCK
        with pytest.raises(UsageError):
            device.memory.export(range_.base, 3 * BLOCK)
        range_.free()
    assert sim.counter("live_physical") == 0


@simulated()
def test_a_mixed_range_is_refused_where_it_is_not_exportable(device: Any, sim: Any) -> None:
    with device.context:
        range_ = Grown([BLOCK])
        range_._handle_types = 0
        range_.grow(BLOCK, BLOCK)
        fds = len(os.listdir("/proc/self/fd"))
        device.memory.release(device.memory.export(range_.base, BLOCK))
        with pytest.raises((CapabilityError, DevIPCError), match="handle type"):
            device.memory.export(range_.base, 2 * BLOCK)
        with pytest.raises(CapabilityError, match="TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC"):
            device.memory.export(range_.base + BLOCK, 8)
        assert len(os.listdir("/proc/self/fd")) == fds
        range_.free()


@simulated()
def test_each_block_is_exported_once_and_released(device: Any, sim: Any) -> None:
    with device.context:
        range_ = Grown([BLOCK] * 6)
        fds, physical, exports = len(os.listdir("/proc/self/fd")), sim.counter("live_physical"), sim.counter("exports")
        extent = device.memory.export(range_.base + BLOCK + 7, 3 * BLOCK)
        assert [(c.allocation_nbytes, c.offset, c.nbytes) for c in extent.chunks] == [
            (BLOCK, 7, BLOCK - 7),
            (BLOCK, 0, BLOCK),
            (BLOCK, 0, BLOCK),
            (BLOCK, 0, 7),
        ]
        assert sim.counter("exports") == exports + 4
        assert sim.counter("live_physical") == physical
        assert not any(os.get_inheritable(fd) for fd in extent.fds)
        device.memory.release(extent)
        assert len(os.listdir("/proc/self/fd")) == fds
        range_.free()


def check_grown(device: Any, sim: Any, channel: Channel) -> None:
    while channel.receive() != "end":
        extent = channel.receive_extent()
        before = sim.counter("reserved_bytes")
        opened = device.memory.open(extent)
        assert sim.counter("reserved_bytes") - before == sum(c.allocation_nbytes for c in extent.chunks)
        assert sim.counter("live_physical") == 0, "handles are let go once mapped"
        close_fds(extent.fds)
        with staging(device) as host:
            at, found = 0, []
            for chunk in extent.chunks:
                found.append(host.read(opened.ptr + at, min(chunk.nbytes, 256)).hex())
                at += chunk.nbytes
            host.write(opened.ptr + opened.nbytes - 4, b"tail")
        channel.send(found)
        device.memory.close(opened)


@pytest.mark.parametrize("fd_mode", [0, 1, 2])
@simulated()
def test_a_peer_maps_all_blocks_side_by_side(fd_mode: int, device: Any, sim: Any) -> None:
    sizes = [BLOCK, 10 * BLOCK, BLOCK, 3 * BLOCK]
    with device.context, staging(device) as host:
        range_ = Grown(sizes)
        at = 0
        for seed, nbytes in enumerate(sizes):
            host.write(range_.base + at, pattern(seed, 4096))
            at += nbytes
        with peer(check_grown, {**os.environ, "DEVSIM_FD_MODE": str(fd_mode)}) as other:
            for _ in range(2):
                extent = device.memory.export(range_.base, sum(sizes))
                other.channel.send("open")
                other.channel.send_extent(extent)
                device.memory.release(extent)
                assert other.channel.receive() == [pattern(seed, 256).hex() for seed in range(4)]
                assert host.read(range_.base + sum(sizes) - 4, 4) == b"tail"
            other.channel.send("end")
        range_.free()


STEPS = [
    "cuMemImportFromShareableHandle@1",
    "cuMemImportFromShareableHandle@3",
    "cuMemAddressReserve@1",
    "cuMemMap@1",
    "cuMemMap@3",
    "cuMemSetAccess@1",
]


def fail_at_every_step(device: Any, sim: Any, channel: Channel) -> None:
    extent = channel.receive_extent()
    device.memory.describe(4096)  # makes the device's own stream, which stays
    live = sim.report().counters
    fds = len(os.listdir("/proc/self/fd"))
    for step in STEPS:
        for status in (2, 999):
            sim.inject(f"{step}={status}")
            with pytest.raises(DevIPCError) as caught:
                device.memory.open(extent)
            assert caught.value.status is not None
            assert (caught.value.status.call, caught.value.status.value) == (step.partition("@")[0], status)
            after = sim.report().counters
            assert {k: v for k, v in after.items() if k.startswith("live_")} == {
                k: v for k, v in live.items() if k.startswith("live_")
            }
            assert after["reserved_bytes"] == live["reserved_bytes"]
            assert len(os.listdir("/proc/self/fd")) == fds
            sim.clear_faults()
    device.memory.close(device.memory.open(extent))
    close_fds(extent.fds)


@simulated()
def test_any_failing_step_undoes_the_earlier_ones(device: Any, sim: Any) -> None:
    with device.context:
        range_ = Grown([BLOCK] * 4)
        extent = device.memory.export(range_.base, 4 * BLOCK)
        with peer(fail_at_every_step) as other:
            other.channel.send_extent(extent)
            device.memory.release(extent)
        range_.free()


@pytest.mark.parametrize("step", ["cuMemCreate@1", "cuMemAddressReserve@1", "cuMemMap@1", "cuMemSetAccess@1"])
@simulated()
def test_a_failing_allocation_leaves_nothing(step: str, device: Any, sim: Any) -> None:
    device.transfer.memory_info()
    sim.inject(f"{step}=2")
    with pytest.raises(DevIPCError):
        device.memory.allocate(BLOCK, kind=HandleKind.VMM_FD)
    for name in ("live_physical", "live_reservations", "live_maps"):
        assert sim.counter(name) == 0
    sim.clear_faults()
    sim.inject("cuMemsetD8Async@1=1")
    with pytest.raises(DevIPCError):
        device.memory.allocate(BLOCK, kind=HandleKind.VMM_FD, zero=True)
    assert sim.counter("live_maps") == 0


def open_on_first(device: Any, sim: Any, channel: Channel) -> None:
    extent = channel.receive_extent()
    with pytest.raises(HandleError, match="device 1") as caught:
        device.memory.open(extent)
    assert caught.value.code == "wrong_device"
    close_fds(extent.fds)


@simulated()
def test_memory_of_another_device_is_refused_by_the_importer(device: Any, sim: Any) -> None:
    backend = importlib.import_module("devipc_cuda.backend").CudaBackend()
    second = backend.open_device(backend.devices()[1].uuid)
    block = second.memory.allocate(BLOCK)
    extent = second.memory.export(block.ptr, BLOCK)
    with peer(open_on_first) as other:
        other.channel.send_extent(extent)
    second.memory.release(extent)
    second.memory.free(block)
    second.close()


def open_many(device: Any, sim: Any, channel: Channel) -> None:
    extent = channel.receive_extent()
    opened = [device.memory.open(extent) for _ in range(30)]
    assert sim.counter("reserved_bytes") == 30 * BLOCK
    for each in opened:
        device.memory.close(each)
    assert sim.counter("reserved_bytes") == 0
    close_fds(extent.fds)


@simulated()
def test_addresses_are_reserved_exactly(device: Any, sim: Any) -> None:
    block = device.memory.allocate(BLOCK)
    extent = device.memory.export(block.ptr + 100, 100)
    with peer(open_many, {**os.environ, "DEVSIM_VA_LIMIT_MB": "64"}) as other:
        other.channel.send_extent(extent)
    device.memory.release(extent)
    device.memory.free(block)


@simulated()
def test_the_same_process_gets_an_alias(device: Any, sim: Any) -> None:
    """Served from a registry by the core; here it must at least be right."""
    block = device.memory.allocate(BLOCK)
    extent = device.memory.export(block.ptr, BLOCK)
    opened = device.memory.open(extent)
    with staging(device) as host:
        host.write(block.ptr + 9, b"alias")
        assert host.read(opened.ptr + 9, 5) == b"alias"
    with pytest.raises(HandleError):
        device.memory.open(changed(extent, allocation_nbytes=64 * BLOCK, nbytes=64 * BLOCK))
    device.memory.close(opened)
    device.memory.release(extent)
    device.memory.free(block)
