"""What is undone when memory is not to be had, and what is said when that fails too, on the simulated driver."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import pytest

from backends.testing.undoing import check_allocations, check_opens, check_same, interrupted
from devipc.spi import DevIPCError, DriverError, HandleKind, ResourceExhausted

from .peers import Channel, peer, simulated

KINDS = ["legacy", "pool", "vmm_fd"]


STATUSES = [999, *(pytest.param(status, marks=[pytest.mark.long, pytest.mark.every]) for status in (1, 801))]
"""A status of no meaning, and those that say that an argument is wrong and that something is not supported."""


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_what_stays_of_an_opening_is_said(kind: str, status: int, device: Any, sim: Any) -> None:
    check_opens(device, kind, status=status)


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_what_stays_of_an_allocation_is_said(kind: str, status: int, device: Any, sim: Any) -> None:
    check_allocations(kind, status=status)


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("kind", KINDS)
@simulated()
def test_what_stays_of_a_first_opening_is_said(kind: str, status: int, device: Any, sim: Any) -> None:
    check_opens(device, kind, status=status, cold=True)


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("kind", [*KINDS, None])
@simulated()
def test_what_stays_of_a_first_allocation_is_said(kind: str | None, status: int, device: Any, sim: Any) -> None:
    """Where none is named, a kind that cannot be had is not passed over when something of it stays."""
    check_allocations(kind, status=status, cold=True)


@simulated()
def test_what_stays_pinned_is_said(device: Any, sim: Any) -> None:
    """Host memory that the driver does not let go of, of a registration that fails, and of one that is undone."""
    with peer(keep_pinned) as other:
        assert other.channel.receive() == "done"
        other.channel.send()


def keep_pinned(device: Any, sim: Any, channel: Channel) -> None:
    from devipc_cuda.transfer import CudaTransfer

    transfer = CudaTransfer(device.context, pin_step_nbytes=4096)
    memory = mmap.mmap(-1, 4 * 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    sim.inject("cuMemHostRegister_v2@3=2")
    sim.inject("cuMemHostUnregister@1=999")
    with pytest.raises(ResourceExhausted) as caught:
        transfer.register_host(address, 4 * 4096)
    sim.clear_faults()
    assert ["cuMemHostUnregister" in str(one) for one in caught.value.left] == [True]
    assert not caught.value.retryable
    assert sim.counter("live_registrations") == 1
    registration = transfer.register_host(address + 2 * 4096, 2 * 4096)
    sim.inject("cuMemHostUnregister@*=999")
    with pytest.raises(DriverError) as refused:
        transfer.unregister_host(registration)
    assert len(refused.value.left) == 1
    channel.send("done")
    channel.receive()
    os._exit(0)  # with what stays pinned


@simulated()
def test_what_is_not_unmapped_keeps_its_addresses(device: Any, sim: Any) -> None:
    """Nothing else is ever mapped there."""
    with peer(keep_addresses) as other:
        assert other.channel.receive() == "done"
        other.channel.send()


def keep_addresses(device: Any, sim: Any, channel: Channel) -> None:
    block = device.memory.allocate(2 * 2**20, kind=HandleKind.VMM_FD)
    sim.inject("cuMemUnmap@1=999")
    with pytest.raises(DevIPCError, match="cuMemUnmap"):
        device.memory.free(block)
    assert (sim.counter("live_maps"), sim.calls("cuMemAddressFree")) == (1, 0)
    channel.send("done")
    channel.receive()
    os._exit(0)  # with what stays mapped


@pytest.mark.parametrize(("kind", "name"), [("vmm_fd", "cuMemRelease"), ("pool", "cuStreamSynchronize")])
@simulated()
def test_an_interrupt_of_an_allocation_leaves_nothing(kind: str, name: str, device: Any, sim: Any) -> None:
    device.memory.free(device.memory.allocate(1, kind=HandleKind(kind)))
    from devipc_cuda import driver

    before = sim.report().counters
    with interrupted(driver, name), pytest.raises(KeyboardInterrupt):
        device.memory.allocate(1, kind=HandleKind(kind))
    check_same(before, sim)


@simulated()
def test_an_interrupt_of_an_export_leaves_nothing(device: Any, sim: Any) -> None:
    block = device.memory.allocate(1, kind=HandleKind.VMM_FD)
    from devipc_cuda import driver

    before = sim.report().counters
    with interrupted(driver, "cuMemExportToShareableHandle", before=True), pytest.raises(KeyboardInterrupt):
        device.memory.export(block.ptr, block.nbytes)
    check_same(before, sim)
    device.memory.free(block)


@simulated()
def test_an_interrupt_of_freeing_skips_no_step(device: Any, sim: Any) -> None:
    from devipc_cuda import driver

    before = sim.counter("live_pools")
    block = device.memory.allocate(1, kind=HandleKind.POOL)
    with interrupted(driver, "cuMemFreeAsync"), pytest.raises(KeyboardInterrupt):
        device.memory.free(block)
    assert sim.counter("live_pools") == before
