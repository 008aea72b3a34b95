"""Memory between two processes: offsets, small allocations, repeated opens, wrong handles, dead exporters."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from typing import Any

import pytest

from backends.testing.helpers import changed, pattern, staging
from devipc.spi import (
    CapabilityError,
    ClosedError,
    CompletionTimeout,
    DevIPCError,
    ExportedExtent,
    HandleKind,
    MemoryKind,
    call_with_deadline,
)

from .peers import Channel, peer, simulated

KINDS = ["legacy", "vmm_fd", "pool"]
OPENS = {
    "legacy": "cuIpcOpenMemHandle",
    "vmm_fd": "cuMemImportFromShareableHandle",
    "pool": "cuMemPoolImportPointer",
}
MIB = 2**20


def bindings() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def mirror(device: Any, sim: Any, channel: Channel) -> None:
    """Open what comes, send what is in it, write what is asked for, close."""
    while (order := channel.receive()) == "open":
        extent = channel.receive_extent()
        opened = device.memory.open(extent)
        for fd in extent.fds:
            os.close(fd)
        assert opened.nbytes == extent.nbytes
        info = device.memory.describe(opened.ptr)
        assert info.kind is MemoryKind.IMPORTED
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
    host.write(ptr + nbytes - 1, data[:1])
    last = data[:1] if nbytes > 4096 else (data[:-1] + data[:1])[-1:]
    first = data if nbytes > 4096 else data[:-1] + data[:1]
    extent = device.memory.export(ptr, nbytes)
    other.channel.send("open")
    other.channel.send_extent(extent)
    assert other.channel.receive() == first.hex()
    assert other.channel.receive() == last.hex()
    answer = pattern(seed + 1, min(nbytes, 4096))
    other.channel.send(answer.hex())
    assert other.channel.receive() == "closed"
    assert host.read(ptr, len(answer)) == answer
    device.memory.release(extent)


@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_a_peer_reads_and_writes_at_any_offset(kind: str, device: Any, sim: Any) -> None:
    block = device.memory.allocate(8 * MIB, kind=HandleKind(kind))
    with staging(device) as host, peer(mirror) as other:
        for seed, (offset, nbytes) in enumerate(
            [(0, 8 * MIB), (1, 1), (1, 4095), (4096, 2 * MIB), (2 * MIB, 2 * MIB), (2 * MIB - 1, 3), (8 * MIB - 1, 1)]
        ):
            reflect(device, other, host, block.ptr + offset, nbytes, seed)
        other.channel.send("end")
    device.memory.free(block)
    assert sim.counter("exports") >= 7


@pytest.mark.parametrize("small_open", [0, 1])
@pytest.mark.parametrize("second_open", [0, 1, 2])
@simulated()
def test_small_allocations_open_at_their_own_bytes(small_open: int, second_open: int, device: Any, sim: Any) -> None:
    """Whether the driver opens the shared block or the allocation in it, the right bytes are found."""
    cu = bindings()
    environment = {"DEVSIM_SMALL_OPEN": str(small_open), "DEVSIM_SECOND_OPEN": str(second_open), **os.environ}
    with device.context, staging(device) as host, peer(mirror, environment) as other:
        blocks = [int(cu.cuMemAlloc(1000)[1]) for _ in range(3)]
        for seed, ptr in enumerate(blocks):
            reflect(device, other, host, ptr + 8, 900, seed)
        other.channel.send("end")
        for ptr in blocks:
            cu.cuMemFree(ptr)


def open_side_by_side(device: Any, sim: Any, channel: Channel) -> None:
    opened = [device.memory.open(channel.receive_extent()) for _ in range(4)]
    with staging(device) as host:
        channel.send([host.read(each.ptr, 8).hex() for each in opened])
        device.memory.close(opened.pop(0))
        assert [host.read(each.ptr, 8) for each in opened] == [bytes([seed]) * 8 for seed in (2, 3, 3)]
    for each in opened:
        device.memory.close(each)


@pytest.mark.parametrize("small_open", [0, 1])
@pytest.mark.parametrize("second_open", [0, 1, 2])
@simulated()
def test_small_allocations_of_one_block_are_open_at_once(
    small_open: int, second_open: int, device: Any, sim: Any
) -> None:
    """What the driver opened for one of them is not taken for another that lies in the same block."""
    cu = bindings()
    environment = {"DEVSIM_SMALL_OPEN": str(small_open), "DEVSIM_SECOND_OPEN": str(second_open), **os.environ}
    with device.context, staging(device) as host, peer(open_side_by_side, environment) as other:
        blocks = [int(cu.cuMemAlloc(1000)[1]) for _ in range(3)]
        for seed, ptr in enumerate(blocks, 1):
            host.write(ptr + 8, bytes([seed]) * 8)
        for ptr in (*blocks, blocks[2]):
            other.channel.send_extent(device.memory.export(ptr + 8, 900))
        assert other.channel.receive() == [(bytes([seed]) * 8).hex() for seed in (1, 2, 3, 3)]
        other.finish()
        for ptr in blocks:
            cu.cuMemFree(ptr)


def open_twice(device: Any, sim: Any, channel: Channel) -> None:
    extents = [channel.receive_extent() for _ in range(2)]
    opened = [device.memory.open(extent) for extent in extents]
    with staging(device) as host:
        assert [host.read(each.ptr, 4) for each in opened] == [b"1234", b"5678"]
        device.memory.close(opened[0])
        assert host.read(opened[1].ptr, 4) == b"5678"
        opened[0] = device.memory.open(extents[0])
        assert host.read(opened[0].ptr, 4) == b"1234"
    for each in opened:
        device.memory.close(each)
    for extent in extents:
        for fd in extent.fds:
            os.close(fd)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("second_open", [0, 1, 2])
@simulated(handle_random=1)
def test_two_exports_of_one_allocation(kind: str, second_open: int, device: Any, sim: Any) -> None:
    block = device.memory.allocate(4 * MIB, kind=HandleKind(kind))
    with staging(device) as host:
        host.write(block.ptr, b"1234")
        host.write(block.ptr + 3 * MIB, b"5678")
    extents = [device.memory.export(block.ptr + offset, MIB) for offset in (0, 3 * MIB)]
    with peer(open_twice, {"DEVSIM_SECOND_OPEN": str(second_open), **os.environ}) as other:
        for extent in extents:
            other.channel.send_extent(extent)
    for extent in extents:
        device.memory.release(extent)
    device.memory.free(block)


def open_in_turn(device: Any, sim: Any, channel: Channel) -> None:
    opened = []
    for _ in range(2):
        extent = channel.receive_extent()
        opened.append(device.memory.open(extent))
        for fd in extent.fds:
            os.close(fd)
        channel.send()
    first, second = opened
    device.memory.close(first)
    with staging(device) as host:
        assert host.read(second.ptr, 4) == b"5678"
    device.memory.close(second)


@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_an_export_may_be_taken_back_while_it_is_mapped(kind: str, device: Any, sim: Any) -> None:
    """Another export of the same memory must not be undone by closing the first."""
    block = device.memory.allocate(4 * MIB, kind=HandleKind(kind))
    with staging(device) as host:
        host.write(block.ptr + MIB, b"5678")
    with peer(open_in_turn) as other:
        for turn in range(2):
            extent = device.memory.export(block.ptr + turn * MIB, MIB)
            other.channel.send_extent(extent)
            other.channel.receive()
            device.memory.release(extent)
    device.memory.free(block)


def refuse(device: Any, sim: Any, channel: Channel) -> None:
    """Open what comes and send the error's name."""
    while True:
        if channel.receive() == "end":
            return
        extent = channel.receive_extent()
        try:
            device.memory.close(device.memory.open(extent))
        except DevIPCError as error:
            channel.send([type(error).__name__, str(error)])
        else:
            channel.send(["opened", ""])
        finally:
            for fd in extent.fds:
                os.close(fd)


def open_around_a_hang(device: Any, sim: Any, channel: Channel) -> None:
    call = channel.receive()
    kept, stuck, fine = (channel.receive_extent() for _ in range(3))
    held = device.memory.open(kept)
    sim.inject(f"{call}*@1=hang")
    with pytest.raises(CompletionTimeout):
        call_with_deadline(lambda: device.memory.open(stuck), timeout_s=0.5, what="open", undo=device.memory.close)
    device.memory.close(device.memory.open(fine))
    device.memory.close(held)
    channel.send("done")
    channel.receive()
    os._exit(0)  # a thread stands in the driver for ever


@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_an_open_that_never_returns_holds_up_no_other(kind: str, device: Any, sim: Any) -> None:
    """Neither opens nor closes of other allocations."""
    blocks = [device.memory.allocate(MIB, kind=HandleKind(kind)) for _ in range(3)]
    extents = [device.memory.export(block.ptr, MIB) for block in blocks]
    with peer(open_around_a_hang) as other:
        other.channel.send(OPENS[kind])
        for extent in extents:
            other.channel.send_extent(extent)
        assert other.channel.receive() == "done"
        other.channel.send()
    for extent, block in zip(extents, blocks, strict=True):
        device.memory.release(extent)
        device.memory.free(block)


def refusal(other: Any, extent: ExportedExtent) -> tuple[str, str]:
    other.channel.send("open")
    other.channel.send_extent(extent)
    name, text = other.channel.receive()
    return name, text


@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_sizes_are_checked_by_the_importer(kind: str, device: Any, sim: Any) -> None:
    """Also that of the allocation around the range: whatever lies in it is taken for the peer's."""
    block = device.memory.allocate(2 * MIB, kind=HandleKind(kind))
    extent = device.memory.export(block.ptr, block.nbytes)
    with peer(refuse) as other:
        big = 4 * MIB
        for wrong in (
            changed(extent, nbytes=big, allocation_nbytes=big),
            changed(extent, offset=1),
            changed(extent, offset=big, nbytes=1, allocation_nbytes=2 * big),
            changed(extent, allocation_nbytes=64 * MIB),
        ):
            name, _ = refusal(other, wrong)
            assert name == "BoundsError", wrong
        assert refusal(other, extent)[0] == "opened"
        other.channel.send("end")
    device.memory.release(extent)
    device.memory.free(block)


@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_random_handles_are_refused(kind: str, device: Any, sim: Any) -> None:
    block = device.memory.allocate(2 * MIB, kind=HandleKind(kind))
    extent = device.memory.export(block.ptr, block.nbytes)
    payload = extent.chunks[0].payload
    fd = os.memfd_create("no device memory")
    with peer(refuse) as other:
        noise = payload[:1] + os.urandom(len(payload) - 1)
        wrong = changed(extent, payload=noise)
        if extent.fds:
            wrong = replace(wrong, fds=(fd,))
        name, text = refusal(other, wrong)
        assert name in {"DriverError", "CapabilityError", "HandleError", "BoundsError"}
        assert "remedy" in text
        assert refusal(other, extent)[0] == "opened"
        other.channel.send("end")
    os.close(fd)
    device.memory.release(extent)
    device.memory.free(block)


def die_holding(device: Any, sim: Any, channel: Channel) -> None:
    block = device.memory.allocate(2 * MIB, kind=HandleKind(channel.receive()), zero=True)
    with staging(device) as host:
        host.write(block.ptr, b"last words")
    channel.send_extent(device.memory.export(block.ptr, 64))
    channel.receive()


@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_memory_of_a_dead_exporter_stays_until_closed(kind: str, device: Any, sim: Any) -> None:
    with peer(die_holding) as other:
        other.channel.send(kind)
        extent = other.channel.receive_extent()
        opened = device.memory.open(extent)
        for fd in extent.fds:
            os.close(fd)
        other.kill()
        with staging(device) as host:
            assert host.read(opened.ptr, 10) == b"last words"
        device.memory.close(opened)
        other.process.returncode = 0
    assert sim.counter("live_mappings") == 0
    assert sim.used_bytes() == 0


@simulated()
def test_a_handle_of_a_dead_exporter_is_typed(device: Any, sim: Any) -> None:
    with peer(die_holding) as other:
        other.channel.send("legacy")
        extent = other.channel.receive_extent()
        other.kill()
        other.process.returncode = 0
        with pytest.raises(DevIPCError) as caught:
            device.memory.open(extent)
        assert caught.value.status is not None
        assert caught.value.remedy
