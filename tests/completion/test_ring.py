"""Bounded rings: events that are recorded again, and prepared values that are copied."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from devipc.calltrace import observe
from devipc.capabilities import Capability, Verdict
from devipc.completion import create_fence, offers
from devipc.completion.scratch import Scratch
from devipc.errors import (
    CapabilityError,
    CompletionTimeout,
    DriverError,
    FencePoisoned,
    ResourceExhausted,
    UsageError,
)
from devipc.host.events import HostEvents
from devipc.host.transfer import HostTransfer
from devipc.interfaces.backend import Device
from devipc.types import PoisonReason, Strategy
from tests.completion.lying import LyingBackend, Wrapped
from tests.completion.rig import hold, open_exported, pair, stream_of, transfer_of


def test_a_slot_is_recorded_again_only_when_all_have_seen_it(device: Device) -> None:
    stream = stream_of(device)
    with create_fence(device, Strategy.EVENT, ring=4) as producer:
        fast, slow = (open_exported(device, producer.export()) for _ in range(2))
        for n in range(1, 5):
            producer.signal(stream, n)
        fast.synchronize(4, 5.0)
        started = time.monotonic()
        with pytest.raises(ResourceExhausted, match="4 slots") as caught:
            producer.signal(stream, 5, timeout_s=0.05)
        assert 0.05 <= time.monotonic() - started < 1.0
        assert caught.value.code == "fence_ring"
        assert caught.value.retryable
        assert producer.issued == 4
        slow.synchronize(1, 5.0)
        producer.signal(stream, 5)
        fast.synchronize(5, 5.0)
        slow.close()
        for n in range(6, 9):
            producer.signal(stream, n)
        fast.synchronize(8, 5.0)
        fast.close()
        for n in range(9, 30):
            producer.signal(stream, n)


def test_a_ring_that_the_stream_does_not_empty_is_full_too(device: Device) -> None:
    stream = stream_of(device)
    with pair(device, Strategy.EVENT, ring=2) as (producer, consumer):
        hold(stream)
        producer.signal(stream, 1)
        producer.signal(stream, 2)
        with pytest.raises(ResourceExhausted):
            producer.signal(stream, 3, timeout_s=0.02)
        stream.resume()
        consumer.synchronize(2, 5.0)
        producer.signal(stream, 3)
        consumer.synchronize(3, 5.0)


def test_poison_ends_the_wait_for_a_slot(device: Device) -> None:
    stream = stream_of(device)
    with pair(device, Strategy.EVENT, ring=1) as (producer, consumer):
        producer.signal(stream, 1)
        timer = threading.Timer(0.05, consumer.poison, (PoisonReason.PEER_DIED,))
        timer.start()
        with pytest.raises(FencePoisoned):
            producer.signal(stream, 2, timeout_s=10.0)
        timer.join()


def test_a_handle_that_nobody_opened_holds_the_ring_until_it_is_dropped(device: Device) -> None:
    stream = stream_of(device)
    with create_fence(device, Strategy.EVENT, ring=2) as producer:
        producer.signal(stream, 1)
        producer.synchronize(1, 5.0)
        handle = producer.export()
        open_exported(device, producer.export()).close()
        for n in (2, 3):
            producer.signal(stream, n)
        with pytest.raises(ResourceExhausted):
            producer.signal(stream, 4, timeout_s=0.02)
        late = open_exported(device, handle)
        late.synchronize(3, 5.0)
        producer.signal(stream, 4)
        late.close()


@pytest.mark.parametrize("gone", [False, True])
def test_a_dropped_consumer_takes_no_value_for_reached_whose_slot_was_recorded_again(
    device: Device, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """It is dropped between its look at the event and its look at what the event stands for."""
    stream = stream_of(device)
    query = HostEvents.query
    with pair(device, Strategy.EVENT, ring=1) as (producer, consumer):
        producer.signal(stream, 1)
        producer.synchronize(1, 5.0)

        def late(events: HostEvents, event: Any) -> bool:
            done = query(events, event)
            monkeypatch.undo()
            producer.drop_consumer(1, gone=gone)
            hold(stream)
            producer.signal(stream, 2)
            return done

        monkeypatch.setattr(HostEvents, "query", late)
        with pytest.raises(FencePoisoned) as caught:
            consumer.query(2)
        assert caught.value.code == "closed"
        assert not producer.query(2)
        stream.resume()


def test_late_consumers_begin_where_the_ring_is(device: Device) -> None:
    """Values have gaps, so a slot's number is not the value modulo the ring."""
    stream = stream_of(device)
    with create_fence(device, Strategy.EVENT, ring=3) as producer:
        for n in range(10, 110, 10):
            producer.signal(stream, n)
            producer.synchronize(n, 5.0)
        hold(stream)
        producer.signal(stream, 1000)
        consumer = open_exported(device, producer.export())
        assert consumer.value == 100
        assert consumer.query(100)
        assert consumer.query(55)
        assert not consumer.query(101)
        assert not consumer.query(1000)
        stream.resume()
        consumer.synchronize(1000, 5.0)
        consumer.close()


def test_events_are_made_once_and_never_asked_before_they_are_recorded(device: Device) -> None:
    calls: Counter[str] = Counter()
    stream = stream_of(device)
    with (
        observe(lambda call: calls.update([call])),
        create_fence(device, Strategy.EVENT, ring=8) as producer,
    ):
        consumer = open_exported(device, producer.export())
        assert not producer.query(1)
        assert not consumer.query(1)
        assert calls["host_event_query"] == 0
        for n in range(1, 1001):
            producer.signal(stream, n)
            consumer.synchronize(n, 5.0)
        assert calls["host_event_create"] == calls["host_event_export"] == calls["host_event_open"] == 8
        assert calls["host_event_record"] == 1000
        assert calls["host_event_destroy"] == 0
        consumer.close()
    assert calls["host_event_destroy"] == 16


@pytest.mark.parametrize("ring", [0, -1, 129])
def test_rings_have_a_size(device: Device, ring: int) -> None:
    with pytest.raises(UsageError):
        create_fence(device, Strategy.EVENT, ring=ring)


def test_an_event_that_opens_too_late_is_given_back(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, destroyed = threading.Event(), threading.Event()
    opened: list[object] = []
    really_open, really_destroy = HostEvents.open, HostEvents.destroy

    def stuck(self: HostEvents, payload: bytes) -> object:
        go_on.wait(10.0)
        opened.append(really_open(self, payload))
        return opened[0]

    def destroy(self: HostEvents, event: Any) -> None:
        really_destroy(self, event)
        if event in opened:
            destroyed.set()

    monkeypatch.setattr("devipc.completion.event.OPEN_TIMEOUT_S", 0.1)
    monkeypatch.setattr(HostEvents, "open", stuck)
    monkeypatch.setattr(HostEvents, "destroy", destroy)
    with create_fence(device, Strategy.EVENT) as producer:
        with pytest.raises(CompletionTimeout, match="open an event"):
            open_exported(device, producer.export())
        assert not destroyed.is_set()
        go_on.set()
        assert destroyed.wait(5.0)


@pytest.fixture
def copying() -> Iterator[Device]:
    """A device without word writes: a flag is brought over by copies."""
    device = LyingBackend("no_writes").open_device()
    yield device
    device.close()


def test_flags_are_copied_where_no_word_can_be_written(copying: Device) -> None:
    calls: Counter[str] = Counter()
    stream = stream_of(copying)
    with pair(copying, Strategy.HOST_FLAG) as (producer, consumer), observe(lambda call: calls.update([call])):
        hold(stream)
        for n in range(1, 129):
            producer.signal(stream, n * 1000)
        assert not consumer.query(1)
        with pytest.raises(ResourceExhausted, match="128 slots"):
            producer.signal(stream, 129_000, timeout_s=0.02)
        stream.resume()
        last = 0
        while last < 128_000:
            value = consumer.value
            assert value % 1000 == 0
            assert value >= last
            last = value
        for n in range(129, 1000):
            producer.signal(stream, n * 1000)
        consumer.synchronize(999_000, 5.0)
        transfer_of(copying).synchronize_stream(stream)
    assert calls["host_copy"] == 2 * 999, "each value goes by way of device memory: host to host may block the caller"
    assert calls["host_write_word"] == 0


def test_a_slot_of_an_interrupted_signal_brings_no_later_value(
    copying: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream may copy from it all the same, and would bring what was prepared there for later work."""
    stream, go_on, carry = stream_of(copying), threading.Event(), Scratch.carry

    def interrupted(*arguments: Any) -> None:
        carry(*arguments)
        raise KeyboardInterrupt

    with pair(copying, Strategy.HOST_FLAG) as (producer, consumer):
        hold(stream)
        with monkeypatch.context() as patch:
            patch.setattr(Scratch, "carry", interrupted)
            with pytest.raises(KeyboardInterrupt):
                producer.signal(stream, 1)
        stream.call(lambda: go_on.wait(10.0))
        producer.signal(stream, 2)
        stream.resume()
        consumer.synchronize(1, 5.0)
        assert not consumer.query(2)
        go_on.set()
        consumer.synchronize(2, 5.0)


def test_signals_that_were_never_sent_hold_no_slot(copying: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stream_of(copying)

    def refused(*_: object) -> None:
        raise DriverError("the driver refused a copy", remedy="none: it was asked to")

    with pair(copying, Strategy.HOST_FLAG) as (producer, consumer):
        with monkeypatch.context() as patch:
            patch.setattr(HostTransfer, "copy", refused)
            for n in range(1, 200):
                with pytest.raises(DriverError):
                    producer.signal(stream, n, timeout_s=5.0)
        for n in range(200, 400):
            producer.signal(stream, n, timeout_s=5.0)
        consumer.synchronize(399, 5.0)


def test_a_flag_needs_a_word_write_or_memory_to_copy_through(copying: Device) -> None:
    class WithoutMemory(Wrapped):
        memory = None

        def capabilities(self) -> dict[str, Capability]:
            return {"memory": Capability.no("memory is switched off", remedy="switch memory on")}

    bare: Any = WithoutMemory(copying, "")
    answer = offers(bare)[Strategy.HOST_FLAG]
    assert answer.verdict is Verdict.NO
    assert answer.reason == "memory is switched off"
    with pytest.raises(CapabilityError, match="memory is switched off"):
        create_fence(bare, Strategy.HOST_FLAG)
