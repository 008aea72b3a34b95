"""Streams, copies of every shape, host registration in steps, and markers."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import random
from typing import Any

import pytest
from devipc_cuda.host_memory import HostMemory, Rectangle

from backends.testing.helpers import STAGING_NBYTES, pattern, staging
from devipc.spi import CapabilityError, DriverError, HandleKind, ResourceExhausted, UsageError

from .peers import simulated

np: Any = importlib.import_module("numpy")


def array(rows: list[Any]) -> Any:
    return np.array(rows, dtype=np.uint64)


@simulated()
def test_plain_copies(device: Any, sim: Any) -> None:
    block = device.memory.allocate(STAGING_NBYTES, kind=HandleKind.LEGACY)
    with staging(device) as host:
        data = pattern(1, 5000)
        host.write(block.ptr + 3, data)
        host.transfer.copy(host.stream, block.ptr + 10_000, block.ptr + 3, 5000)
        assert host.read(block.ptr + 10_000, 5000) == data
        calls = sim.calls("cuMemcpy*")
        host.transfer.copy(host.stream, block.ptr, block.ptr, 0)
        with pytest.raises(UsageError):
            host.transfer.copy(host.stream, block.ptr, block.ptr, -1)
        assert sim.calls("cuMemcpy*") == calls
    device.memory.free(block)


@simulated()
def test_strided_copies_match_numpy(device: Any, sim: Any) -> None:
    size, random_ = 2**18, random.Random(7)
    block = device.memory.allocate(size, kind=HandleKind.LEGACY)
    expected = np.zeros(size, dtype=np.uint8)
    with staging(device) as host:
        host.write(block.ptr, bytes(size))
        source = pattern(3, STAGING_NBYTES)
        host.view[:] = source
        bytes_ = np.frombuffer(source, dtype=np.uint8)
        rows = []
        for slot in range(40):
            width, height = random_.randint(1, 300), random_.randint(1, 9)
            dst_pitch, src_pitch = width + random_.randint(0, 90), width + random_.randint(0, 90)
            dst, src = slot * 6000 + random_.randrange(2000), random_.randrange(STAGING_NBYTES - 4000)
            rows.append((block.ptr + dst, host.device_ptr + src, dst_pitch, src_pitch, width, height))
            for row in range(height):
                at = dst + row * dst_pitch
                expected[at : at + width] = bytes_[src + row * src_pitch : src + row * src_pitch + width]
        rows.append((block.ptr, host.device_ptr, 5, 5, 0, 5))
        rows.append((block.ptr, host.device_ptr, 5, 5, 5, 0))
        host.transfer.copy_strided(host.stream, array(rows))
        host.transfer.synchronize_stream(host.stream)
        assert host.read(block.ptr, size) == expected.tobytes()
    device.memory.free(block)


@simulated()
def test_contiguous_and_single_rows_are_flat_copies(device: Any, sim: Any) -> None:
    block = device.memory.allocate(2**16, kind=HandleKind.LEGACY)
    with staging(device) as host:
        strided, flat = sim.calls("cuMemcpy2DAsync"), sim.calls("cuMemcpyAsync")
        host.transfer.copy_strided(
            host.stream,
            array([(block.ptr, host.device_ptr, 64, 64, 64, 16), (block.ptr, host.device_ptr, 999, 1, 64, 1)]),
        )
        assert sim.calls("cuMemcpy2DAsync") == strided
        assert sim.calls("cuMemcpyAsync") == flat + 2
        host.transfer.copy_strided(host.stream, array([(block.ptr, host.device_ptr, 65, 64, 64, 16)]))
        assert sim.calls("cuMemcpy2DAsync") == strided + 1
    device.memory.free(block)


@simulated()
def test_a_pitch_above_the_limit_goes_row_by_row(device: Any, sim: Any) -> None:
    block = device.memory.allocate(2**16, kind=HandleKind.LEGACY)
    device.transfer._max_pitch = 128
    with staging(device) as host:
        data = pattern(4, 2000)
        host.write(block.ptr, data)
        host.transfer.copy_strided(host.stream, array([(block.ptr + 4096, block.ptr, 150, 200, 100, 5)]))
        assert sim.calls("cuMemcpy2DAsync") == 0
        found = host.read(block.ptr + 4096, 750)
        for row in range(5):
            assert found[row * 150 : row * 150 + 100] == data[row * 200 : row * 200 + 100]
    device.memory.free(block)


@simulated()
def test_malformed_arrays_are_refused(device: Any, sim: Any) -> None:
    with staging(device) as host:
        good = array([(1, 2, 3, 4, 5, 6)])
        for wrong in (good.astype(np.int64), good[:, :5], np.asfortranarray(np.vstack([good] * 3)), good[0]):
            with pytest.raises(UsageError, match="ascontiguousarray"):
                host.transfer.copy_strided(host.stream, wrong)
        with pytest.raises(UsageError, match="overlap"):
            host.transfer.copy_strided(host.stream, array([(1, 2, 10, 20, 15, 2)]))
        with pytest.raises(UsageError):
            host.transfer.copy_batch(host.stream, array([1, 2]), array([1]), array([1, 2]))
        no_stream: Any = object()
        with pytest.raises(UsageError):
            host.transfer.copy(no_stream, 1, 2, 3)
        assert sim.calls("cuMemcpy*") == 0


def batch(device: Any, sim: Any) -> None:
    block = device.memory.allocate(2**16, kind=HandleKind.LEGACY)
    with staging(device) as host:
        source = pattern(5, STAGING_NBYTES // 2)
        data = source[:4000]
        host.view[: len(source)] = source
        dst = array([block.ptr + i * 500 for i in range(8)])
        src = array([host.device_ptr + i * 400 for i in range(8)])
        nbytes = array([400, 400, 0, 400, 400, 1, 400, 400])
        host.transfer.copy_batch(host.stream, dst, src, nbytes)
        dst[:] = 0
        host.transfer.synchronize_stream(host.stream)
        found = host.read(block.ptr, 4000)
        for i, n in enumerate(nbytes.tolist()):
            assert found[i * 500 : i * 500 + n] == data[i * 400 : i * 400 + n]
        host.transfer.copy_batch(host.stream, dst[:0], src[:0], nbytes[:0])
        host.view[: len(source)] = source
        rows = array([(block.ptr + 8192 + i * 500, host.device_ptr + 8 * i, 50, 32, 24, 10) for i in range(70)])
        host.transfer.copy_strided(host.stream, rows)
        rows[:] = 0
        host.transfer.synchronize_stream(host.stream)
        found = host.read(block.ptr + 8192, 35000)
        for i in range(70):
            for row in range(10):
                at = 8 * i + 32 * row
                assert found[i * 500 + 50 * row : i * 500 + 50 * row + 24] == source[at : at + 24]
    device.memory.free(block)


def batch_in_one_call(device: Any, sim: Any) -> None:
    batch(device, sim)
    assert sim.calls("cuMemcpyBatchAsync") == 1
    assert sim.calls("cuMemcpy3DBatchAsync") == 1
    assert (sim.calls("cuMemcpyAsync"), sim.calls("cuMemcpy2DAsync")) == (2, 0)  # reads of the test


@simulated(count_zero_abort=1)
def test_a_batch_is_one_call(device: Any, sim: Any) -> None:
    batch_in_one_call(device, sim)


@simulated(count_zero_abort=1, driver_version=12080)
def test_a_batch_is_one_call_of_the_older_form(device: Any, sim: Any) -> None:
    batch_in_one_call(device, sim)


@simulated(driver_version=12040)
def test_without_the_batch_call_it_is_a_loop(device: Any, sim: Any) -> None:
    batch(device, sim)
    assert sim.calls("cuMemcpyBatchAsync") == 0
    assert set(device.transfer._submission.missing) == {"cuMemcpyBatchAsync", "cuMemcpy3DBatchAsync"}
    batch(device, sim)


@simulated(fault="cuMemcpyBatchAsync*@*=801,cuMemcpy3DBatchAsync*@*=801")
def test_a_refused_batch_is_a_loop_and_remembered(device: Any, sim: Any) -> None:
    batch(device, sim)
    batch(device, sim)
    assert sim.calls("cuMemcpyBatchAsync") == 1
    assert sim.calls("cuMemcpy3DBatchAsync") == 1


@simulated()
def test_a_capturing_stream_gets_no_batch(device: Any, sim: Any) -> None:
    block = device.memory.allocate(2**16, kind=HandleKind.LEGACY)
    with staging(device) as host, device.context:
        cu = importlib.import_module("cuda.bindings.driver")
        cu.cuStreamBeginCapture(host.stream.native, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        rows = array([(block.ptr + i * 500, host.device_ptr, 50, 32, 24, 10) for i in range(6)])
        host.transfer.copy_strided(host.stream, rows)
        assert (sim.calls("cuMemcpy2DAsync"), sim.calls("cuMemcpy3DBatchAsync")) == (6, 0)
        status, graph = cu.cuStreamEndCapture(host.stream.native)
        assert int(status) == 0
        cu.cuGraphDestroy(graph)
    device.memory.free(block)


@simulated()
def test_a_wrong_address_in_a_batch_is_named_by_the_loop(device: Any, sim: Any) -> None:
    block = device.memory.allocate(4096, kind=HandleKind.LEGACY)
    device.memory.free(block)
    with staging(device) as host, pytest.raises(DriverError) as caught:
        host.transfer.copy_batch(host.stream, array([block.ptr] * 2), array([host.device_ptr] * 2), array([8, 8]))
    assert caught.value.status is not None
    assert caught.value.status.call == "cuMemcpyAsync"


@simulated()
def test_streams_are_borrowed_from_anything(device: Any, sim: Any) -> None:
    transfer = device.transfer
    own = transfer.create_stream(priority=-3)

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, own.handle

    class TorchLike:
        cuda_stream = own.handle

    for source in (own.handle, Protocol(), TorchLike(), own):
        borrowed = transfer.wrap_stream(source)
        assert borrowed.handle == own.handle
        transfer.synchronize_stream(borrowed)
        if borrowed is not own:
            transfer.destroy_stream(borrowed)
            with pytest.raises(UsageError):
                transfer.synchronize_stream(borrowed)
    for wrong in (object(), "1", True, -1, None):
        with pytest.raises(UsageError):
            transfer.wrap_stream(wrong)
    assert sim.counter("live_streams") == 1
    transfer.destroy_stream(own)
    with pytest.raises(UsageError):
        transfer.destroy_stream(own)


@simulated()
def test_a_marker_never_recorded_is_not_done(device: Any, sim: Any) -> None:
    transfer = device.transfer
    first, second = transfer.create_stream(), transfer.create_stream()
    marker, behind = transfer.create_marker(), transfer.create_marker()
    assert not transfer.query_marker(marker)
    with pytest.raises(UsageError):
        transfer.wait_marker(second, marker)
    sim.stall(stream=first.handle)
    transfer.record(marker, first)
    transfer.wait_marker(second, marker)
    transfer.record(behind, second)
    assert not transfer.query_marker(marker)
    assert not transfer.query_marker(behind)
    sim.stall(False, stream=first.handle)
    transfer.synchronize_stream(second)
    assert transfer.query_marker(marker)
    assert transfer.query_marker(behind)
    for each in (marker, behind):
        transfer.destroy_marker(each)
        with pytest.raises(UsageError):
            transfer.destroy_marker(each)
    for stream in (first, second):
        transfer.destroy_stream(stream)


def mapped(nbytes: int) -> tuple[mmap.mmap, Any, int]:
    memory = mmap.mmap(-1, nbytes)
    pin = ctypes.c_char.from_buffer(memory)
    return memory, pin, ctypes.addressof(pin)


def small_steps(device: Any) -> Any:
    from devipc_cuda.transfer import CudaTransfer

    return CudaTransfer(device.context, pin_step_nbytes=2**16)


@simulated()
def test_copies_cross_the_borders_between_steps(device: Any, sim: Any) -> None:
    transfer = small_steps(device)
    memory, pin, address = mapped(2**18)
    registration = transfer.register_host(address, 2**18 - 4096)
    assert sim.counter("live_registrations") == 4
    block = device.memory.allocate(2**18, kind=HandleKind.LEGACY)
    stream = transfer.create_stream()
    data = pattern(9, 2**18)
    memory[:] = data
    transfer.copy(stream, block.ptr, registration.device_ptr, 2**18 - 4096)
    rows = array([(block.ptr, registration.device_ptr + 60_000, 3000, 2000, 1500, 60)])
    transfer.copy_strided(stream, rows)
    transfer.copy_batch(
        stream,
        array([block.ptr + 200_000, block.ptr + 210_000]),
        array([registration.device_ptr + 65_000, registration.device_ptr]),
        array([1000, 8]),
    )
    transfer.synchronize_stream(stream)
    memory[:] = bytes(2**18)
    transfer.copy(stream, registration.device_ptr, block.ptr, 2**18 - 4096)
    transfer.synchronize_stream(stream)
    for row in range(60):
        assert memory[row * 3000 : row * 3000 + 1500] == data[60_000 + row * 2000 : 60_000 + row * 2000 + 1500]
    assert memory[200_000:201_000] == data[65_000:66_000]
    transfer.destroy_stream(stream)
    transfer.unregister_host(registration)
    with pytest.raises(UsageError):
        transfer.unregister_host(registration)
    device.memory.free(block)
    del pin
    memory.close()


@simulated()
def test_a_failing_step_undoes_the_others(device: Any, sim: Any) -> None:
    transfer = small_steps(device)
    memory, pin, address = mapped(2**18)
    sim.inject("cuMemHostRegister_v2@3=2")
    with pytest.raises(ResourceExhausted) as caught:
        transfer.register_host(address, 2**18)
    text = str(caught.value)
    for words in ("not device memory", "262144 bytes asked", "131072 pinned", "RLIMIT_MEMLOCK", "CAP_IPC_LOCK", "uid"):
        assert words in text
    assert sim.counter("live_registrations") == 0
    sim.clear_faults()
    transfer.unregister_host(transfer.register_host(address, 2**18))
    del pin
    memory.close()


@pytest.mark.parametrize("status", [1, 801, 712])
@simulated()
def test_refused_registrations_are_typed(status: int, device: Any, sim: Any) -> None:
    memory, pin, address = mapped(8192)
    sim.inject(f"cuMemHostRegister_v2@*={status}")
    expected = {1: DriverError, 801: CapabilityError, 712: DriverError}[status]
    with pytest.raises(expected) as caught:
        device.transfer.register_host(address, 8192)
    assert caught.value.status is not None
    assert caught.value.status.value == status
    with pytest.raises(UsageError):
        device.transfer.register_host(address + 1, 4096)
    with pytest.raises(UsageError):
        device.transfer.register_host(address, 0)
    del pin
    memory.close()


@simulated(host_pointer=0)
def test_the_device_address_may_differ(device: Any, sim: Any) -> None:
    block = device.memory.allocate(4096, kind=HandleKind.LEGACY)
    with staging(device) as host:
        assert host.device_ptr != host.address
        host.write(block.ptr, b"12345678")
        assert host.read(block.ptr, 8) == b"12345678"
    device.memory.free(block)


@simulated(host_pointer=0)
def test_steps_with_unrelated_addresses_are_refused(device: Any, sim: Any) -> None:
    transfer = small_steps(device)
    memory, pin, address = mapped(2**18)
    # Another registration leaves a gap of one step in the device addresses.
    other, other_pin, other_address = mapped(2**17)
    gap, kept = (transfer.register_host(other_address + at, 2**16) for at in (0, 2**16))
    transfer.unregister_host(gap)
    with pytest.raises(CapabilityError, match="unrelated device addresses"):
        transfer.register_host(address, 2**18)
    transfer.unregister_host(kept)
    assert sim.counter("live_registrations") == 0
    del pin, other_pin
    memory.close()
    other.close()


def covered(copies: list[Rectangle]) -> list[tuple[int, int]]:
    """Pairs of destination and source of every byte."""
    return sorted(
        (dst + row * dst_pitch + i, src + row * src_pitch + i)
        for dst, src, dst_pitch, src_pitch, width, height in copies
        for row in range(height)
        for i in range(width)
    )


@pytest.mark.parametrize("seed", range(40))
def test_splitting_covers_every_byte_once(seed: int) -> None:
    random_ = random.Random(seed)
    host = HostMemory()
    host.borders = sorted(random_.sample(range(1, 2000), 5))
    width, height = random_.randint(1, 120), random_.randint(1, 8)
    first, second = (width + random_.randint(0, 60) if height > 1 else 0 for _ in range(2))
    copy = (random_.randrange(900), random_.randrange(900), first, second, width, height)
    parts = list(host.split(copy))
    assert covered(parts) == covered([copy])
    for dst, src, dst_pitch, src_pitch, width, height in parts:
        for base, pitch in ((dst, dst_pitch), (src, src_pitch)):
            end = base + (height - 1) * pitch + width
            assert not [border for border in host.borders if base < border < end]
