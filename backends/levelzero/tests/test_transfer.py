"""Streams, copies and host memory of one process."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from backends.testing.helpers import pattern, staging
from devipc.spi import CapabilityError, ClosedError, DeviceLostError, DriverError, ResourceExhausted, UsageError

from .peers import simulated

MIB = 2**20


def u64(*rows: Any) -> Any:
    return np.ascontiguousarray(rows, dtype=np.uint64)


@simulated(quick=True)
def test_copies_of_every_shape(device: Any, sim: Any) -> None:
    transfer = device.transfer
    block = device.memory.allocate(4 * MIB, zero=True)
    with staging(device) as host:
        assert host.read(block.ptr, 4096) == bytes(4096)
        data = pattern(3, 8192)
        host.view[:8192] = data
        transfer.copy(host.stream, block.ptr, host.device_ptr, 0)
        dst = u64(block.ptr, block.ptr + 10_000, block.ptr + 20_000)
        src = u64(host.device_ptr, host.device_ptr + 100, host.device_ptr + 200)
        transfer.copy_batch(host.stream, dst, src, u64(100, 0, 100))
        transfer.synchronize_stream(host.stream)
        assert host.read(block.ptr, 100) == data[:100]
        assert host.read(block.ptr + 10_000, 100) == bytes(100)
        host.view[:8192] = data
        transfer.copy(host.stream, block.ptr + MIB, host.device_ptr, 8192)
        transfer.copy_strided(host.stream, u64((block.ptr + 2 * MIB, block.ptr + MIB, 1000, 64, 32, 7)))
        for row in range(7):
            assert host.read(block.ptr + 2 * MIB + 1000 * row, 32) == data[64 * row :][:32]
            assert host.read(block.ptr + 2 * MIB + 1000 * row + 32, 8) == bytes(8)
        assert sim.calls("zeCommandListAppendMemoryCopyRegion") == 1
        transfer.copy_strided(host.stream, u64((block.ptr, block.ptr + MIB, 64, 64, 64, 16)))  # contiguous: one copy
        assert sim.calls("zeCommandListAppendMemoryCopyRegion") == 1
        assert host.read(block.ptr, 1024) == data[:1024]
    device.memory.free(block)


@simulated()
def test_pitches_beyond_32_bits_are_served_row_by_row(device: Any, sim: Any) -> None:
    far = 5 * 2**30
    block = device.memory.allocate(6 * 2**30)
    with staging(device) as host:
        host.view[:8] = b"onetwo!!"
        copies = u64((block.ptr, host.device_ptr, far, 3, 3, 2))
        device.transfer.copy_strided(host.stream, copies)
        device.transfer.synchronize_stream(host.stream)
        assert host.read(block.ptr + far, 3) == b"two"
    assert sim.calls("zeCommandListAppendMemoryCopyRegion") == 0
    device.memory.free(block)


@simulated()
def test_wrong_arguments_reach_no_driver(device: Any, sim: Any) -> None:
    transfer, calls = device.transfer, sim.calls
    with staging(device) as host:
        before = calls("zeCommandListAppend*")
        ptr = host.device_ptr
        with pytest.raises(UsageError, match="overlap"):
            transfer.copy_strided(host.stream, u64((ptr, ptr, 8, 64, 16, 2)))
        with pytest.raises(UsageError, match="uint64"):
            transfer.copy_strided(host.stream, np.zeros((1, 6), dtype=np.int32))
        with pytest.raises(UsageError):
            transfer.copy(host.stream, ptr, ptr, -1)
        with pytest.raises(UsageError):
            transfer.copy(object(), ptr, ptr, 1)
        for wrong in ("stream", -1, 0, True, 2**64, None):
            with pytest.raises(UsageError):
                transfer.wrap_stream(wrong)
        assert calls("zeCommandListAppend*") == before


@simulated()
def test_a_copy_out_of_bounds_is_the_drivers_error(device: Any, sim: Any) -> None:
    block = device.memory.allocate(2 * MIB)
    with staging(device) as host:
        with pytest.raises(DriverError) as caught:
            device.transfer.copy(host.stream, block.ptr + 2 * MIB - 4, host.device_ptr, 8)
        assert caught.value.device == device.info.uuid
        assert caught.value.status is not None
        assert caught.value.status.call == "zeCommandListAppendMemoryCopy"
        assert caught.value.status.name == "ERROR_INVALID_ARGUMENT"
        host.write(block.ptr, b"goes on")
        assert host.read(block.ptr, 7) == b"goes on"
    device.memory.free(block)


@simulated()
def test_streams_are_borrowed_and_destroyed(device: Any, sim: Any) -> None:
    transfer = device.transfer
    own = transfer.create_stream(priority=-1)
    borrowed = transfer.wrap_stream(own.handle)
    assert transfer.wrap_stream(own.handle) is borrowed
    assert transfer.wrap_stream(borrowed) is borrowed
    assert not transfer.is_capturing(borrowed)
    transfer.synchronize_stream(borrowed)
    transfer.destroy_stream(borrowed)
    assert sim.counter("live_streams") == 1
    transfer.destroy_stream(own)
    for call in (transfer.destroy_stream, transfer.synchronize_stream, transfer.is_capturing):
        with pytest.raises(UsageError, match="destroyed"):
            call(own)
    transfer.destroy_stream(transfer.create_stream(priority=1))


@simulated()
def test_threads_share_a_stream(device: Any, sim: Any) -> None:
    """Level Zero forbids two threads in one list: calls take turns."""
    block = device.memory.allocate(2 * MIB)
    failures: list[BaseException] = []

    def run(host: Any, number: int) -> None:
        try:
            for at in range(50):
                device.transfer.copy(host.stream, block.ptr + 4096 * number + at, host.device_ptr + at, 1)
        except BaseException as error:
            failures.append(error)

    with staging(device) as host:
        host.view[:64] = pattern(5, 64)
        threads = [threading.Thread(target=run, args=(host, number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        for number in range(8):
            assert host.read(block.ptr + 4096 * number, 50) == pattern(5, 64)[:50]
            host.view[:64] = pattern(5, 64)
    device.memory.free(block)


@simulated()
def test_host_memory_is_imported_in_steps(device: Any, sim: Any) -> None:
    import mmap

    from devipc_levelzero.sysman import Management
    from devipc_levelzero.transfer import LevelZeroTransfer

    transfer = LevelZeroTransfer(device.context, Management(0, b"", ""), pin_step_nbytes=4096)
    memory = mmap.mmap(-1, 4 * 4096)
    pin = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(pin)
    registration = transfer.register_host(address, 4 * 4096)
    assert registration.device_ptr == address
    assert sim.counter("live_registrations") == 4
    block = device.memory.allocate(2 * MIB)
    stream = transfer.create_stream()
    memory[4000:8300] = pattern(1, 4300)
    transfer.copy(stream, block.ptr, address + 4000, 4300)  # across two borders
    transfer.copy(stream, address, block.ptr, 4300)
    transfer.destroy_stream(stream)
    assert memory[:4000] == pattern(1, 4300)[:4000]
    for wrong in ((address + 1, 4096), (address, 0)):
        with pytest.raises(UsageError):
            transfer.register_host(*wrong)
    with pytest.raises(DriverError, match="host memory"):
        transfer.register_host(address, 4096)
    transfer.unregister_host(registration)
    with pytest.raises(UsageError, match="unregistered before"):
        transfer.unregister_host(registration)
    device.memory.free(block)
    del pin
    memory.close()


@simulated(pin_total_mb=2)
def test_a_limit_on_host_memory_is_named(device: Any, sim: Any) -> None:
    with staging(device), pytest.raises(ResourceExhausted, match="RLIMIT_MEMLOCK") as caught:
        with staging(device, 4 * MIB):
            pass
    assert "ulimit -l" in caught.value.remedy
    assert sim.counter("live_registrations") == 0


@simulated()
def test_a_lost_device_says_so_and_can_be_closed(device: Any, sim: Any) -> None:
    block = device.memory.allocate(MIB)
    marker = device.transfer.create_marker()
    stream = device.transfer.create_stream()
    device.transfer.record(marker, stream)
    waiting: list[BaseException] = []
    sim.stall()
    device.transfer.record(marker, stream)

    def wait() -> None:
        try:
            device.transfer.synchronize_stream(stream)
        except BaseException as error:
            waiting.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    sim.lose(0, 0x70000001)
    thread.join(10)
    assert isinstance(waiting[0], DeviceLostError)
    calls: list[Callable[[], object]] = [
        lambda: device.memory.allocate(1),
        lambda: device.memory.export(block.ptr, 8),
        lambda: device.transfer.query_marker(marker),
        lambda: device.transfer.record(marker, stream),
        lambda: device.transfer.synchronize_stream(stream),
    ]
    for call in calls:
        with pytest.raises(DeviceLostError) as caught:
            call()
        assert caught.value.remedy
        assert caught.value.device == device.info.uuid
    with pytest.raises(DeviceLostError):
        device.transfer.destroy_stream(stream)
    device.transfer.destroy_marker(marker)
    device.memory.free(block)


@simulated(bare=True)
def test_a_closed_device_refuses(sim: Any) -> None:
    from devipc_levelzero.backend import LevelZeroBackend

    device = LevelZeroBackend().open_device()
    stream = device.transfer.create_stream()
    device.transfer.destroy_stream(stream)
    device.close()
    device.close()
    for call in (
        device.transfer.create_stream,
        device.transfer.create_marker,
        device.transfer.memory_info,
        lambda: device.memory.allocate(1),
        lambda: device.memory.describe(4096),
        device.sync.events.create,
    ):
        with pytest.raises(ClosedError):
            call()
    assert sim.live() == 0
    assert sim.counter("live_contexts") == 0


@simulated()
def test_copies_go_round_over_the_copy_engines(device: Any, sim: Any) -> None:
    assert (device.context.ordinal, device.context.copies_only) == (1, True)
    assert "copy engines (group 1)" in device.capabilities()["transfer"].reason


@simulated(bare=True, ZES_ENABLE_SYSMAN="0")
def test_free_memory_needs_the_management_interface(sim: Any) -> None:
    """With a loader that has no start of its own for it; newer ones do not ask for the variable."""
    from devipc_levelzero import driver
    from devipc_levelzero.backend import LevelZeroBackend

    device = LevelZeroBackend().open_device()
    if driver.manages():
        assert device.transfer.memory_info().total_nbytes > 0
    else:
        with pytest.raises(CapabilityError, match="management interface is off") as caught:
            device.transfer.memory_info()
        assert "ZES_ENABLE_SYSMAN=1" in caught.value.remedy
    device.close()
