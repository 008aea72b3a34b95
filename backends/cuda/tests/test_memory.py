"""Memory kinds: described by the driver, exported by base, opened by a peer, undone when a step fails."""

from __future__ import annotations

import importlib
import resource
from dataclasses import replace
from typing import Any

import pytest

from backends.testing.helpers import changed, staging
from devipc.spi import (
    CapabilityError,
    DevIPCError,
    HandleError,
    HandleKind,
    MemoryKind,
    ResourceExhausted,
    UsageError,
)

from .peers import simulated

KINDS = ["legacy", "vmm_fd", "pool"]
MIB = 2**20


def bindings() -> Any:
    return importlib.import_module("cuda.bindings.driver")


@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_allocate_describe_free(kind: str, device: Any, sim: Any) -> None:
    memory = device.memory
    block = memory.allocate(2 * MIB + 1, kind=HandleKind(kind))
    assert block.nbytes == 4 * MIB
    info = memory.describe(block.ptr + 12345)
    assert (info.base, info.nbytes) == (block.ptr, block.nbytes)
    assert info.exportable == (HandleKind(kind),)
    assert info.allocation_id
    assert info.reason == ""
    memory.free(block)
    with pytest.raises(UsageError, match="freed before"):
        memory.free(block)
    again = memory.allocate(2 * MIB + 1, kind=HandleKind(kind))
    assert memory.describe(again.ptr).allocation_id != info.allocation_id
    memory.free(again)


@pytest.mark.parametrize("kind", [*KINDS, None])
@simulated(dirty=1)
def test_zero_fills(kind: str | None, device: Any, sim: Any) -> None:
    block = device.memory.allocate(100, kind=kind and HandleKind(kind), zero=True)
    with staging(device) as host:
        assert host.read(block.ptr, MIB) == bytes(MIB)
    device.memory.free(block)


@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_freed_memory_goes_back_to_the_device(kind: str, device: Any, sim: Any) -> None:
    """Also a pool's, which keeps what it has until it is destroyed."""
    device.memory.free(device.memory.allocate(2 * MIB, kind=HandleKind(kind), zero=True))
    assert sim.used_bytes() == 0
    assert sim.counter("live_pools") == 0


@simulated()
def test_descriptors_are_the_default(device: Any, sim: Any) -> None:
    block = device.memory.allocate(1)
    assert block.kind is HandleKind.VMM_FD
    device.memory.free(block)
    for wrong in (0, -1):
        with pytest.raises(UsageError):
            device.memory.allocate(wrong)
    with pytest.raises(CapabilityError, match="vmm_fd, legacy or pool"):
        device.memory.allocate(1, kind=HandleKind.FABRIC)


@simulated(fd_handles=0)
def test_without_descriptors_it_is_legacy(device: Any, sim: Any) -> None:
    """The attribute says yes and the creation fails: what was tried counts."""
    with pytest.raises(CapabilityError):
        device.memory.allocate(1, kind=HandleKind.VMM_FD)
    block = device.memory.allocate(1)
    assert block.kind is HandleKind.LEGACY
    device.memory.free(block)
    assert device.memory.kinds()[HandleKind.VMM_FD].verdict == "no"


@simulated(memory_mb=64)
def test_running_out_of_memory_is_typed(device: Any, sim: Any) -> None:
    for kind in KINDS:
        with pytest.raises(ResourceExhausted) as caught:
            device.memory.allocate(2**30, kind=HandleKind(kind))
        assert caught.value.code == "device_memory"
        assert caught.value.retryable


@simulated()
def test_neighbours_are_disclosed(device: Any, sim: Any) -> None:
    assert "2 MiB block" in device.memory.kinds()[HandleKind.LEGACY].evidence
    assert set(device.memory.kinds()) == {HandleKind(kind) for kind in KINDS}


def foreign(device: Any, make: str) -> tuple[int, Any]:
    """Memory that another library would have made: its address, and how it is given back."""
    cu = bindings()
    if make == "managed":
        status, ptr = cu.cuMemAllocManaged(4096, 1)
    elif make == "host":
        status, ptr = cu.cuMemHostAlloc(4096, 0)
        assert int(status) == 0
        return int(ptr), lambda: cu.cuMemFreeHost(ptr)
    else:
        location = cu.CUmemLocation()
        location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop = cu.CUmemAllocationProp()
        prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location = location
        status, handle = cu.cuMemCreate(2 * MIB, prop, 0)
        assert int(status) == 0
        ptr = cu.cuMemAddressReserve(2 * MIB, 0, 0, 0)[1]
        assert int(cu.cuMemMap(ptr, 2 * MIB, 0, handle, 0)[0]) == 0
        cu.cuMemRelease(handle)
        return int(ptr), lambda: (cu.cuMemUnmap(ptr, 2 * MIB), cu.cuMemAddressFree(ptr, 2 * MIB))
    assert int(status) == 0
    return int(ptr), lambda: cu.cuMemFree(ptr)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        ("managed", "managed", "cudaMallocManaged"),
        ("host", "host", "memfd"),
        ("vmm", "vmm", "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
@simulated()
def test_what_cannot_be_exported_is_named(make: str, kind: str, words: str, device: Any, sim: Any) -> None:
    with device.context:
        ptr, give_back = foreign(device, make)
        info = device.memory.describe(ptr)
        assert info.kind == MemoryKind(kind)
        assert info.exportable == ()
        with pytest.raises(CapabilityError) as caught:
            device.memory.export(ptr, 16)
        assert f"{kind} memory cannot be exported" in str(caught.value)
        assert words in str(caught.value)
        give_back()
    assert sim.counter("exports") == 0
    assert sim.counter("legacy_exports_of_other_kinds") == 0
    assert sim.calls("cuIpcGetMemHandle") == 0


@pytest.mark.parametrize("ptr", [0, 1, -1, 2**64, 4096, 2**47])
@simulated()
def test_unknown_addresses_are_no_error(ptr: int, device: Any, sim: Any) -> None:
    info = device.memory.describe(ptr)
    assert info.kind is MemoryKind.UNKNOWN
    assert "freed" in info.reason
    with pytest.raises(CapabilityError, match="freed"):
        device.memory.export(ptr, 8)


@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_ranges_stay_in_their_allocation(kind: str, device: Any, sim: Any) -> None:
    memory = device.memory
    block = memory.allocate(2 * MIB, kind=HandleKind(kind))
    other = memory.allocate(2 * MIB, kind=HandleKind(kind))
    last = memory.export(block.ptr + block.nbytes - 1, 1)
    memory.release(last)
    for ptr, nbytes in ((block.ptr, block.nbytes + 1), (block.ptr + block.nbytes - 1, 2), (block.ptr, 2**63)):
        with pytest.raises(UsageError, match="behind its allocation"):
            memory.export(ptr, nbytes)
    for nbytes in (0, -4):
        with pytest.raises(UsageError):
            memory.export(block.ptr, nbytes)
    wanted = HandleKind.POOL if kind != "pool" else HandleKind.LEGACY
    with pytest.raises(CapabilityError, match=f"not as {wanted}"):
        memory.export(block.ptr, 8, kind=wanted)
    for each in (block, other):
        memory.free(each)


@simulated()
def test_memory_of_another_device_is_refused(device: Any, sim: Any) -> None:
    backend = importlib.import_module("devipc_cuda.backend").CudaBackend()
    other = backend.open_device(backend.devices()[1].uuid)
    for kind in KINDS:
        block = other.memory.allocate(4096, kind=HandleKind(kind))
        with pytest.raises(CapabilityError, match="device 1"):
            device.memory.export(block.ptr, 8)
        other.memory.free(block)
    other.close()


@simulated()
def test_the_own_process_is_refused_by_the_driver_and_says_why(device: Any, sim: Any) -> None:
    block = device.memory.allocate(2 * MIB, kind=HandleKind.LEGACY)
    extent = device.memory.export(block.ptr, 16)
    with pytest.raises(DevIPCError, match="own process"):
        device.memory.open(extent)
    device.memory.free(block)


@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_malformed_extents_reach_no_driver(kind: str, device: Any, sim: Any) -> None:
    block = device.memory.allocate(2 * MIB, kind=HandleKind(kind))
    extent = device.memory.export(block.ptr, block.nbytes)
    calls = sim.report().calls
    for wrong in (
        changed(extent, payload=extent.chunks[0].payload[:-1]),
        changed(extent, payload=extent.chunks[0].payload + b"\0"),
        changed(extent, nbytes=0),
        changed(extent, offset=-1),
        replace(extent, fds=(*extent.fds, 0)),
        replace(extent, kind=HandleKind.OPAQUE),
    ):
        with pytest.raises(HandleError):
            device.memory.open(wrong)
    assert sim.report().calls == calls
    device.memory.release(extent)
    device.memory.free(block)


@simulated()
def test_running_out_of_descriptors_is_named(device: Any, sim: Any) -> None:
    block = device.memory.allocate(2 * MIB, kind=HandleKind.VMM_FD)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    held = []

    def export_until_refused() -> None:
        while True:
            held.append(device.memory.export(block.ptr, block.nbytes))

    with pytest.raises(ResourceExhausted, match="ulimit -n") as caught:
        export_until_refused()
    assert caught.value.code == "fds"
    assert caught.value.retryable
    for extent in held:
        device.memory.release(extent)
    device.memory.release(device.memory.export(block.ptr, block.nbytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    device.memory.free(block)


@simulated(bare=True)
def test_a_lost_device_says_so_whatever_the_memory(sim: Any) -> None:
    """After a fault an H200 still makes and exports physical memory, and answers questions about pointers."""
    from devipc_cuda.backend import CudaBackend

    from devipc.spi import DeviceLostError

    device = CudaBackend().open_device()
    blocks = {kind: device.memory.allocate(4096, kind=kind) for kind in device.memory.kinds()}
    sim.lose(0, 700)
    for kind, block in blocks.items():
        with pytest.raises(DeviceLostError):
            device.memory.describe(block.ptr)
        with pytest.raises(DeviceLostError):
            device.memory.export(block.ptr, 4096)
        with pytest.raises(DeviceLostError):
            device.memory.allocate(4096, kind=kind)
    device.close()


@simulated()
def test_a_grown_allocation_is_one_range_of_many_blocks(device: Any, sim: Any) -> None:
    block = 2 * 2**20
    allocation = device.memory.allocate_grown((block, 1, 3 * block))
    assert allocation.nbytes == 5 * block
    extent = device.memory.export(allocation.ptr + block - 1, 2 * block)
    assert [chunk.nbytes for chunk in extent.chunks] == [1, block, block - 1]
    device.memory.release(extent)
    device.memory.free(allocation)
    for sizes in ((), (0,), (block, -1)):
        with pytest.raises(UsageError):
            device.memory.allocate_grown(sizes)
    sim.inject("cuMemCreate@2=2")
    with pytest.raises(ResourceExhausted):
        device.memory.allocate_grown((block, block))
    assert [sim.counter(name) for name in ("live_physical", "live_reservations", "live_maps")] == [0, 0, 0]
