"""Memory of every kind between two processes, what cannot be exported, and runtimes that lie, hang or lack a call."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from backends.testing.helpers import few_descriptors, pattern, staging
from backends.testing.partners import asked, hold
from devipc.spi import (
    CapabilityError,
    ClosedError,
    DriverError,
    HandleKind,
    MemoryKind,
    ResourceExhausted,
    UsageError,
)

from .peers import Channel, peer, simulated

KINDS = ["legacy", "vmm_fd", "pool", "dmabuf"]
MIB = 2**20


def raw(name: str, *args: Any) -> Any:
    """What another library of the process would call; the device is current."""
    return importlib.import_module("devipc_hip.driver").call(name, *args)


def mirror(device: Any, sim: Any, channel: Channel) -> None:
    """Open what comes, send what is in it, write what is asked for, close."""
    while (order := channel.receive()) == "open":
        extent = channel.receive_extent()
        opened = device.memory.open(extent)
        for fd in extent.fds:
            os.close(fd)
        assert opened.nbytes == extent.nbytes
        assert device.memory.describe(opened.ptr).kind is MemoryKind.IMPORTED
        with pytest.raises(CapabilityError, match="owner must export it"):
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
    host.write(ptr + nbytes - 1, data[-1:])
    extent = device.memory.export(ptr, nbytes)
    other.channel.send("open")
    other.channel.send_extent(extent)
    assert other.channel.receive() == data.hex()
    assert other.channel.receive() == data[-1:].hex()
    answer = pattern(seed + 1, min(nbytes, 4096))
    other.channel.send(answer.hex())
    assert other.channel.receive() == "closed"
    assert host.read(ptr, len(answer)) == answer
    device.memory.release(extent)


def reflect_parts(device: Any, kind: str) -> None:
    block = device.memory.allocate(4 * MIB, kind=HandleKind(kind))
    with staging(device) as host, peer(mirror) as other:
        for seed, (offset, nbytes) in enumerate([(0, block.nbytes), (1, 1000), (2 * MIB - 7, 4096)]):
            reflect(device, other, host, block.ptr + offset, nbytes, seed)
        other.channel.send("end")
    device.memory.free(block)


@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_memory_is_shared(kind: str, device: Any, sim: Any) -> None:
    reflect_parts(device, kind)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@simulated(few_attributes=1, handle_interior=0, handle_random=1, second_open=2, lazy_writes=1)
def test_memory_is_shared_by_a_runtime_of_few_words(kind: str, device: Any, sim: Any) -> None:
    reflect_parts(device, kind)


@pytest.mark.long
@pytest.mark.parametrize("mode", [0, 1, 2])
@simulated(fd_by_pointer=1)
def test_descriptors_by_address(mode: int, device: Any, sim: Any) -> None:
    """A runtime of before August 2025; it crashes where it gets the number instead."""
    reflect_parts(device, "vmm_fd")
    block = device.memory.allocate(MIB, kind=HandleKind.VMM_FD)
    with peer(hold, {**os.environ, "DEVSIM_FD_MODE": str(mode)}) as other:
        extent = device.memory.export(block.ptr, MIB)
        assert asked(other, "open", extent) == ["opened", "", ""]
        other.channel.send("end")
        other.finish()
    device.memory.release(extent)
    device.memory.free(block)


@pytest.mark.parametrize("low", [0, 4])
def test_the_address_of_a_descriptor_looks_like_none(low: int) -> None:
    """Wherever memory happens to lie: others of its size lie near it."""
    vmm: Any = importlib.import_module("devipc_hip.memory_vmm")
    real, start = ctypes.addressof, vmm._place(1)
    window = real(start) // 2**20 * 2**20 - low  # everything near is moved to where descriptors' numbers are

    def moved(of: Any) -> int:
        return real(of) - window if abs(real(of) - window) < 2**20 else real(of)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vmm.ctypes, "addressof", moved)
        kept = [vmm._place(fd) for fd in range(1000)]
        assert all(moved(place) % 2**32 >= 2**20 for place in kept)
        assert [place[0] for place in kept] == list(range(1000))


def open_short(device: Any, sim: Any, channel: Channel) -> None:
    """Open while memory is short, or descriptors are, and when they are not any more."""
    extent = channel.receive_extent()
    sim.inject("hipMemImportFromShareableHandle@1=2")
    with pytest.raises(ResourceExhausted) as caught:
        device.memory.open(extent)
    assert caught.value.code == "device_memory"
    with no_descriptor(sim), pytest.raises(ResourceExhausted) as caught:
        device.memory.open(extent)
    assert caught.value.code == "fds"
    device.memory.close(device.memory.open(extent))
    for fd in extent.fds:
        os.close(fd)


@contextlib.contextmanager
def no_descriptor(sim: Any) -> Iterator[None]:
    """Let the runtime's import be the one for which none is left, which it calls an invalid value."""
    memory_vmm: Any = importlib.import_module("devipc_hip.memory_vmm")
    wait = memory_vmm.open_in_time
    with contextlib.ExitStack() as taken, pytest.MonkeyPatch.context() as patch:

        def short(*args: Any) -> Any:
            taken.enter_context(few_descriptors(0))
            return wait(*args)

        sim.inject("hipMemImportFromShareableHandle@1=1")
        patch.setattr(memory_vmm, "open_in_time", short)
        yield


@simulated(fd_by_pointer=1)
def test_what_ran_out_does_not_tell_how_descriptors_are_passed(device: Any, sim: Any) -> None:
    """The runtime would follow a number as if it were an address."""
    block = device.memory.allocate(MIB, kind=HandleKind.VMM_FD)
    extent = device.memory.export(block.ptr, MIB)
    with peer(open_short) as other:
        other.channel.send_extent(extent)
    device.memory.release(extent)
    device.memory.free(block)


@pytest.mark.long
@simulated()
def test_grown_ranges_are_one(device: Any, sim: Any) -> None:
    block = device.memory.allocate_grown([2 * MIB, 4 * MIB, 2 * MIB])
    assert device.memory.describe(block.ptr + 7 * MIB).base == block.ptr
    extent = device.memory.export(block.ptr + MIB, 6 * MIB)
    assert [chunk.nbytes for chunk in extent.chunks] == [MIB, 4 * MIB, MIB]
    device.memory.release(extent)
    with staging(device) as host, peer(mirror) as other:
        reflect(device, other, host, block.ptr + MIB, 6 * MIB, 1)
        other.channel.send("end")
    device.memory.free(block)


@simulated(retains=0, DEVSIM_DRIVER_VERSION=70_200_001)
def test_memory_of_others_on_a_runtime_that_does_not_count(device: Any, sim: Any) -> None:
    """It crashes where it is asked for the handle of plain memory, and forgets one that is given back too often."""
    reflect_parts(device, "vmm_fd")
    layouts: Any = importlib.import_module("devipc_hip.layouts")
    with device.context:
        plain = raw("hipMalloc", 4 * MIB)
        handle = raw("hipMemCreate", 2 * MIB, layouts.allocation_prop(0), 0)
        mapped = raw("hipMemAddressReserve", 2 * MIB, 0, 0, 0)
        raw("hipMemMap", mapped, 2 * MIB, 0, handle, 0)
        raw("hipMemSetAccess", mapped, 2 * MIB, layouts.access_desc(0), 1)
        with staging(device) as host, peer(mirror) as other:
            for seed, (ptr, kind) in enumerate(((plain, "legacy"), (mapped, "vmm_fd"))):
                assert device.memory.describe(ptr).exportable[0] == kind
                reflect(device, other, host, ptr, 4096, seed)
            other.channel.send("end")
        raw("hipMemUnmap", mapped, 2 * MIB)
        raw("hipMemAddressFree", mapped, 2 * MIB)
        raw("hipMemRelease", handle)
        raw("hipFree", plain)


# --- what is exported -------------------------------------------------------------------------------------------------


@pytest.mark.long
@simulated(handle_random=1, leak_export=1)
def test_an_allocation_is_exported_once(device: Any, sim: Any) -> None:
    """A second export races with a peer's attach, and some runtimes leak at each one."""
    block = device.memory.allocate(MIB)
    first, second = device.memory.export(block.ptr, 8), device.memory.export(block.ptr + 64, 8)
    assert first.chunks[0].payload == second.chunks[0].payload
    device.memory.release(first)
    device.memory.release(second)
    third = device.memory.export(block.ptr, 8)
    assert third.chunks[0].payload == first.chunks[0].payload
    device.memory.release(third)
    assert sim.calls("hipIpcGetMemHandle") == 1
    device.memory.free(block)
    again = device.memory.allocate(MIB)
    fresh = device.memory.export(again.ptr, 8)
    assert fresh.chunks[0].payload != first.chunks[0].payload
    device.memory.release(fresh)
    device.memory.free(again)
    assert sim.calls("hipIpcGetMemHandle") == 2
    assert sim.counter("leaked") == 2
    os._exit(0)  # what the runtime leaked on purpose would be held against this test


@pytest.mark.long
@simulated()
def test_an_export_that_fails_now_and_then_is_tried_again(device: Any, sim: Any) -> None:
    """The second process of a node fails to export most of the time (ROCm/rccl 2188)."""
    block = device.memory.allocate(MIB)
    sim.inject("hipIpcGetMemHandle@1-2=1")
    device.memory.release(device.memory.export(block.ptr, 8))
    assert sim.calls("hipIpcGetMemHandle") == 3
    sim.clear_faults()
    sim.inject("hipIpcGetMemHandle@*=1")
    other = device.memory.allocate(MIB)
    with pytest.raises(DriverError, match=r"refused an argument, 3 times in a row \(hipIpcGetMemHandle -> 1") as caught:
        device.memory.export(other.ptr, 8)
    assert "HSA_ENABLE_IPC_MODE_LEGACY" in caught.value.remedy
    for each in (block, other):
        device.memory.free(each)


@pytest.mark.long
@simulated(handle_random=1)
def test_foreign_memory_is_exported_while_it_is_the_same(device: Any, sim: Any) -> None:
    with device.context:
        ptr = raw("hipMalloc", 4 * MIB)
        first, second = (device.memory.export(ptr, 8) for _ in range(2))
        assert first.chunks[0].payload == second.chunks[0].payload
        for each in (first, second):
            device.memory.release(each)
        raw("hipFree", ptr)
        assert raw("hipMalloc", 4 * MIB) == ptr
        third = device.memory.export(ptr, 8)
        assert third.chunks[0].payload != first.chunks[0].payload
        device.memory.release(third)
        with staging(device) as host, peer(mirror) as other:
            reflect(device, other, host, ptr + 100, 4000, 3)
            other.channel.send("end")
        raw("hipFree", ptr)


def foreign(device: Any, make: str) -> tuple[int, Any]:
    """Memory that another library would have made: its address, and how it is given back."""
    layouts = importlib.import_module("devipc_hip.layouts")
    if make == "managed":
        ptr = raw("hipMallocManaged", 4096, 1)
        return ptr, lambda: raw("hipFree", ptr)
    if make == "host":
        ptr = raw("hipHostMalloc", 4096, 0)
        return ptr, lambda: raw("hipHostFree", ptr)
    if make == "pool":
        stream = device.context.internal_stream()
        ptr = raw("hipMallocAsync", 4096, stream)
        return ptr, lambda: (raw("hipFreeAsync", ptr, stream), raw("hipStreamSynchronize", stream))
    prop = layouts.allocation_prop(0)
    ctypes.c_int.from_buffer(prop, 4).value = 0  # no handle type
    handle = raw("hipMemCreate", 2 * MIB, prop, 0)
    ptr = raw("hipMemAddressReserve", 2 * MIB, 0, 0, 0)
    raw("hipMemMap", ptr, 2 * MIB, 0, handle, 0)
    raw("hipMemRelease", handle)
    return ptr, lambda: (raw("hipMemUnmap", ptr, 2 * MIB), raw("hipMemAddressFree", ptr, 2 * MIB))


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        ("managed", "managed", "hipMallocManaged"),
        ("host", "host", "memfd"),
        ("vmm", "vmm", "PYTORCH_HIP_ALLOC_CONF"),
        ("pool", "pool", "backend:native"),
    ],
)
@simulated(legacy_any_kind=1)
def test_what_cannot_be_exported_is_named(make: str, kind: str, words: str, device: Any, sim: Any) -> None:
    with device.context:
        ptr, give_back = foreign(device, make)
        info = device.memory.describe(ptr)
        assert (info.kind, info.exportable) == (MemoryKind(kind), ())
        with pytest.raises(CapabilityError, match=f"{kind} memory cannot be exported") as caught:
            device.memory.export(ptr, 16)
        assert words in str(caught.value)
        give_back()
    assert sim.counter("exports") == 0
    assert sim.calls("hipIpcGetMemHandle") == 0
    if make == "pool":
        os._exit(0)  # the default pool stays


@pytest.mark.long
@simulated(few_attributes=1, legacy_any_kind=1)
def test_mapped_memory_never_gets_a_classic_handle(device: Any, sim: Any) -> None:
    """Such a handle breaks the peer's kernel driver (ROCm/clr 265): it is known without attributes."""
    with device.context:
        ptr, give_back = foreign(device, "vmm")
        assert device.memory.describe(ptr).exportable == (HandleKind.VMM_FD,)
        with pytest.raises(DriverError, match="hipMemExportToShareableHandle"):
            device.memory.export(ptr, 16)
        give_back()
    assert sim.counter("legacy_exports_of_other_kinds") == 0


@pytest.mark.long
@simulated()
def test_addresses_of_nothing_are_no_error(device: Any, sim: Any) -> None:
    block = device.memory.allocate(4096)
    device.memory.free(block)
    for ptr in (0, 1, -1, 2**64, 4096, 2**47, block.ptr):
        info = device.memory.describe(ptr)
        assert info.kind is MemoryKind.UNKNOWN
        with pytest.raises(CapabilityError, match="freed"):
            device.memory.export(ptr, 8)
    with pytest.raises(UsageError, match="freed before"):
        device.memory.free(block)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_ranges_stay_in_their_allocation(kind: str, device: Any, sim: Any) -> None:
    memory = device.memory
    block = memory.allocate(2 * MIB, kind=HandleKind(kind))
    memory.release(memory.export(block.ptr + block.nbytes - 1, 1))
    for ptr, nbytes in ((block.ptr, block.nbytes + 1), (block.ptr + block.nbytes - 1, 2), (block.ptr, 2**63)):
        with pytest.raises(UsageError, match="behind its allocation"):
            memory.export(ptr, nbytes)
    for nbytes in (0, -4):
        with pytest.raises(UsageError):
            memory.export(block.ptr, nbytes)
    wanted = HandleKind.POOL if kind != "pool" else HandleKind.LEGACY
    with pytest.raises(CapabilityError, match=f"not as {wanted}"):
        memory.export(block.ptr, 8, kind=wanted)
    memory.free(block)


@pytest.mark.long
@simulated()
def test_memory_of_another_device_is_refused(device: Any, sim: Any) -> None:
    backend = importlib.import_module("devipc_hip.backend").HipBackend()
    other = backend.open_device(backend.devices()[1].uuid)
    for kind in KINDS:
        block = other.memory.allocate(4096, kind=HandleKind(kind))
        with pytest.raises(CapabilityError, match="device 1"):
            device.memory.export(block.ptr, 8)
        other.memory.free(block)
    other.close()
