"""What a user sees when host memory cannot be had, is limited or slow, and when processes die: simulator switches."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from backends.testing.ends import exporter, importer
from backends.testing.helpers import staging
from backends.testing.partners import Background, candidate, completion, decision, followed, reached
from devipc.spi import CapabilityError, HandleKind, ResourceExhausted, create_memfd

from .peers import Channel, peer, simulated

MIB = 2**20


@contextmanager
def mapped(nbytes: int) -> Iterator[int]:
    """Give the address of some host memory."""
    memory = mmap.mmap(-1, nbytes)
    pin = ctypes.c_char.from_buffer(memory)
    yield ctypes.addressof(pin)
    del pin
    memory.close()


def in_steps(device: Any, nbytes: int) -> Any:
    return importlib.import_module("devipc_cuda.transfer").CudaTransfer(device.context, pin_step_nbytes=nbytes)


# --- copies from host to host -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [0, 1])
@simulated()
def test_a_fence_that_copies_never_copies_from_host_to_host(waits: int, device: Any, sim: Any) -> None:
    """Such a copy may hold its caller until the stream gets there; ``signal`` must not."""
    sim.set("host_copy_waits", waits)
    device.sync._word_writes = None  # the form that copies, which a driver without value operations gets
    stream = device.transfer.create_stream()
    with staging(device) as host, followed(device, "host_flag") as (fence, other):
        sim.stall()
        fence.signal(stream, 1)
        assert reached(other, 1, 0.05) == "CompletionTimeout"
        plain = Background(lambda: host.transfer.copy(stream, host.device_ptr, host.device_ptr + 4096, 8))
        plain.blocks_only(waits)  # with the GIL released
        sim.stall(False)
        plain.done()
        assert reached(other, 1) == "reached"
        host.transfer.synchronize_stream(stream)
    device.transfer.destroy_stream(stream)


# --- registration -----------------------------------------------------------------------------------------------------


@simulated(host_register=0)
def test_without_registration_there_is_a_reason_and_polling(device: Any, sim: Any) -> None:
    with mapped(MIB) as address, pytest.raises(CapabilityError, match="does not register host memory") as caught:
        device.transfer.register_host(address, MIB)
    assert caught.value.code == "no_host_registration"
    assert "cuMemHostRegister -> 801" in str(caught.value)
    assert "staging buffers" in caught.value.remedy
    fds = len(os.listdir("/proc/self/fd"))
    for strategy in ("stream_memop", "host_flag"):
        with pytest.raises(CapabilityError, match="does not register host memory"):
            completion().create_fence(device, strategy)
    device.sync._word_writes = None
    with pytest.raises(CapabilityError, match="does not register host memory"):
        completion().create_fence(device, "host_flag")
    assert (sim.counter("live_allocations"), sim.counter("live_physical"), sim.counter("live_maps")) == (0, 0, 0)
    assert len(os.listdir("/proc/self/fd")) == fds
    stream = device.transfer.create_stream()
    with followed(device, "polling") as (fence, other):
        fence.signal(stream, 1)
        assert reached(other, 1) == "reached"
    device.transfer.destroy_stream(stream)


@simulated(host_register=0)
def test_without_registration_the_choice_is_polling(device: Any, sim: Any) -> None:
    found = decision(device)
    assert (found["strategy"], found["degraded"]) == ("polling", True)
    for strategy in ("stream_memop", "host_flag"):
        phase, verdict, reason = candidate(found, strategy)
        assert (phase, verdict) == ("child", "no")
        assert "does not register host memory" in reason


@simulated(pin_limit_mb=1)
def test_a_limit_of_one_registration_is_met_by_steps(device: Any, sim: Any) -> None:
    with mapped(4 * MIB) as address:
        with pytest.raises(ResourceExhausted, match=r"not device memory.*4194304 bytes asked, 0 pinned") as caught:
            device.transfer.register_host(address, 4 * MIB)
        assert "ulimit -l" in caught.value.remedy
        assert (sim.counter("live_registrations"), sim.counter("pinned_bytes")) == (0, 0)
        transfer = in_steps(device, MIB)
        registration = transfer.register_host(address, 4 * MIB)
        assert sim.counter("live_registrations") == 4
        transfer.unregister_host(registration)
    assert (sim.counter("live_registrations"), sim.counter("pinned_bytes")) == (0, 0)


@pytest.mark.parametrize("pending", [0, 1])
@simulated(pin_total_mb=2)
def test_a_limit_of_all_registrations_rolls_back(pending: int, device: Any, sim: Any) -> None:
    """Also where the driver keeps the failure for its next call, which is the first of the clean-up."""
    sim.set("pin_pending", pending)
    transfer = in_steps(device, MIB)
    with mapped(4 * MIB) as address:
        for _ in range(2):
            with pytest.raises(ResourceExhausted, match="4194304 bytes asked, 2097152 pinned") as caught:
                transfer.register_host(address, 4 * MIB)
            assert "cuMemHostRegister -> 2" in str(caught.value)
            assert (sim.counter("live_registrations"), sim.counter("pinned_bytes")) == (0, 0)
        transfer.unregister_host(transfer.register_host(address, 2 * MIB))
    assert sim.counter("pinned_bytes") == 0


@simulated(pin_limit_mb=1, pin_pending=1)
def test_a_failed_registration_hits_no_innocent_call(device: Any, sim: Any) -> None:
    """Neither ours, nor the caller's context and capture mode, nor the next user of the driver."""
    cu: Any = importlib.import_module("cuda.bindings.driver")
    with mapped(2 * MIB) as address, pytest.raises(ResourceExhausted):
        device.transfer.register_host(address, 2 * MIB)
    status, current = cu.cuCtxGetCurrent()
    assert (int(status), int(current)) == (0, 0)
    strict = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    with device.context.enqueueing:
        assert cu.cuThreadExchangeStreamCaptureMode(strict)[1] == strict
    device.memory.free(device.memory.allocate(MIB))


@simulated(pin_ms=250)
def test_slow_registration_holds_up_nobody_else(device: Any, sim: Any) -> None:
    """It holds a lock of the whole process inside the driver, but neither the GIL nor a lock of ours."""
    block, stream = device.memory.allocate(MIB, kind=HandleKind.LEGACY), device.transfer.create_stream()
    made: list[Any] = []
    with mapped(2 * MIB) as first, mapped(MIB) as second:
        for address in (first, second):
            made.append(Background(lambda at=address: made.append(device.transfer.register_host(at, MIB))))  # type: ignore[misc]
        began = time.monotonic()
        device.transfer.copy(stream, block.ptr, block.ptr + 4096, 4096)
        device.transfer.synchronize_stream(stream)
        device.memory.free(device.memory.allocate(MIB))
        assert time.monotonic() - began < 0.25
        assert made[0].blocks(0.0)
        for each in made[:2]:
            each.done()
        for registration in made[2:]:
            device.transfer.unregister_host(registration)
    assert len(made) == 4
    device.transfer.destroy_stream(stream)
    device.memory.free(block)


# --- context and stray handles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("need", [0, 1, 2])
@simulated()
def test_every_call_brings_its_context(need: int, device: Any, sim: Any) -> None:
    """On a thread that has none, and that has none afterwards."""
    sim.set("need_context", need)
    cu: Any = importlib.import_module("cuda.bindings.driver")

    def everything() -> None:
        events, transfer = device.sync.events, device.transfer
        event, marker, stream = events.create(), transfer.create_marker(), transfer.create_stream()
        with mapped(8192) as address:
            registration = transfer.register_host(address, 8192)
            device.sync.word_writes.write(stream, registration.device_ptr, 3)
            device.sync.word_waits.wait(stream, registration.device_ptr, 3)
            for kind in (HandleKind.LEGACY, HandleKind.VMM_FD, HandleKind.POOL):
                block = device.memory.allocate(MIB, kind=kind, zero=True)
                device.memory.release(device.memory.export(block.ptr + 8, 16))
                transfer.copy(stream, block.ptr, registration.device_ptr, 8)
                transfer.synchronize_stream(stream)
                device.memory.free(block)
            events.export(event)
            events.record(event, stream)
            transfer.record(marker, stream)
            transfer.wait_marker(transfer.wrap_stream(0), marker)
            assert not transfer.is_capturing(stream)
            transfer.synchronize_stream(stream)
            assert events.query(event)
            assert transfer.query_marker(marker)
            transfer.unregister_host(registration)
        assert transfer.memory_info().total_nbytes > 0
        events.destroy(event)
        transfer.destroy_marker(marker)
        transfer.destroy_stream(stream)
        if need:
            assert int(cu.cuCtxGetCurrent()[1]) == 0

    Background(everything).done()
    stream = device.transfer.create_stream()
    with followed(device, "stream_memop") as (fence, other):
        fence.signal(stream, 1)
        assert reached(other, 1) == "reached"
    device.transfer.destroy_stream(stream)


# --- death ------------------------------------------------------------------------------------------------------------

SLOT, SLOTS = 64 * 1024, 256


def write_late(device: Any, sim: Any, channel: Channel) -> None:
    """Queue copies into the shared memory behind a stall, and be killed."""
    path = channel.receive()
    fd = channel.receive_fds()[1][0]
    with importer(device, path) as session, staging(device) as host:
        with mmap.mmap(fd, SLOT * SLOTS) as shared:
            pin = ctypes.c_char.from_buffer(shared)
            target = device.transfer.register_host(ctypes.addressof(pin), SLOT * SLOTS)
            block = device.memory.allocate(SLOT, zero=True)
            host.write(block.ptr, b"\xa5" * SLOT)
            sim.stall()
            for slot in range(SLOTS):
                host.transfer.copy(host.stream, target.device_ptr + slot * SLOT, block.ptr, SLOT)
            channel.send(session.peer.pid)
            channel.receive()


@pytest.mark.parametrize("quiet_ms", [0, 400])
@simulated()
def test_a_peer_is_gone_only_when_nothing_lands_any_more(quiet_ms: int, device: Any, sim: Any) -> None:
    """Dying is told at once, while its writes still land; gone, after which memory is used again, with its pidfd."""
    fd = create_memfd("late", SLOT * SLOTS)
    seen: dict[str, float] = {}
    environment = {**os.environ, "DEVSIM_LATE_MS": "300", "DEVSIM_LATE_QUIET_MS": str(quiet_ms)}
    with mmap.mmap(fd, SLOT * SLOTS) as shared, exporter(device) as session, peer(write_late, environment) as other:

        def written() -> int:
            return sum(shared[slot * SLOT] == 0xA5 for slot in range(SLOTS))

        def note(event: Any) -> None:
            seen[event.state.value] = time.monotonic()
            seen[f"written when {event.state.value}"] = written()

        session.on_event(note)
        other.channel.send(session.path)
        other.channel.send(None, (fd,))
        other.channel.receive()
        assert written() == 0
        pidfd = os.pidfd_open(other.process.pid)
        killed = time.monotonic()
        other.process.kill()
        assert select.select([pidfd], [], [], 20)[0]
        os.close(pidfd)
        deadline = time.monotonic() + 5
        while "gone" not in seen and time.monotonic() < deadline:
            time.sleep(0.01)
        other.process.wait()
        other.process.returncode = 0
        assert seen["dying"] - killed < 0.25
        assert seen["written when dying"] < SLOTS
        assert seen["gone"] - killed > 0.2 + quiet_ms / 1e3
        assert seen["written when gone"] == written() == SLOTS
        time.sleep(0.1)
        assert written() == SLOTS
    os.close(fd)
