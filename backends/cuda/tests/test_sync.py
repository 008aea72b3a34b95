"""Stream writes and waits on words, and interprocess events, within one process and between two."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import struct
import threading
import time
from typing import Any

import pytest

from backends.testing.helpers import staging
from devipc.spi import CapabilityError, HandleError, HandleKind, Mechanism, ResourceExhausted, UsageError, Verdict

from .peers import Channel, peer, simulated

WORD = 4096
LAST = 2**62 - 1


def load(view: memoryview, offset: int = WORD) -> int:
    return int(struct.unpack_from("<Q", view, offset)[0])


def capture(device: Any, stream: Any, *, begin: bool) -> None:
    with device.context:
        toggle_capture(importlib.import_module("cuda.bindings.driver"), stream, begin=begin)


def toggle_capture(cu: Any, stream: Any, *, begin: bool) -> None:
    if begin:
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        assert int(cu.cuStreamBeginCapture(stream.native, mode)[0]) == 0
    else:
        status, graph = cu.cuStreamEndCapture(stream.native)
        assert int(status) == 0
        cu.cuGraphDestroy(graph)


@simulated()
def test_a_write_comes_behind_earlier_work(device: Any, sim: Any) -> None:
    block = device.memory.allocate(4096)
    with staging(device) as host:
        host.view[:8] = struct.pack("<Q", 7)
        sim.stall()
        host.transfer.copy(host.stream, block.ptr, host.device_ptr, 8)
        device.sync.word_writes.write(host.stream, host.device_ptr + WORD, LAST)
        assert load(host.view) == 0
        sim.stall(False)
        host.transfer.synchronize_stream(host.stream)
        assert load(host.view) == LAST
        assert host.read(block.ptr, 8) == struct.pack("<Q", 7)
    device.memory.free(block)


@simulated()
def test_a_wait_is_released_by_the_host(device: Any, sim: Any) -> None:
    with staging(device) as host:
        marker = host.transfer.create_marker()
        device.sync.word_waits.wait(host.stream, host.device_ptr + WORD, 5)
        host.transfer.record(marker, host.stream)
        for value, done in ((4, False), (5, True)):
            struct.pack_into("<Q", host.view, WORD, value)
            time.sleep(0.05)
            if done:
                host.transfer.synchronize_stream(host.stream)
            assert host.transfer.query_marker(marker) is done
        host.transfer.destroy_marker(marker)


@simulated()
def test_a_pending_wait_is_released_by_poison(device: Any, sim: Any) -> None:
    with staging(device) as host:
        device.sync.word_waits.wait(host.stream, host.device_ptr + WORD, LAST)
        struct.pack_into("<Q", host.view, WORD, 2**62 + 1)
        host.transfer.synchronize_stream(host.stream)


@simulated()
def test_other_threads_run_while_one_blocks(device: Any, sim: Any) -> None:
    with staging(device) as host:
        device.sync.word_waits.wait(host.stream, host.device_ptr + WORD, 1)
        thread = threading.Thread(target=host.transfer.synchronize_stream, args=(host.stream,))
        thread.start()
        time.sleep(0.05)
        assert thread.is_alive()
        struct.pack_into("<Q", host.view, WORD, 1)
        thread.join(timeout=20)
        assert not thread.is_alive()


@simulated()
def test_words_and_values_are_checked(device: Any, sim: Any) -> None:
    with staging(device) as host:
        before = sim.report()
        for ptr, value in ((host.device_ptr + 4, 1), (0, 1), (host.device_ptr, -1), (host.device_ptr, 2**63)):
            with pytest.raises(UsageError):
                device.sync.word_writes.write(host.stream, ptr, value)
            with pytest.raises(UsageError):
                device.sync.word_waits.wait(host.stream, ptr, value)
        assert sim.report().calls == before.calls


@simulated()
def test_capturing_streams_are_refused(device: Any, sim: Any) -> None:
    event = device.sync.events.create()
    with staging(device) as host:
        assert not host.transfer.is_capturing(host.stream)
        capture(device, host.stream, begin=True)
        assert host.transfer.is_capturing(host.stream)
        with pytest.raises(UsageError, match="captures a graph"):
            device.sync.word_writes.write(host.stream, host.device_ptr, 1)
        with pytest.raises(UsageError, match="captures a graph"):
            device.sync.word_waits.wait(host.stream, host.device_ptr, 1)
        with pytest.raises(UsageError, match="captures a graph"):
            device.sync.events.record(event, host.stream)
        capture(device, host.stream, begin=False)
        device.sync.word_writes.write(host.stream, host.device_ptr, 1)
        host.transfer.synchronize_stream(host.stream)
    device.sync.events.destroy(event)


@simulated(memops=0, attributes="122=1,123=1")
def test_memops_that_are_only_claimed_are_a_capability_error(device: Any, sim: Any) -> None:
    with staging(device) as host, pytest.raises(CapabilityError) as caught:
        device.sync.word_writes.write(host.stream, host.device_ptr, 1)
    assert caught.value.status is not None
    assert caught.value.status.call == "cuStreamWriteValue64"


@simulated()
def test_claims_are_no_verdicts(device: Any, sim: Any) -> None:
    found = device.sync.mechanisms()
    assert set(found) == set(Mechanism)
    assert {c.verdict for c in found.values()} == {Verdict.UNTESTED}
    assert "attribute CAN_USE_64_BIT_STREAM_MEM_OPS: 1" in found[Mechanism.STREAM_MEMOP].evidence


@simulated()
def test_event_rules(device: Any, sim: Any) -> None:
    events = device.sync.events
    event = events.create()
    assert events.query(event)  # the driver's answer for "never recorded"
    payload = events.export(event)
    assert len(payload) == 65
    calls = sim.calls("cuIpcOpenEventHandle")
    for wrong in (payload[:-1], payload + b"\0", b"\2" + payload[1:], b""):
        with pytest.raises(HandleError):
            events.open(wrong)
    assert sim.calls("cuIpcOpenEventHandle") == calls
    events.destroy(event)
    with pytest.raises(UsageError):
        events.destroy(event)
    with pytest.raises(UsageError):
        events.query(event)


@simulated(event_limit=2)
def test_running_out_of_events_is_typed(device: Any, sim: Any) -> None:
    events = device.sync.events
    held = [events.create(), events.create()]
    with pytest.raises(ResourceExhausted):
        events.create()
    events.destroy(held.pop())
    held.append(events.create())
    for event in held:
        events.destroy(event)


def observe_event(device: Any, sim: Any, channel: Channel) -> None:
    events = device.sync.events
    event = events.open(bytes.fromhex(channel.receive()))
    channel.send(events.query(event))
    channel.receive()
    deadline = time.monotonic() + 20
    while not events.query(event):
        assert time.monotonic() < deadline
    channel.send("done")
    stream = device.transfer.create_stream()
    with pytest.raises(UsageError):
        events.export(event)
    with pytest.raises(UsageError):
        events.record(event, stream)
    device.transfer.destroy_stream(stream)
    events.destroy(event)


@simulated()
def test_a_peer_sees_an_event(device: Any, sim: Any) -> None:
    events = device.sync.events
    stream = device.transfer.create_stream()
    event = events.create()
    sim.stall()
    events.record(event, stream)
    with peer(observe_event) as other:
        other.channel.send(events.export(event).hex())
        assert other.channel.receive() is False
        sim.stall(False)
        other.channel.send()
        assert other.channel.receive() == "done"
    events.destroy(event)
    device.transfer.destroy_stream(stream)


@simulated()
def test_a_bogus_event_handle_is_refused(device: Any, sim: Any) -> None:
    from devipc.spi import DevIPCError

    with pytest.raises(DevIPCError) as caught:
        device.sync.events.open(b"\x01" + os.urandom(64))
    assert caught.value.status is not None


def signal_word(device: Any, sim: Any, channel: Channel) -> None:
    message, fds = channel.receive_fds()
    with mmap.mmap(fds[0], message) as shared:
        import ctypes

        pin = ctypes.c_char.from_buffer(shared)
        registration = device.transfer.register_host(ctypes.addressof(pin), message)
        stream = device.transfer.create_stream()
        device.sync.word_writes.write(stream, registration.device_ptr + WORD, 9)
        device.transfer.destroy_stream(stream)
        device.transfer.unregister_host(registration)
        del pin
    os.close(fds[0])


@simulated()
def test_a_wait_is_released_by_a_peers_stream(device: Any, sim: Any) -> None:
    import ctypes

    from devipc.spi import create_memfd

    fd = create_memfd("words", 8192)
    with mmap.mmap(fd, 8192) as shared:
        pin = ctypes.c_char.from_buffer(shared)
        registration = device.transfer.register_host(ctypes.addressof(pin), 8192)
        stream = device.transfer.create_stream()
        device.sync.word_waits.wait(stream, registration.device_ptr + WORD, 9)
        with peer(signal_word) as other:
            other.channel.send(8192, (fd,))
            device.transfer.destroy_stream(stream)
        device.transfer.unregister_host(registration)
        del pin
    os.close(fd)


@simulated()
def test_nothing_done_here_breaks_a_capture_elsewhere(device: Any, sim: Any) -> None:
    """Frameworks capture in global mode: then a plain event query of any thread would break their graph."""
    cu = importlib.import_module("cuda.bindings.driver")
    marker, event = device.transfer.create_marker(), device.sync.events.create()
    with staging(device) as host:
        host.transfer.record(marker, host.stream)
        device.sync.events.record(event, host.stream)
        other = device.transfer.create_stream()
        failed: list[BaseException] = []

        def meanwhile() -> None:
            try:
                assert host.transfer.query_marker(marker) in (True, False)
                assert device.sync.events.query(event) in (True, False)
                assert host.read(block.ptr, 8) is not None
                device.memory.free(device.memory.allocate(4096, zero=True))
                device.memory.free(device.memory.allocate(4096, kind=HandleKind.LEGACY))
                device.memory.release(device.memory.export(block.ptr, 4096))
                device.transfer.destroy_marker(device.transfer.create_marker())
                host.transfer.unregister_host(host.transfer.register_host(page, 4096))
                mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
                assert cu.cuThreadExchangeStreamCaptureMode(mode)[1] == mode
            except BaseException as error:
                failed.append(error)

        block = device.memory.allocate(4096)
        memory = mmap.mmap(-1, 4096)
        pin = ctypes.c_char.from_buffer(memory)
        page = ctypes.addressof(pin)
        with device.context.enqueueing:
            mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
            assert int(cu.cuStreamBeginCapture(other.native, mode)[0]) == 0
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()
        with device.context.enqueueing:
            status, graph = cu.cuStreamEndCapture(other.native)
        assert failed == []
        assert int(status) == 0
        cu.cuGraphDestroy(graph)
        del pin
        memory.close()
        device.transfer.destroy_stream(other)
        device.memory.free(block)
    device.transfer.destroy_marker(marker)
    device.sync.events.destroy(event)
