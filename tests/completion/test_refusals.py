"""Devices that refuse: what was not enqueued leaves nothing, and what cannot be asked leaves nobody waiting."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest

from devipc import turns
from devipc.completion import create_fence, event, half, host_flag, polling, producer, scratch, stream_memop
from devipc.completion import fence as fence_module
from devipc.errors import (
    CapabilityError,
    DevIPCError,
    DriverError,
    FencePoisoned,
    ResourceExhausted,
    UsageError,
)
from devipc.host import driver, events, ranges, sync
from devipc.host.events import HostEvents
from devipc.host.sync import HostWordWaits, HostWordWrites
from devipc.host.transfer import HostTransfer
from devipc.interfaces.backend import Device
from devipc.types import PoisonReason, Strategy
from tests.completion.lying import LyingBackend
from tests.completion.rig import ALL, hold, open_exported, pair, stream_of, transfer_of
from tests.host.test_interrupts import interrupt_at

every_strategy = pytest.mark.parametrize("strategy", ALL)


@pytest.mark.parametrize(
    ("lie", "strategy", "call"),
    [
        ("", Strategy.STREAM_MEMOP, "create_marker"),
        ("no_writes", Strategy.HOST_FLAG, "create_marker"),
        ("no_writes", Strategy.HOST_FLAG, "copy"),
    ],
)
def test_a_signal_that_fails_has_stored_nothing_and_can_be_repeated(
    lie: str, strategy: Strategy, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would know of such a store: neither who may wait for it, nor until when the page must stay."""
    device = LyingBackend(lie).open_device()
    stream = stream_of(device)
    with pair(device, strategy) as (producer, consumer):

        def exhausted(*_: object) -> None:
            raise ResourceExhausted("nothing left", code="events")

        with monkeypatch.context() as patch:
            patch.setattr(HostTransfer, call, exhausted)
            with pytest.raises(ResourceExhausted, match="nothing left"):
                producer.signal(stream, 1)
        transfer_of(device).synchronize_stream(stream)
        assert (consumer.value, consumer.issued) == (0, 0)
        producer.signal(stream, 1, timeout_s=0.2)
        consumer.synchronize(1, 5.0)
    device.close()


def test_a_store_or_wait_that_was_refused_holds_no_close(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A marker is made for it before, which is then never recorded, and so never done."""
    stream, waiting = stream_of(device), stream_of(device)
    producer = create_fence(device, Strategy.STREAM_MEMOP)
    consumer = open_exported(device, producer.export())
    consumer._in_producer = False

    def refuse(*_: object) -> None:
        raise DriverError("refused", code="refused")

    with monkeypatch.context() as patch:
        patch.setattr(HostWordWrites, "write", refuse)
        patch.setattr(HostWordWaits, "wait", refuse)
        with pytest.raises(DriverError):
            producer.signal(stream, 1)
        producer.announce(1)
        with pytest.raises(DriverError):
            consumer.wait(waiting, 1)
    started = time.monotonic()
    consumer.close(5.0)
    producer.close(5.0)
    assert time.monotonic() - started < 2.0
    assert consumer._page.closed
    assert producer._page.closed


@pytest.mark.parametrize(
    ("lie", "strategy"), [*(("", strategy) for strategy in ALL), ("no_writes", Strategy.HOST_FLAG)]
)
def test_a_signal_that_was_interrupted_anywhere_is_never_taken_for_a_later_one(lie: str, strategy: Strategy) -> None:
    """Its value may be queued. Who then signals again, behind more work, must not be told before that is done."""
    device = LyingBackend(lie).open_device()
    stream = stream_of(device)
    modules = (driver, event, events, half, host_flag, polling, producer, scratch, stream_memop)
    files = [str(module.__file__) for module in modules]
    point, hit = 0, True
    while hit:
        point += 1
        began, go_on = threading.Event(), threading.Event()
        with pair(device, strategy) as (fence, consumer):
            hold(stream)
            hit = interrupt_at(point, partial(fence.signal, stream, 1), files)
            stream.call(began.set)
            stream.call(go_on.wait)
            try:
                fence.signal(stream, 1)
                n = 1
            except UsageError:
                fence.signal(stream, 2)
                n = 2
            stream.resume()
            assert began.wait(5.0)
            time.sleep(2e-3)
            early = consumer.query(n)
            go_on.set()
            consumer.synchronize(n, 5.0)
            assert not early, f"told too early after an interrupt at place {point}"
    assert point > 10
    device.close()


def test_a_close_that_was_interrupted_while_it_looks_holds_no_other(device: Device) -> None:
    """Whoever finishes it asks for the turn again, and would never find it free."""
    with create_fence(device, Strategy.POLLING) as fence:
        point, hit = 0, True
        while hit:
            point += 1
            hit = interrupt_at(point, fence._quiet, (str(fence_module.__file__), str(turns.__file__)))
            assert not fence._order.locked(), f"the turn is kept after an interrupt at place {point}"
        assert point > 3


def test_a_wait_that_was_interrupted_anywhere_holds_no_close(device: Device) -> None:
    """The page must not be unregistered under a wait that is queued, and that nobody would poison any more."""
    producing, waiting = stream_of(device), stream_of(device)
    files = [str(module.__file__) for module in (driver, half, ranges, stream_memop, sync)]
    point, hit = 0, True
    while hit:
        point += 1
        with create_fence(device, Strategy.STREAM_MEMOP) as fence:
            consumer = open_exported(device, fence.export())
            consumer._in_producer = False
            hold(producing)
            fence.signal(producing, 1)
            hit = interrupt_at(point, partial(consumer.wait, waiting, 1), files)
            closing = threading.Thread(target=consumer.close, args=(0.01,), daemon=True)
            closing.start()
            closing.join(5.0)
            held = closing.is_alive()
            producing.resume()
            closing.join(5.0)
            assert not held, f"close was held up after an interrupt at place {point}"
    assert point > 10


def no_threads(patch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", start)


def test_a_signal_fails_for_want_of_a_thread_before_it_is_recorded_or_not_at_all(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that failed behind its marker nobody would know, and its value could be signalled again too early."""
    stream = stream_of(device)
    transfer_of(device).synchronize_stream(stream)
    with monkeypatch.context() as patch:
        no_threads(patch)
        with pytest.raises(ResourceExhausted, match="no thread"):
            create_fence(device, Strategy.POLLING)
    with pair(device, Strategy.POLLING) as (producer, consumer), monkeypatch.context() as patch:
        stream.call(lambda: None)
        no_threads(patch)
        producer.signal(stream, 1)
        consumer.synchronize(1, 5.0)


def test_a_close_that_no_thread_can_be_had_for_is_ended_later(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stream_of(device)
    fence, other = (create_fence(device, Strategy.STREAM_MEMOP) for _ in range(2))
    hold(stream)
    fence.signal(stream, 1)
    with monkeypatch.context() as patch:
        no_threads(patch)
        fence.close(0.01)
    page: Any = fence._page
    assert not page.closed
    other.poison(PoisonReason.CANCELLED)  # wakes the thread of both
    other.close()
    stream.resume()
    deadline = time.monotonic() + 5.0
    while not page.closed and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert page.closed


def unreachable(*_: object) -> bool:
    raise CapabilityError("the service between this process and the device has ended", code="mps")


@every_strategy
def test_a_device_that_cannot_be_asked_any_more_leaves_nobody_waiting(
    device: Device, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drivers have more ways to refuse a query than the statuses that mean a lost device."""
    stream = stream_of(device)
    producer = create_fence(device, strategy)
    consumer = open_exported(device, producer.export())
    hold(stream)
    producer.signal(stream, 1)
    monkeypatch.setattr(HostTransfer, "query_marker", unreachable)
    if strategy is Strategy.POLLING:
        with pytest.raises(FencePoisoned):
            consumer.synchronize(1, 5.0)
    started = time.monotonic()
    consumer.close(0.2)
    producer.close(0.2)
    assert time.monotonic() - started < 2.0
    stream.resume()
    transfer_of(device).synchronize_stream(stream)


def test_a_producer_that_cannot_ask_its_device_still_waits_for_its_consumers(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events that a consumer has open must not be destroyed, and would be kept for ever if nobody waited for it."""
    producer = create_fence(device, Strategy.EVENT)
    consumer = open_exported(device, producer.export())
    producer.signal(stream_of(device), 1)
    kept = len(event._kept)
    with monkeypatch.context() as patch:
        patch.setattr(HostEvents, "query", unreachable)
        timer = threading.Timer(0.1, consumer.close)
        timer.start()
        producer.close(5.0)
        timer.join()
    assert len(event._kept) == kept


@pytest.mark.parametrize("refusal", [DriverError, CapabilityError])
def test_an_event_that_died_with_its_maker_is_a_poisoned_fence(
    device: Device, monkeypatch: pytest.MonkeyPatch, refusal: type[DevIPCError]
) -> None:
    """Some drivers refuse to query it then; the fence's own page has the reason already."""
    stream = stream_of(device)
    with pair(device, Strategy.EVENT) as (producer, consumer):
        hold(stream)
        producer.signal(stream, 1)
        consumer.poison(PoisonReason.PEER_DIED)

        def refuse(*_: object) -> bool:
            raise refusal("the handle is not valid any more", code="invalid_handle")

        with monkeypatch.context() as patch:
            patch.setattr(HostEvents, "query", refuse)
            with pytest.raises(FencePoisoned):
                consumer.query(1)
        stream.resume()
