"""How fences end: in every state, with stuck streams, lost devices and peers that stay; and that nothing is left."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from devipc.completion import ConsumerFence, ProducerFence, create_fence
from devipc.errors import (
    ClosedError,
    CompletionTimeout,
    DeviceLostError,
    DriverError,
    FencePoisoned,
)
from devipc.host.sync import HostWordWrites
from devipc.host.transfer import HostMarker, HostTransfer
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import HostRegistration
from devipc.types import POISON_BASE, PoisonReason, Strategy
from tests.completion.lying import Wrapped
from tests.completion.rig import ALL, hold, host_device, open_exported, pair, stream_of, transfer_of

every_strategy = pytest.mark.parametrize("strategy", ALL)


@every_strategy
def test_what_was_reached_outlives_the_producer(device: Device, strategy: Strategy) -> None:
    stream = stream_of(device)
    producer = create_fence(device, strategy)
    consumer = open_exported(device, producer.export())
    producer.signal(stream, 3)
    consumer.synchronize(3, 5.0)
    producer.close(0.2)
    assert consumer.query(2)
    assert consumer.query(3)
    assert consumer.value == 3
    consumer.synchronize(3, 1.0)
    for ask in (lambda: consumer.query(4), lambda: consumer.synchronize(4, 5.0)):
        with pytest.raises(FencePoisoned) as caught:
            ask()
        assert caught.value.code == "closed"
    consumer.close()


@every_strategy
def test_values_that_were_not_reached_are_poisoned_when_the_producer_closes(device: Device, strategy: Strategy) -> None:
    stream = stream_of(device)
    producer = create_fence(device, strategy)
    consumer = open_exported(device, producer.export())
    producer.signal(stream, 1)
    consumer.synchronize(1, 5.0)
    hold(stream)
    producer.signal(stream, 2)
    started = time.monotonic()
    producer.close(0.05)
    assert time.monotonic() - started < 2.0
    assert consumer.query(1)
    with pytest.raises(FencePoisoned):
        consumer.query(2)
    stream.resume()
    transfer_of(device).synchronize_stream(stream)
    with pytest.raises(FencePoisoned):
        consumer.query(2)
    consumer.close()
    producer.close()


def never_signalled(producer: ProducerFence, consumer: ConsumerFence, stream: Any) -> None:
    pass


def signalled(producer: ProducerFence, consumer: ConsumerFence, stream: Any) -> None:
    producer.signal(stream, 1)


def reached(producer: ProducerFence, consumer: ConsumerFence, stream: Any) -> None:
    producer.signal(stream, 1)
    consumer.synchronize(1, 5.0)


def stalled(producer: ProducerFence, consumer: ConsumerFence, stream: Any) -> None:
    hold(stream)
    producer.signal(stream, 1)


def poisoned(producer: ProducerFence, consumer: ConsumerFence, stream: Any) -> None:
    reached(producer, consumer, stream)
    consumer.poison(PoisonReason.TIMEOUT)


def poisoned_by_a_dying_writer(producer: ProducerFence, consumer: ConsumerFence, stream: Any) -> None:
    stalled(producer, consumer, stream)
    consumer.poison(PoisonReason.PEER_DIED, writer_gone=lambda: False)


STATES = [never_signalled, signalled, reached, stalled, poisoned, poisoned_by_a_dying_writer]


@every_strategy
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
@pytest.mark.parametrize("first", ["producer", "consumer"])
def test_close_in_every_state(
    device: Device, strategy: Strategy, state: Callable[[ProducerFence, ConsumerFence, Any], None], first: str
) -> None:
    stream = stream_of(device)
    producer = create_fence(device, strategy)
    consumer = open_exported(device, producer.export())
    state(producer, consumer, stream)
    started = time.monotonic()
    ends = (producer, consumer) if first == "producer" else (consumer, producer)
    for end in ends:
        end.close(0.05)
        end.close(0.05)
    assert time.monotonic() - started < 2.0
    stream.resume()
    transfer_of(device).synchronize_stream(stream)


def unmapped(fence: ProducerFence, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not fence._page.closed and time.monotonic() < deadline:
        time.sleep(1e-3)
    return fence._page.closed


@pytest.mark.parametrize("strategy", [Strategy.STREAM_MEMOP, Strategy.HOST_FLAG])
def test_memory_is_kept_until_a_stuck_stream_lets_go(device: Device, strategy: Strategy) -> None:
    stream = stream_of(device)
    producer = create_fence(device, strategy)
    hold(stream)
    producer.signal(stream, 1)
    producer.close(0.02)
    with pytest.raises(ClosedError):
        producer.query(1)
    assert not unmapped(producer, 0.05)
    stream.resume()
    assert unmapped(producer, 5.0)


@pytest.mark.parametrize("strategy", [Strategy.STREAM_MEMOP, Strategy.HOST_FLAG])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("sent", [False, True])
def test_memory_is_kept_for_a_store_that_could_not_be_marked(
    device: Device, strategy: Strategy, before: int, monkeypatch: pytest.MonkeyPatch, *, sent: bool
) -> None:
    """The stream has it all the same, and it would land in memory that is unmapped; also where the store failed."""
    stream = stream_of(device)
    producer = create_fence(device, strategy)
    for value in range(1, before + 1):
        producer.signal(stream, value)
    transfer_of(device).synchronize_stream(stream)

    def refused(*_: object) -> None:
        raise DriverError("the driver refused a marker", remedy="none: it was asked to")

    write = HostWordWrites.write

    def refused_behind(*arguments: Any) -> None:
        write(*arguments)
        refused()

    hold(stream)
    with monkeypatch.context() as patch:
        patch.setattr(HostTransfer, "record", refused)
        if sent:
            patch.setattr(HostWordWrites, "write", refused_behind)
        with pytest.raises(DriverError):
            producer.signal(stream, before + 1)
        producer.close(0.02)
        assert not unmapped(producer, 0.05)
    assert not unmapped(producer, 0.05)
    stream.resume()
    assert unmapped(producer, 5.0)


def test_an_unregister_that_blocks_does_not_stop_the_poison(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some drivers unregister only when no wait is pending; the wait may need a poison that is stored again."""
    go_on = threading.Event()
    real = HostTransfer.unregister_host

    def blocking(self: HostTransfer, registration: HostRegistration) -> None:
        if threading.current_thread() is not threading.main_thread():
            go_on.wait(10.0)
        real(self, registration)

    monkeypatch.setattr(HostTransfer, "unregister_host", blocking)
    first, second, waiting = stream_of(device), stream_of(device), stream_of(device)
    stuck = create_fence(device, Strategy.STREAM_MEMOP)
    hold(first)
    stuck.signal(first, 1)
    stuck.close(0.01)
    first.resume()
    with pair(device, Strategy.STREAM_MEMOP) as (producer, consumer):
        consumer._in_producer = False
        hold(second)
        producer.signal(second, 1)
        hold(waiting)
        consumer.wait(waiting, 1)
        time.sleep(0.02)
        consumer.poison(PoisonReason.PEER_DIED)
        producer._page.value = 0
        waiting.resume()
        started = time.monotonic()
        transfer_of(device).synchronize_stream(waiting)
        assert time.monotonic() - started < 1.0
        second.resume()
    assert not stuck._page.closed
    go_on.set()
    assert unmapped(stuck, 5.0)


def test_a_close_that_blocks_does_not_stop_the_poison_of_another_fence(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both fences of a dying peer are poisoned again and again; one of them is closed meanwhile and blocks in there."""
    go_on, inside = threading.Event(), threading.Event()
    real = HostTransfer.unregister_host

    def blocking(self: HostTransfer, registration: HostRegistration) -> None:
        if threading.current_thread().name == "closes-first":
            inside.set()
            go_on.wait(10.0)
        real(self, registration)

    monkeypatch.setattr(HostTransfer, "unregister_host", blocking)
    with pair(device, Strategy.STREAM_MEMOP) as (_, one), pair(device, Strategy.STREAM_MEMOP) as (_, other):
        for fence in (one, other):
            fence.poison(PoisonReason.PEER_DIED, writer_gone=go_on.is_set)
        closer = threading.Thread(target=one.close, name="closes-first")
        closer.start()
        assert inside.wait(5.0)
        time.sleep(0.02)
        other._page.value = 1  # a late store of the dead producer
        deadline = time.monotonic() + 1.0
        while other._page.value < POISON_BASE and time.monotonic() < deadline:
            time.sleep(1e-3)
        poisoned_again = other._page.value
        go_on.set()
        closer.join(5.0)
        assert poisoned_again >= POISON_BASE


class Slow(Wrapped):
    """Another device, whose markers are not answered for before ``go_on``."""

    def __init__(self, real: Device) -> None:
        super().__init__(real, "")
        self.info = replace(real.info, uuid="host-slow")
        self.transfer = SlowTransfer(real.transfer, "")


class SlowTransfer(Wrapped):
    go_on = threading.Event()
    asked = threading.Event()

    def query_marker(self, marker: HostMarker) -> bool:
        if threading.current_thread() is not threading.main_thread():
            self.asked.set()
            self.go_on.wait(10.0)
        return bool(self._real.query_marker(marker))


def test_a_slow_device_delays_neither_the_poison_of_another_nor_a_caller(device: Device) -> None:
    slow: Any = Slow(device)
    stream = stream_of(device)
    with pair(slow, Strategy.STREAM_MEMOP) as (producer, _), pair(device, Strategy.STREAM_MEMOP) as (_, other):
        producer.signal(stream, 1)
        producer.poison(PoisonReason.PEER_DIED)
        assert SlowTransfer.asked.wait(5.0)
        started = time.monotonic()
        producer.poison(PoisonReason.PEER_DIED)
        other.poison(PoisonReason.PEER_DIED, writer_gone=lambda: False)
        other._page.value = 1  # a late store of the dead producer
        poisoned_again = other._page.wait_until(lambda: other._page.value >= POISON_BASE, timeout_s=1.0, pause_s=1e-3)
        took_s = time.monotonic() - started
        SlowTransfer.go_on.set()
        assert poisoned_again
        assert took_s < 1.0


def test_a_consumer_that_closes_with_a_pending_wait_releases_it(device: Device) -> None:
    producing, waiting = stream_of(device), stream_of(device)
    with create_fence(device, Strategy.STREAM_MEMOP) as producer:
        consumer = open_exported(device, producer.export())
        consumer._in_producer = False
        hold(producing)
        producer.signal(producing, 1)
        consumer.wait(waiting, 1)
        started = time.monotonic()
        consumer.close(0.05)
        transfer_of(device).synchronize_stream(waiting)
        assert time.monotonic() - started < 2.0
        with pytest.raises(FencePoisoned):
            producer.query(1)
        producing.resume()


@every_strategy
def test_closing_ends_the_waits_of_other_threads(device: Device, strategy: Strategy) -> None:
    errors: list[BaseException] = []
    with create_fence(device, strategy) as producer:
        consumer = open_exported(device, producer.export())

        def wait() -> None:
            try:
                consumer.synchronize(1, 10.0)
            except ClosedError as error:
                errors.append(error)

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        consumer.close()
        for thread in threads:
            thread.join(5.0)
        assert len(errors) == 3


@every_strategy
def test_a_lost_device_ends_in_an_error_and_a_close(strategy: Strategy) -> None:
    with host_device() as device:
        lost: Any = device
        stream = stream_of(device)
        producer = create_fence(device, strategy)
        consumer = open_exported(device, producer.export())
        hold(stream)
        producer.signal(stream, 1)
        lost.lose()
        with pytest.raises((DeviceLostError, FencePoisoned, CompletionTimeout)):
            consumer.synchronize(1, 0.2)
        with pytest.raises((DeviceLostError, FencePoisoned)):
            producer.signal(stream, 2)
        started = time.monotonic()
        consumer.close(0.2)
        producer.close(0.2)
        assert time.monotonic() - started < 2.0


@every_strategy
def test_a_device_that_is_closed_first_does_not_keep_a_fence(strategy: Strategy) -> None:
    with host_device() as device:
        stream = stream_of(device)
        producer = create_fence(device, strategy)
        consumer = open_exported(device, producer.export())
        hold(stream)
        producer.signal(stream, 1)
        stuck = create_fence(device, strategy)
        stuck.signal(stream, 1)
        stuck.close(0.01)
    with pytest.raises((ClosedError, FencePoisoned, CompletionTimeout)):
        consumer.synchronize(1, 0.2)
    consumer.close(0.2)
    producer.close(0.2)
    assert unmapped(stuck, 2.0)


def footprint() -> tuple[int, int, int]:
    with open("/proc/self/maps") as maps:
        mapped = sum(1 for _ in maps)
    return len(os.listdir("/proc/self/fd")), mapped, threading.active_count()


def cycle(device: Device, strategy: Strategy, stream: Any) -> None:
    with pair(device, strategy, ring=2) as (producer, consumer):
        producer.signal(stream, 1)
        consumer.synchronize(1, 5.0)


@pytest.mark.once
@every_strategy
def test_a_thousand_cycles_leave_nothing(device: Device, strategy: Strategy) -> None:
    stream = stream_of(device)
    for _ in range(10):
        cycle(device, strategy, stream)
    time.sleep(0.05)
    before = footprint()
    for _ in range(1000):
        cycle(device, strategy, stream)
    deadline = time.monotonic() + 2.0
    while (after := footprint()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    # The allocator may take a few more ranges for its own use; a leak would be a thousand.
    assert after[0] <= before[0]
    assert after[1] <= before[1] + 20
    assert after[2] <= before[2]
