"""Runtimes that attach other memory, believe nobody, hang, or lack a call: what a user of memory sees."""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import replace
from typing import Any

import pytest

from backends.testing.helpers import changed, few_descriptors
from backends.testing.partners import asked, hold
from devipc.spi import (
    CapabilityError,
    CompletionTimeout,
    DriverError,
    HandleError,
    HandleKind,
    MemoryKind,
    ResourceExhausted,
    Verdict,
    call_with_deadline,
)

from .peers import Channel, environment, peer, run_body, simulated

KINDS = ["legacy", "vmm_fd", "pool", "dmabuf"]
MIB = 2**20


def raw(name: str, *args: Any) -> Any:
    """What another library of the process would call; the device is current."""
    return importlib.import_module("devipc_hip.driver").call(name, *args)


# --- runtimes that lie ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["legacy", "dmabuf"])
@simulated()
def test_other_memory_than_was_exported_is_refused(kind: str, device: Any, sim: Any) -> None:
    """A runtime that attaches other memory and calls it success (ROCm/rocm-systems 11892)."""
    block = device.memory.allocate(MIB, kind=HandleKind(kind))
    extent = device.memory.export(block.ptr, MIB)
    with peer(hold, {**os.environ, "DEVSIM_WRONG_ATTACH": "1"}) as other:
        name, code, text = asked(other, "open", extent)
        assert (name, code) == ("WrongMemory", "wrong_memory"), text
        assert asked(other, "live_mappings") == 0
        assert asked(other, "wrong_attaches") >= 3
        other.channel.send("end")
        other.finish()
    device.memory.release(extent)
    device.memory.free(block)


@pytest.mark.long
@simulated()
def test_an_attach_that_goes_wrong_now_and_then_is_tried_again(device: Any, sim: Any) -> None:
    block = device.memory.allocate(MIB)
    with peer(hold, {**os.environ, "DEVSIM_WRONG_ATTACH": "2"}) as other:
        extents = [device.memory.export(block.ptr, MIB)]
        assert asked(other, "open", extents[0]) == ["opened", "", ""]
        second = device.memory.allocate(MIB)
        extents.append(device.memory.export(second.ptr, MIB))
        assert asked(other, "open", extents[1]) == ["opened", "", ""]
        assert asked(other, "wrong_attaches") == 1
        assert asked(other, "live_mappings") == 2
        other.channel.send("end")
        other.finish()
    for extent in extents:
        device.memory.release(extent)
    for each in (block, second):
        device.memory.free(each)


@pytest.mark.long
@simulated()
def test_foreign_memory_of_another_size_is_refused(device: Any, sim: Any) -> None:
    """Memory from elsewhere has no canary; a handle that opens a whole block shows by its size."""
    with device.context:
        ptr = raw("hipMalloc", 4096)
        extent = device.memory.export(ptr, 4096)
        with peer(hold, {**os.environ, "DEVSIM_SMALL_OPEN": "1"}) as other:
            assert asked(other, "open", extent)[:2] == ["WrongMemory", "unknown_place"]
            assert asked(other, "live_mappings") == 0
            other.channel.send("end")
            other.finish()
        device.memory.release(extent)
        raw("hipFree", ptr)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_announced_sizes_are_not_believed(kind: str, device: Any, sim: Any) -> None:
    block = device.memory.allocate(MIB, kind=HandleKind(kind))
    extent = device.memory.export(block.ptr, 4096)
    size = extent.chunks[0].allocation_nbytes
    with peer(hold) as other:
        wrongs = [
            changed(extent, allocation_nbytes=4 * size, offset=2 * size),
            changed(extent, offset=size - 4095),
            changed(extent, allocation_nbytes=4 * size),
        ]
        for wrong in wrongs:
            assert asked(other, "open", wrong)[0] in ("BoundsError", "WrongMemory", "HandleError")
        assert asked(other, "live_mappings") == 0
        other.channel.send("end")
        other.finish()
    device.memory.release(extent)
    device.memory.free(block)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["vmm_fd", "pool", "dmabuf"])
@simulated()
def test_descriptors_of_something_else_are_refused(kind: str, device: Any, sim: Any) -> None:
    block = device.memory.allocate(MIB, kind=HandleKind(kind))
    extent = device.memory.export(block.ptr, 4096)
    fd = os.memfd_create("nothing")
    os.ftruncate(fd, 64 * MIB)
    for each in (fd, os.open("/dev/null", os.O_RDONLY)):
        with pytest.raises((HandleError, DriverError)):
            device.memory.open(replace(extent, fds=(each,)))
        os.close(each)
    device.memory.release(extent)
    device.memory.free(block)


@pytest.mark.parametrize("kind", ["vmm_fd", "pool", "dmabuf"])
@simulated()
def test_an_import_without_descriptors_says_so(kind: str, device: Any, sim: Any) -> None:
    """The runtime calls it an invalid value, while the one that it was given is the last."""
    block = device.memory.allocate(MIB, kind=HandleKind(kind))
    extent = device.memory.export(block.ptr, 4096)
    device.memory.close(device.memory.open(extent))
    sim.inject(f"{'hipMemPoolImportFromShareableHandle' if kind == 'pool' else OPENS[kind]}@1=1")
    with few_descriptors(1), pytest.raises(ResourceExhausted) as caught:
        device.memory.open(extent)
    assert caught.value.code == "fds"
    device.memory.close(device.memory.open(extent))
    device.memory.release(extent)
    device.memory.free(block)


@pytest.mark.long
@simulated()
def test_equal_process_numbers_are_named(device: Any, sim: Any) -> None:
    """Two containers whose processes have one number: the runtime takes the handle for its own (status 201)."""
    with peer(hold, {**os.environ, "DEVSIM_SAME_PID": "1"}) as other:
        for kind in ("legacy", "vmm_fd"):
            block = device.memory.allocate(MIB, kind=HandleKind(kind))
            extent = device.memory.export(block.ptr, MIB)
            name, code, text = asked(other, "open", extent)
            if kind == "legacy":
                assert (name, code) == ("DriverError", "invalid_context")
                assert "pid namespace" in text
            else:
                assert name == "opened"
                assert asked(other, "close") == "closed"
            device.memory.release(extent)
            device.memory.free(block)
        other.channel.send("end")
        other.finish()


# --- runtimes that hang or lack a call --------------------------------------------------------------------------------

OPENS = {
    "legacy": "hipIpcOpenMemHandle",
    "vmm_fd": "hipMemImportFromShareableHandle",
    "pool": "hipMemPoolImportPointer",
    "dmabuf": "hipImportExternalMemory",
}


def impatient(device: Any, sim: Any, channel: Channel) -> None:
    """Open what comes with a short deadline while the runtime does not return; then once more."""
    opening: Any = importlib.import_module("devipc_hip.opening")
    opening.OPEN_TIMEOUT_S = 1.0
    call, late_ms = channel.receive()
    extent = channel.receive_extent()
    device.memory.close(device.memory.open(extent))  # how descriptors are passed is known from here on
    opens = sim.counter("driver_opens")
    sim.inject(f"{call}@1={'hang' if late_ms < 0 else f'sleep:{late_ms}'}")
    started = time.monotonic()
    with pytest.raises(DriverError, match=f"{call} did not return within 1 s") as caught:
        device.memory.open(extent)
    assert time.monotonic() - started < 10.0
    assert caught.value.code == "driver_blocked"
    if late_ms > 0:
        deadline = time.monotonic() + 20.0
        while sim.counter("driver_opens") == opens:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.2)
        for counter in ("live_mappings", "live_physical"):
            assert sim.counter(counter) == 0, f"what came too late stayed open: {counter}"
    device.memory.close(device.memory.open(extent))
    channel.send("done")
    channel.receive()
    os._exit(0)  # a thread may stand in the runtime for ever


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


@pytest.mark.long
@pytest.mark.parametrize("late_ms", [-1, 2500])
@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_an_open_that_does_not_return_is_given_up(kind: str, late_ms: int, device: Any, sim: Any) -> None:
    block = device.memory.allocate(MIB, kind=HandleKind(kind))
    extent = device.memory.export(block.ptr, MIB)
    with peer(impatient) as other:
        if kind == "vmm_fd":
            device.memory.kinds()
        other.channel.send([OPENS[kind], late_ms])
        other.channel.send_extent(extent)
        assert other.channel.receive() == "done"
        other.channel.send()
    device.memory.release(extent)
    device.memory.free(block)


@pytest.mark.parametrize(
    ("missing", "version", "reason"),
    [
        (["hipMemGetHandleForAddressRange"], 71_500_000, "has no hipMemGetHandleForAddressRange"),
        ([], 70_200_001, "7.2 may crash"),
    ],
)
def test_where_dma_bufs_are_not_offered(missing: list[str], version: int, reason: str) -> None:
    arguments = {"reason": reason}
    run_body(no_dmabuf, arguments, environment({"missing": missing, "driver_version": version}))


def no_dmabuf(reason: str, device: Any, sim: Any) -> None:
    answer = device.memory.kinds()[HandleKind.DMABUF]
    assert answer.verdict is Verdict.NO
    assert reason in answer.reason
    with pytest.raises(CapabilityError, match=reason) as caught:
        device.memory.allocate(4096, kind=HandleKind.DMABUF)
    assert "legacy" in caught.value.remedy
    block = device.memory.allocate(4096)
    assert device.memory.describe(block.ptr).exportable == (HandleKind.LEGACY,)
    device.memory.free(block)


def allocate_and_export(device: Any, kind: HandleKind) -> None:
    block = device.memory.allocate(MIB, kind=kind)
    try:
        device.memory.export(block.ptr, 8)
    finally:
        device.memory.free(block)


@pytest.mark.long
@pytest.mark.parametrize(
    ("switch", "kind"),
    [("ipc", "legacy"), ("pools", "pool"), ("fd_handles", "vmm_fd"), ("vmm", "vmm_fd"), ("dmabuf", "dmabuf")],
)
@simulated()
def test_a_kind_that_the_platform_lacks(switch: str, kind: str, device: Any, sim: Any) -> None:
    sim.set(switch, 0)
    with pytest.raises(CapabilityError) as caught:
        allocate_and_export(device, HandleKind(kind))
    assert caught.value.remedy
    assert sim.counter("exports") == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "step", ["hipMemCreate@2=2", "hipMemAddressReserve@1=2", "hipMemMap@3=1", "hipMemSetAccess@1=1"]
)
@simulated()
def test_a_failing_step_undoes_the_others(step: str, device: Any, sim: Any) -> None:
    sim.inject(step)
    with pytest.raises((DriverError, ResourceExhausted)):
        device.memory.allocate_grown([MIB] * 3)
    sim.clear_faults()
    assert sim.live() == sim.counter("live_streams")
    block = device.memory.allocate_grown([MIB] * 3)
    device.memory.free(block)


@pytest.mark.long
@simulated()
def test_the_page_behind_an_allocation_is_not_given_out(device: Any, sim: Any) -> None:
    block = device.memory.allocate(MIB)
    info = device.memory.describe(block.ptr + block.nbytes)
    assert (info.kind, info.exportable) == (MemoryKind.UNKNOWN, ())
    with pytest.raises(CapabilityError, match="devipc's own"):
        device.memory.export(block.ptr + block.nbytes, 8)
    device.memory.free(block)
