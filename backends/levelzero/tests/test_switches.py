"""What a user sees when a driver does things in its own way: each switch of the simulated driver for this vendor."""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.testing.helpers import staging
from devipc.spi import (
    CapabilityError,
    DriverError,
    HandleKind,
)

from .peers import OPTIONAL, ROOT, Channel, peer, simulated
from .test_memory import MIB, share_one
from .test_sync import ask, asked


def test_every_switch_of_this_vendor_is_set_in_a_test() -> None:
    definitions = (ROOT / "tests/simulator/levelzero/own_switches.def").read_text()
    switches = set(re.findall(r"^SWITCH\((\w+),", definitions, re.MULTILINE))
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert len(switches) == 10
    assert {name for name in switches if not re.search(rf"\b{name}=", text)} == set()


def share_event(device: Any) -> None:
    """Let a peer follow an event of ours."""
    event = device.sync.events.create()
    with staging(device) as host, peer(ask) as other:
        other.channel.send(device.sync.events.export(event).hex())
        assert other.channel.receive() == "open"
        assert not asked(other)
        device.sync.events.record(event, host.stream)
        host.transfer.synchronize_stream(host.stream)
        assert asked(other)
        other.channel.send("end")
    device.sync.events.destroy(event)


# --- handles ----------------------------------------------------------------------------------------------------------


@simulated(handle_format=0)
def test_handles_of_the_older_form(device: Any, sim: Any) -> None:
    share_one(device)
    share_event(device)


@simulated(handle_format=0, fd_mode=1)
def test_a_driver_that_closes_what_it_is_given(device: Any, sim: Any) -> None:
    share_one(device)
    share_event(device)


@simulated(fd_mode=1, handle_random=1)
def test_an_opaque_driver_that_closes_what_it_is_given(device: Any, sim: Any) -> None:
    share_one(device)
    share_event(device)


@simulated(pidfd=0)
def test_a_driver_that_may_not_look_into_other_processes(device: Any, sim: Any) -> None:
    """As under a restricted ptrace: the descriptor came over the socket."""
    share_one(device)
    share_event(device)


@simulated(pid_clash=1)
def test_equal_process_numbers_in_two_namespaces(device: Any, sim: Any) -> None:
    """The driver would look into the wrong process; it never gets to."""
    share_one(device)
    share_event(device)


@simulated(handle_interior=0)
def test_the_driver_is_given_the_base(device: Any, sim: Any) -> None:
    share_one(device)


def collide(device: Any, sim: Any, channel: Channel) -> None:
    """Receive a descriptor, give it the number that it has in the exporter, and open; then open as it came."""
    from devipc_levelzero import driver
    from devipc_levelzero.handles import number_in, to_handle

    extent = channel.receive_extent()
    raw = extent.chunks[0].payload[26:]
    number = number_in(raw)
    assert number > 300
    os.dup2(extent.fds[0], number, inheritable=False)
    os.close(extent.fds[0])
    opened = device.memory.open(replace(extent, fds=(number,)))
    with staging(device) as host:
        channel.send(host.read(opened.ptr, 9).decode())
    device.memory.close(opened)
    out = ctypes.c_void_p()
    status = driver.attempt(
        "zeMemOpenIpcHandle", device.context.handle, device.context.device, to_handle(raw), 0, ctypes.byref(out)
    )
    os.close(number)
    channel.send(status)


@simulated(pidfd=0)
def test_a_descriptor_with_the_exporters_number(device: Any, sim: Any) -> None:
    """By chance a descriptor can have the same number here; the driver would then go to the exporter for it."""
    many = [os.open("/dev/null", os.O_RDONLY) for _ in range(300)]
    block = device.memory.allocate(MIB)
    extent = device.memory.export(block.ptr, MIB)
    for fd in many:
        os.close(fd)
    with staging(device) as host, peer(collide) as other:
        host.write(block.ptr, b"collision")
        other.channel.send_extent(extent)
        assert other.channel.receive() == "collision"
        assert other.channel.receive() == 0x78000004  # what a handle that is not patched leads to
    device.memory.release(extent)
    device.memory.free(block)


@simulated(high_addresses=0)
def test_addresses_of_the_lower_half(device: Any, sim: Any) -> None:
    block = device.memory.allocate(MIB)
    assert block.ptr < 2**63
    device.memory.free(block)
    share_one(device)


@simulated(ipc_claim=0)
def test_a_claim_that_says_no(device: Any, sim: Any) -> None:
    """A property is no verdict: both work."""
    assert "says no" in device.memory.kinds()[HandleKind.OPAQUE].reason
    share_one(device)
    share_event(device)


@simulated(ipc_claim=3, ipc=0, ipc_events=0)
def test_a_claim_that_says_yes(device: Any, sim: Any) -> None:
    assert "says yes" in device.memory.kinds()[HandleKind.OPAQUE].reason
    block = device.memory.allocate(MIB)
    for call in (lambda: device.memory.export(block.ptr, 8), device.sync.events.create):
        with pytest.raises(CapabilityError) as caught:
            call()
        assert caught.value.status is not None
        assert caught.value.status.value == 0x78000003
        assert caught.value.remedy
    device.memory.free(block)


# --- calls that are missing -------------------------------------------------------------------------------------------


@simulated(api_version=0x10003)
def test_the_oldest_driver(device: Any, sim: Any) -> None:
    """Where nothing can be put back, freeing the memory and destroying the pool do it."""
    assert all(sim.calls(name) == 0 for name in OPTIONAL)
    share_one(device)
    share_event(device)


@simulated(
    missing="zeDevicePciGetPropertiesExt,zeDeviceGetStatus,zeDeviceGetMemoryProperties,zeDriverGetIpcProperties,"
    "zeMemPutIpcHandle,zeMemGetIpcHandleWithProperties,zeMemGetFileDescriptorFromIpcHandleExp,zeEventPoolPutIpcHandle"
)
def test_calls_that_a_driver_does_not_have(device: Any, sim: Any) -> None:
    assert device.info.pci == ""
    assert device.info.total_nbytes == 0
    assert "no answer" in device.memory.kinds()[HandleKind.OPAQUE].evidence
    share_one(device)
    share_event(device)


@simulated(missing="zexDriverImportExternalPointer")
def test_no_import_of_host_memory(device: Any, sim: Any) -> None:
    with pytest.raises(CapabilityError, match="does not have zexDriverImportExternalPointer") as caught:
        device.transfer.register_host(4096 * 1024, 4096)
    assert "allocate_host" in caught.value.remedy


@simulated(ZE_ENABLE_LOADER_INTERCEPT="1")
def test_a_loader_that_wraps_handles(device: Any, sim: Any) -> None:
    """Extension functions get the driver's own handle; with the loader's they fail."""
    share_one(device)
    assert sim.calls("zexDriverImportExternalPointer") > 0


# --- order, engines, host memory --------------------------------------------------------------------------------------


def raw_copy(device: Any, stream: Any, dst: int, src: int, nbytes: int) -> None:
    from devipc_levelzero import driver

    driver.call("zeCommandListAppendMemoryCopy", stream.handle, dst, src, nbytes, None, 0, None)


@simulated(unordered=1)
def test_work_between_two_barriers_is_in_no_order(device: Any, sim: Any) -> None:
    """What this package submits is in order all the same; what another submits without barriers is not."""
    transfer = device.transfer
    block = device.memory.allocate(MIB)
    with staging(device) as host:
        host.view[:8] = b"firstthe"
        transfer.copy(host.stream, block.ptr, host.device_ptr, 8)
        for row in range(20):  # each copy reads what the one before wrote
            transfer.copy(host.stream, block.ptr + 8 * row + 8, block.ptr + 8 * row, 8)
        marker = transfer.create_marker()
        transfer.record(marker, host.stream)
        transfer.synchronize_stream(host.stream)
        assert transfer.query_marker(marker)
        assert host.read(block.ptr + 160, 8) == b"firstthe"
        transfer.destroy_marker(marker)
        host.view[:12] = b"one.two.thr."
        raw_copy(device, host.stream, block.ptr, host.device_ptr, 4)
        raw_copy(device, host.stream, block.ptr, host.device_ptr + 4, 4)
        transfer.synchronize_stream(host.stream)
        assert host.read(block.ptr, 4) == b"one."
    device.memory.free(block)
    share_one(device)
    share_event(device)


@simulated(copy_groups=0)
def test_no_engine_that_only_copies(device: Any, sim: Any) -> None:
    assert (device.context.ordinal, device.context.copies_only) == (0, False)
    assert "compute engine, since no group only copies" in device.capabilities()["transfer"].reason
    share_one(device)


@simulated(copy_groups=1)
def test_one_engine_that_only_copies(device: Any, sim: Any) -> None:
    assert (device.context.ordinal, device.context.copies_only) == (1, True)
    share_one(device)


@simulated(private_copies=1)
def test_copies_behind_unregistered_pointers(device: Any, sim: Any) -> None:
    """Such a copy ends well, and its bytes are nowhere; registered memory is the device's own view of it."""
    block = device.memory.allocate(MIB)
    plain = ctypes.create_string_buffer(b"before--", 8)
    with staging(device) as host:
        host.write(block.ptr, b"and after")
        raw_copy(device, host.stream, ctypes.addressof(plain), block.ptr, 8)
        host.transfer.synchronize_stream(host.stream)
        assert plain.raw == b"before--"
        assert host.read(block.ptr, 9) == b"and after"
    device.memory.free(block)
    share_one(device)


@simulated(private_copies=1, host_register=0)
def test_no_registration_rather_than_private_copies(device: Any, sim: Any) -> None:
    with pytest.raises(CapabilityError, match="cannot reach memory of this process"), staging(device):
        pass
    assert sim.counter("copies") == 0


@simulated(sysman=0)
def test_no_management(device: Any, sim: Any) -> None:
    with pytest.raises(CapabilityError, match="management interface is off") as caught:
        device.transfer.memory_info()
    assert caught.value.status is not None
    assert caught.value.status.value == 0x78000001
    share_one(device)


@simulated(count_zero_abort=1)
def test_nothing_is_asked_for_zero_things(device: Any, sim: Any) -> None:
    """Some drivers end the process then."""
    import numpy as np

    with staging(device) as host:
        nothing, none = np.zeros((1, 6), dtype=np.uint64), np.zeros((0, 6), dtype=np.uint64)
        device.transfer.copy(host.stream, host.device_ptr, host.device_ptr, 0)
        device.transfer.copy_strided(host.stream, nothing)
        device.transfer.copy_strided(host.stream, none)
        device.transfer.copy_batch(host.stream, none[:, 0].copy(), none[:, 0].copy(), none[:, 0].copy())
        device.transfer.synchronize_stream(host.stream)
    share_event(device)


@simulated(peer=0)
def test_a_device_that_cannot_reach_the_exporters(device: Any, sim: Any) -> None:
    from devipc_levelzero.backend import LevelZeroBackend

    backend = LevelZeroBackend()
    other = backend.open_device(backend.devices()[1].uuid)
    block = device.memory.allocate(MIB)
    extent = device.memory.export(block.ptr, MIB)
    with pytest.raises(DriverError) as caught:
        other.memory.open(extent)
    assert caught.value.device == other.info.uuid
    device.memory.release(extent)
    device.memory.free(block)
    other.close()
