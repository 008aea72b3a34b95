"""What a user sees when events, waits, values and time are not what they should be: simulator switches of sync."""

from __future__ import annotations

import struct
import time
from typing import Any

import pytest
from devipc_cuda import driver

from backends.testing.helpers import Staging, pattern, staging
from backends.testing.partners import (
    TIMEOUT_S,
    WORD,
    Background,
    candidate,
    completion,
    decision,
    follow,
    followed,
    reached,
    receive_fence,
    send_fence,
    signal_later,
)
from devipc.spi import CapabilityError, DevIPCError, HandleKind, Mechanism, Verdict
from devipc.types import PoisonReason

from .hardware.code import launch, load_module
from .peers import Channel, peer, simulated

MIB = 2**20


# --- events -----------------------------------------------------------------------------------------------------------


@simulated(event_ready=1)
def test_events_that_are_always_done_are_found_out(device: Any, sim: Any) -> None:
    """Explicit ``event`` is refused as broken; nothing that asks an event is chosen."""
    refused = decision(device, "event")
    assert refused["error"] == "CapabilityError"
    assert "event (child): " in refused["text"]
    assert "reported as reached before the work" in refused["text"]
    assert "remedy: use another strategy" in refused["text"]


@pytest.mark.long
@simulated(event_ready=1)
def test_with_events_always_done_the_choice_asks_none(device: Any, sim: Any) -> None:
    found = decision(device)
    assert (found["strategy"], found["degraded"]) == ("host_flag", True)
    phase, verdict, reason = candidate(found, "stream_memop")
    assert (phase, verdict) == ("child", "broken")
    assert "does not hold the stream" in reason
    assert decision(device, "polling")["error"] == "CapabilityError"


def open_stale(device: Any, sim: Any, channel: Channel) -> None:
    payload = bytes.fromhex(channel.receive())
    try:
        device.sync.events.destroy(device.sync.events.open(payload))
    except DevIPCError as error:
        channel.send([type(error).__name__, error.remedy])
    else:
        channel.send(["opened", ""])


@pytest.mark.parametrize("dies", [0, 1])
@simulated()
def test_a_handle_of_a_destroyed_event(dies: int, device: Any, sim: Any) -> None:
    sim.set("event_handle_dies", dies)
    event = device.sync.events.create()
    payload = device.sync.events.export(event)
    device.sync.events.destroy(event)
    with peer(open_stale) as other:
        other.channel.send(payload.hex())
        name, remedy = other.channel.receive()
    assert name == ("DriverError" if dies else "opened")
    assert ("the exporter's event is gone" in remedy) is bool(dies)


@simulated(event_handle_dies=1)
def test_a_late_consumer_still_opens_the_ring(device: Any, sim: Any) -> None:
    """Handles stay good as long as the fence lives, however often its events were recorded."""
    stream = device.transfer.create_stream()
    with completion().create_fence(device, "event", ring=4) as fence:
        for value in range(1, 21):
            fence.signal(stream, value)
        with peer(late_consumer) as other:
            send_fence(other.channel, fence)
            other.channel.receive()
            fence.signal(stream, 21)
    device.transfer.destroy_stream(stream)


def late_consumer(device: Any, sim: Any, channel: Channel) -> None:
    with receive_fence(device, channel) as fence:
        assert fence.query(20)
        channel.send("open")
        fence.synchronize(21, TIMEOUT_S)


@simulated(event_destroy_ms=50)
def test_a_thousand_hand_overs_destroy_nothing(device: Any, sim: Any) -> None:
    """An event for each would cost 50 s; a ring of 8 costs 8 at the end."""
    stream = device.transfer.create_stream()
    began = time.monotonic()
    with followed(device, "event", ring=8) as (fence, other):
        created, destroyed = sim.calls("cuEventCreate"), sim.calls("cuEventDestroy*")
        for value in range(1, 1001):
            fence.signal(stream, value, timeout_s=TIMEOUT_S)
            if value % 8 == 0:
                assert reached(other, value) == "reached"
        assert (sim.calls("cuEventCreate"), sim.calls("cuEventDestroy*")) == (created, destroyed)
        assert sim.counter("live_ipc_events") == 8
    assert time.monotonic() - began < 25
    device.transfer.destroy_stream(stream)


@simulated(event_destroy_drains=1)
def test_consumers_are_told_before_a_destroy_that_waits(device: Any, sim: Any) -> None:
    """Destroying waits for all streams of the process; whoever follows the fence must not."""
    stream, busy = device.transfer.create_stream(), device.transfer.create_stream()
    marker = device.transfer.create_marker()
    fence = completion().create_fence(device, "event")
    with peer(follow) as other:
        send_fence(other.channel, fence)
        assert other.channel.receive() == "open"
        fence.signal(stream, 1)
        assert reached(other, 1) == "reached"
        sim.stall(stream=busy.handle)
        device.transfer.record(marker, busy)
        closing = Background(lambda: fence.close(5.0))
        assert reached(other, 2) == "FencePoisoned"
        other.channel.send()
        other.finish()
        assert closing.blocks(0.3)
        sim.stall(False, stream=busy.handle)
        closing.done()
    device.transfer.destroy_marker(marker)
    for each in (stream, busy):
        device.transfer.destroy_stream(each)


# --- values and waits -------------------------------------------------------------------------------------------------


@pytest.mark.long
@simulated(memops_progress=0)
def test_waits_that_never_end_are_rejected_and_the_next_is_taken(device: Any, sim: Any) -> None:
    began = time.monotonic()
    found = decision(device)
    assert (found["strategy"], found["degraded"]) == ("host_flag", True)
    phase, verdict, reason = candidate(found, "stream_memop")
    assert (phase, verdict) == ("child", "broken")
    assert "not released" in reason
    assert time.monotonic() - began < 30


@simulated(memops=0)
def test_without_value_operations_there_are_no_words(device: Any, sim: Any) -> None:
    assert device.sync.word_writes is None
    assert device.sync.word_waits is None
    answer = device.sync.mechanisms()[Mechanism.STREAM_MEMOP]
    assert answer.verdict is Verdict.NO
    assert "attribute CAN_USE_64_BIT_STREAM_MEM_OPS: 0; cuStreamWriteValue64 -> 801" in answer.evidence
    assert "host_flag" in answer.remedy
    with pytest.raises(CapabilityError, match="no word writes"):
        completion().create_fence(device, "stream_memop")


@simulated(memops=0)
def test_without_value_operations_the_word_is_copied(device: Any, sim: Any) -> None:
    found = decision(device)
    assert (found["strategy"], found["degraded"]) == ("host_flag", True)
    assert candidate(found, "stream_memop")[:2] == ("offer", "no")
    assert sim.calls("cuStreamW*") == 1  # the one live call


@simulated(attributes="122=0,123=0")
def test_an_attribute_alone_is_not_believed_when_it_says_no(device: Any, sim: Any) -> None:
    assert device.sync.mechanisms()[Mechanism.STREAM_MEMOP].verdict is Verdict.UNTESTED
    with staging(device) as host:
        device.sync.word_writes.write(host.stream, host.device_ptr, 7)
        host.transfer.synchronize_stream(host.stream)
        assert struct.unpack_from("<Q", host.view)[0] == 7


@simulated(attributes="122=1,123=1", memops=0)
def test_an_attribute_alone_is_not_believed_when_it_says_yes(device: Any, sim: Any) -> None:
    refused = decision(device, "stream_memop")
    assert refused["error"] == "CapabilityError"
    assert "this platform does not support the call" in refused["text"]
    assert decision(device)["strategy"] == "polling"


@simulated(attributes="122=0,123=0", missing="cuStreamWriteValue64")
def test_an_absent_call_is_a_no(device: Any, sim: Any) -> None:
    assert device.sync.word_writes is None
    assert "has no cuStreamWriteValue64" in device.sync.mechanisms()[Mechanism.STREAM_MEMOP].evidence


@simulated(attributes="122=0,123=0", fault="cuMemHostAlloc@*=2")
def test_a_question_that_fails_is_no_answer(device: Any, sim: Any) -> None:
    assert device.sync.word_writes is not None


@pytest.mark.parametrize("drain", [0, 1, 2])
@simulated()
def test_a_legal_wait_deadlocks_nothing(drain: int, device: Any, sim: Any) -> None:
    """Freeing and unregistering stand still behind a pending wait; what ends it needs none of this process."""
    sim.set("drain", drain)
    block = device.memory.allocate(MIB, kind=HandleKind.LEGACY)
    second, stream = Staging(device), device.transfer.create_stream()
    with peer(signal_later) as other:
        fence = receive_fence(device, other.channel)
        other.channel.send(1)
        other.channel.receive()
        fence.wait(stream, 1)
        deadline = time.monotonic() + TIMEOUT_S
        while not sim.counter("pending_waits"):  # the stream has not come to it yet, and nothing would stand still
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        freeing = Background(lambda: device.memory.free(block))
        freeing.blocks_only(drain)
        unregistering = Background(second.close)
        unregistering.blocks_only(drain)
        assert not fence.query(1)
        other.channel.send("go on")
        fence.synchronize(1, TIMEOUT_S)
        for each in (freeing, unregistering):
            each.done()
        fence.close()
        other.channel.send()
    device.transfer.destroy_stream(stream)
    assert (sim.counter("drained_calls") > 0) is (drain > 0)


@pytest.mark.parametrize("drain", [1, 2])
@simulated()
def test_closing_a_fence_releases_its_wait_first(drain: int, device: Any, sim: Any) -> None:
    """Unregistering its page would stand still behind the wait for it: so it is poisoned before."""
    sim.set("drain", drain)
    stream = device.transfer.create_stream()
    with peer(signal_later) as other:
        fence = receive_fence(device, other.channel)
        other.channel.send(1)
        other.channel.receive()
        fence.wait(stream, 1)
        began = time.monotonic()
        fence.close(0.3)
        assert 0.25 < time.monotonic() - began < TIMEOUT_S, "the signal would not have come"
        assert sim.counter("live_registrations") == 0
        other.channel.send()
    device.transfer.destroy_stream(stream)


# --- time -------------------------------------------------------------------------------------------------------------


@simulated(kernel_us=300_000)
def test_a_fence_behind_a_kernel_waits_for_it(device: Any, sim: Any) -> None:
    with device.context:
        module = load_module("nothing")
        kernel = driver.call("cuModuleGetFunction", module, b"nothing")
    own = device.transfer.create_stream()
    stream = device.transfer.wrap_stream(own.handle)
    with followed(device, "stream_memop") as (fence, other):
        with device.context:
            launch(kernel, stream)
        began = time.monotonic()
        fence.signal(stream, 1)
        assert time.monotonic() - began < 0.2, "submission waits for the kernel"
        assert reached(other, 1, 0.05) == "CompletionTimeout"
        assert reached(other, 1) == "reached"
        assert time.monotonic() - began > 0.2
    with device.context:
        driver.call("cuModuleUnload", module)
    device.transfer.destroy_stream(own)


@simulated(engines=1, copy_mbps=100)
def test_the_better_stream_copies_first(device: Any, sim: Any) -> None:
    """One engine, 20 copies of 10 ms queued on the low stream: one on the high stream waits for one of them."""
    low, high = device.transfer.create_stream(priority=0), device.transfer.create_stream(priority=-5)
    block = device.memory.allocate(4 * MIB, kind=HandleKind.LEGACY)
    with staging(device) as host:
        for _ in range(20):
            host.transfer.copy(low, block.ptr, host.device_ptr, MIB)
        host.transfer.copy(high, block.ptr + 2 * MIB, host.device_ptr, MIB)
        host.transfer.record(marker := host.transfer.create_marker(), low)
        host.transfer.synchronize_stream(high)
        assert not host.transfer.query_marker(marker)
        host.transfer.destroy_marker(marker)
        for each in (low, high):
            device.transfer.destroy_stream(each)
    device.memory.free(block)


@simulated(queue_depth=8)
def test_a_full_queue_holds_the_caller_and_nobody_else(device: Any, sim: Any) -> None:
    block = device.memory.allocate(MIB, kind=HandleKind.LEGACY)
    other = device.transfer.create_stream()
    with staging(device) as host:
        device.sync.word_waits.wait(host.stream, host.device_ptr + WORD, 1)

        def submit() -> None:
            for at in range(64):
                host.transfer.copy(host.stream, block.ptr + 8 * at, host.device_ptr, 8)

        submitting = Background(submit)
        assert submitting.blocks()
        # Another stream, marker and allocation of the same device, from this thread.
        host.transfer.copy(other, block.ptr + 4096, host.device_ptr, 8)
        host.transfer.synchronize_stream(other)
        device.memory.free(device.memory.allocate(MIB))
        assert submitting.blocks(0.05)
        struct.pack_into("<Q", host.view, WORD, 1)
        submitting.done()
        host.transfer.synchronize_stream(host.stream)
    device.transfer.destroy_stream(other)
    device.memory.free(block)


@simulated(queue_depth=4)
def test_a_submission_held_by_a_full_queue_is_freed_by_poison(device: Any, sim: Any) -> None:
    stream, markers = device.transfer.create_stream(), [device.transfer.create_marker() for _ in range(16)]
    with peer(signal_later) as other:
        fence = receive_fence(device, other.channel)
        other.channel.send(1)
        other.channel.receive()
        fence.wait(stream, 1)

        def submit() -> None:
            for each in markers:
                device.transfer.record(each, stream)

        submitting = Background(submit)
        assert submitting.blocks()
        fence.poison(PoisonReason.CANCELLED)
        submitting.done()
        fence.close()
        other.channel.send()
    for each in markers:
        device.transfer.destroy_marker(each)
    device.transfer.destroy_stream(stream)


LAZY = [("stream_memop", 1), ("host_flag", 1), ("host_flag", 0), ("polling", 1), ("event", 1)]


@pytest.mark.parametrize(("strategy", "words"), LAZY)
@simulated(lazy_writes=1)
def test_a_signal_needs_nobody_who_waits(strategy: str, words: int, device: Any, sim: Any) -> None:
    """Copies that land only when something is queued behind them: every strategy queues something."""
    if not words:  # the form that copies, which a driver without value operations gets
        device.sync._word_writes = None
    block = device.memory.allocate(MIB, kind=HandleKind.LEGACY)
    stream, data = device.transfer.create_stream(), pattern(3, 4096)
    with staging(device) as host, followed(device, strategy) as (fence, other):
        host.view[:4096] = data
        host.transfer.copy(stream, block.ptr, host.device_ptr, 4096)
        assert reached(other, 1, 0.05) == "CompletionTimeout"
        assert sim.counter("copies") == 0
        fence.signal(stream, 1)
        assert reached(other, 1) == "reached"
        assert sim.counter("copies") >= 1
        assert host.read(block.ptr, 4096) == data
    device.transfer.destroy_stream(stream)
    device.memory.free(block)
