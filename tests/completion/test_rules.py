"""What holds for every strategy: what counts as reached, which calls are legal, misuse that ends before a driver."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from devipc.calltrace import observe
from devipc.completion import create_fence, page
from devipc.errors import ClosedError, CompletionTimeout, FencePoisoned, ForkError, ResourceExhausted, UsageError
from devipc.host.transfer import HostTransfer
from devipc.interfaces.backend import Device
from devipc.types import MAX_FENCE_VALUE, PoisonReason, Strategy
from tests.completion.peer import Pipe, spawn
from tests.completion.rig import ALL, MECHANISM, hold, host_device, open_exported, pair, stream_of, transfer_of

every_strategy = pytest.mark.parametrize("strategy", ALL)


@every_strategy
def test_query_is_false_while_the_stream_is_stalled(device: Device, strategy: Strategy) -> None:
    calls: list[str] = []
    stream = stream_of(device)
    with pair(device, strategy) as (producer, consumer), observe(calls.append):
        hold(stream)
        producer.signal(stream, 1)
        producer.signal(stream, 5)
        time.sleep(0.02)
        for end in (producer, consumer):
            assert not end.query(1)
            assert not end.query(5)
            assert end.issued == 5
            assert end.value == 0
        stream.resume()
        consumer.synchronize(5, 5.0)
        assert consumer.query(1)
        assert consumer.query(5)
        assert not consumer.query(6)
        assert consumer.value == 5
        producer.synchronize(5, 5.0)
    signalling, _ = MECHANISM[strategy]
    assert calls.count(signalling) >= 2


class _Interrupted(list[Any]):
    def append(self, _: object) -> None:
        raise KeyboardInterrupt


def test_a_value_that_an_interrupt_found_reached_is_not_forgotten(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_of(device)
    with pair(device, Strategy.POLLING) as (producer, consumer):
        half: Any = producer._half
        monkeypatch.setattr(half._ticker, "wake", lambda _tick: None)  # nobody else looks
        producer.signal(stream, 1)
        transfer_of(device).synchronize_stream(stream)
        with monkeypatch.context() as patch:
            patch.setattr(half, "_unused", _Interrupted())
            with pytest.raises(KeyboardInterrupt):
                producer.query(1)
        assert consumer.query(1)


def test_an_event_that_an_interrupt_found_done_is_acknowledged(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    stream = stream_of(device)
    with pair(device, Strategy.EVENT, ring=1) as (producer, consumer):
        producer.signal(stream, 1)
        transfer_of(device).synchronize_stream(stream)
        with monkeypatch.context() as patch:
            patch.setattr(page.FencePage, "set_ack", interrupted)
            with pytest.raises(KeyboardInterrupt):
                consumer.query(1)
        assert consumer.query(1)
        producer.signal(stream, 2, timeout_s=0.5)
        consumer.synchronize(2, 5.0)


@every_strategy
def test_a_fence_that_was_never_signalled_has_reached_nothing(device: Device, strategy: Strategy) -> None:
    with pair(device, strategy) as (producer, consumer):
        for end in (producer, consumer):
            assert not end.query(1)
            assert end.value == 0
            for timeout_s in (0.01, 0.0, -1.0, float("nan")):
                with pytest.raises(CompletionTimeout):
                    end.synchronize(1, timeout_s)


@every_strategy
def test_a_timeout_can_be_repeated_and_is_kept(device: Device, strategy: Strategy) -> None:
    stream = stream_of(device)
    with pair(device, strategy) as (producer, consumer):
        hold(stream)
        producer.signal(stream, 1)
        for _ in range(3):
            started = time.monotonic()
            with pytest.raises(CompletionTimeout) as caught:
                consumer.synchronize(1, 0.05)
            assert 0.05 <= time.monotonic() - started < 1.0
            assert caught.value.retryable
            assert caught.value.remedy
        stream.resume()
        consumer.synchronize(1, 5.0)


@every_strategy
def test_values_grow_up_to_the_largest(device: Device, strategy: Strategy) -> None:
    stream = stream_of(device)
    with pair(device, strategy) as (producer, consumer):
        producer.signal(stream, 7)
        for wrong in (7, 6, 1):
            with pytest.raises(UsageError, match="grow"):
                producer.signal(stream, wrong)
        for n in (MAX_FENCE_VALUE - 1, MAX_FENCE_VALUE):
            assert not consumer.query(n)
            producer.signal(stream, n)
            consumer.synchronize(n, 5.0)
        assert consumer.value == MAX_FENCE_VALUE
        with pytest.raises(UsageError):
            producer.signal(stream, MAX_FENCE_VALUE)


@pytest.mark.parametrize("value", [0, -1, MAX_FENCE_VALUE + 1, 2**64, 1.0, True, None, "1"])
def test_numbers_that_no_fence_reaches_are_refused(device: Device, value: Any) -> None:
    calls: list[str] = []
    stream = stream_of(device)
    with pair(device, Strategy.STREAM_MEMOP) as (producer, consumer), observe(calls.append):
        for call in (
            lambda: producer.signal(stream, value),
            lambda: consumer.wait(stream, value),
            lambda: consumer.query(value),
            lambda: consumer.synchronize(value, 1.0),
        ):
            with pytest.raises(UsageError):
                call()
        assert calls == []


@every_strategy
def test_capturing_streams_are_refused(device: Device, strategy: Strategy) -> None:
    stream = stream_of(device)
    with pair(device, strategy) as (producer, consumer):
        consumer._in_producer = False
        stream.begin_capture()
        with pytest.raises(UsageError, match="capturing"):
            producer.signal(stream, 1)
        with pytest.raises(UsageError, match="capturing"):
            consumer.wait(stream, 1)
        assert stream._queue.submitted == 0
        assert producer.issued == 0
        stream.end_capture()
        producer.signal(stream, 1)
        consumer.synchronize(1, 5.0)


@every_strategy
def test_a_capture_is_looked_for_once(device: Device, strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores refuse it by themselves; markers and events promise nothing."""
    asked: list[Any] = []
    real = HostTransfer.is_capturing

    def asking(self: HostTransfer, stream: Any) -> bool:
        asked.append(stream)
        return real(self, stream)

    monkeypatch.setattr(HostTransfer, "is_capturing", asking)
    with create_fence(device, strategy) as producer:
        producer.signal(stream_of(device), 1)
    assert len(asked) == (strategy in (Strategy.POLLING, Strategy.EVENT))


@every_strategy
def test_a_second_stream_may_only_take_over_when_nothing_is_pending(device: Device, strategy: Strategy) -> None:
    first, second = stream_of(device), stream_of(device)
    with pair(device, strategy) as (producer, consumer):
        hold(first)
        producer.signal(first, 1)
        with pytest.raises(UsageError, match="second stream"):
            producer.signal(second, 2)
        first.resume()
        consumer.synchronize(1, 5.0)
        transfer_of(device).synchronize_stream(first)
        producer.signal(second, 2)
        consumer.synchronize(2, 5.0)


@every_strategy
def test_roles_are_kept_apart(device: Device, strategy: Strategy) -> None:
    stream = stream_of(device)
    with pair(device, strategy) as (producer, consumer):
        assert producer.is_producer
        assert not consumer.is_producer
        assert producer.strategy is consumer.strategy is strategy
        assert producer.host_releasable
        assert consumer.waits_on_device is (strategy is Strategy.STREAM_MEMOP)
        producer.signal(stream, 1)
        with pytest.raises(UsageError, match="consumer"):
            consumer.signal(stream, 2)
        with pytest.raises(UsageError) as caught:
            producer.wait(stream, 1)
        assert "marker" in caught.value.remedy
        with pytest.raises(UsageError) as caught:
            consumer.wait(stream, 1)
        assert "marker" in caught.value.remedy
        with pytest.raises(UsageError):
            consumer.export()


def test_waits_need_an_issued_value(device: Device) -> None:
    stream = stream_of(device)
    with pair(device, Strategy.STREAM_MEMOP) as (producer, consumer):
        consumer._in_producer = False
        with pytest.raises(UsageError, match="issued 0"):
            consumer.wait(stream, 1)
        started = time.monotonic()
        with pytest.raises(CompletionTimeout) as caught:
            consumer.wait(stream, 1, timeout_s=0.05)
        assert time.monotonic() - started >= 0.05
        assert "signal" in caught.value.remedy
        timer = threading.Timer(0.05, producer.signal, (stream_of(device), 1))
        timer.start()
        consumer.wait(stream, 1, timeout_s=5.0)
        timer.join()
        transfer_of(device).synchronize_stream(stream)
        assert consumer.query(1)


@pytest.mark.parametrize("strategy", [Strategy.HOST_FLAG, Strategy.POLLING, Strategy.EVENT])
def test_other_waits_block_the_host(device: Device, strategy: Strategy) -> None:
    stream, other = stream_of(device), stream_of(device)
    with pair(device, strategy) as (producer, consumer):
        consumer._in_producer = False
        hold(stream)
        producer.signal(stream, 1)
        with pytest.raises(CompletionTimeout):
            consumer.wait(other, 1, block_timeout_s=0.02)
        timer = threading.Timer(0.05, stream.resume)
        timer.start()
        consumer.wait(other, 1)
        assert consumer.query(1)
        timer.join()


@every_strategy
def test_poison_reaches_everybody_and_the_first_cause_stays(device: Device, strategy: Strategy) -> None:
    stream = stream_of(device)
    with pair(device, strategy) as (producer, consumer):
        producer.signal(stream, 1)
        consumer.synchronize(1, 5.0)
        failures: list[FencePoisoned] = []

        def wait() -> None:
            try:
                consumer.synchronize(2, 10.0)
            except FencePoisoned as error:
                failures.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.02)
        started = time.monotonic()
        consumer.poison(PoisonReason.CANCELLED)
        waiter.join(5.0)
        assert time.monotonic() - started < 1.0
        assert [error.code for error in failures] == ["cancelled"]
        producer.poison(PoisonReason.PEER_DIED)
        for end in (producer, consumer):
            for name, arguments in (("query", (1,)), ("query", (2,)), ("synchronize", (1, 1.0))):
                with pytest.raises(FencePoisoned) as caught:
                    getattr(end, name)(*arguments)
                assert caught.value.code == "cancelled"
                assert caught.value.remedy
            with pytest.raises(FencePoisoned):
                _ = end.value
        with pytest.raises(FencePoisoned):
            producer.signal(stream, 2)
        with pytest.raises(FencePoisoned):
            producer.export()


def test_a_fence_has_a_bounded_number_of_consumers(device: Device) -> None:
    with create_fence(device, Strategy.HOST_FLAG) as producer:
        consumers = [open_exported(device, producer.export()) for _ in range(32)]
        assert producer.consumers == tuple(range(1, 33))
        with pytest.raises(ResourceExhausted, match="32"):
            producer.export()
        consumers[4].close()
        consumers[4] = open_exported(device, producer.export())
        producer.drop_consumer(7)
        with pytest.raises(ResourceExhausted):
            producer.export()
        with pytest.raises(UsageError):
            producer.drop_consumer(33)
        for consumer in consumers:
            consumer.close()


def test_a_consumer_that_was_dropped_gives_its_line_back_when_it_closes(device: Device) -> None:
    stream = stream_of(device)
    with create_fence(device, Strategy.EVENT) as producer:
        for n in range(1, 2 * page.MAX_CONSUMERS):
            handle = producer.export()
            with open_exported(device, handle):
                producer.signal(stream, n)
                producer.drop_consumer(handle.line, ticket=handle.ticket)
            producer.drop_consumer(handle.line, ticket=handle.ticket)
        assert producer.consumers == ()


def forked(pipe: Pipe) -> None:
    with host_device() as device:
        stream = stream_of(device)
        with pair(device, Strategy.POLLING) as (producer, consumer):
            producer.signal(stream, 1)
            consumer.synchronize(1, 5.0)
            pid = os.fork()
            if pid == 0:
                refused = 0
                for call in (
                    lambda: producer.signal(stream, 2),
                    lambda: producer.export(),
                    lambda: consumer.query(1),
                    lambda: consumer.wait(stream, 1),
                    lambda: consumer.poison(PoisonReason.CLOSED),
                    lambda: consumer.close(),
                ):
                    try:
                        call()
                    except ForkError:
                        refused += 1
                os._exit(refused)
            _, status = os.waitpid(pid, 0)
            assert consumer.query(1)
            pipe.send(os.waitstatus_to_exitcode(status))


def test_a_forked_child_is_refused() -> None:
    with spawn(forked) as peer:
        assert peer.receive()[0] == 6


@every_strategy
def test_a_closed_fence_is_refused(device: Device, strategy: Strategy) -> None:
    stream = stream_of(device)
    with create_fence(device, strategy) as producer:
        consumer = open_exported(device, producer.export())
        consumer.close()
        consumer.close()
        with pytest.raises(ClosedError):
            consumer.query(1)
        with pytest.raises(ClosedError):
            consumer.wait(stream, 1)
        with pytest.raises(ClosedError):
            _ = consumer.value
    with pytest.raises(ClosedError):
        producer.signal(stream, 1)
    with pytest.raises(ClosedError):
        producer.export()
    with pytest.raises(ClosedError):
        producer.poison(PoisonReason.CLOSED)


def test_a_page_that_is_closed_between_two_looks_ends_as_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel then finds nothing at the address, which is not the fault of whoever waits or wakes."""
    for name in ("futex_wait", "futex_wake"):
        made, fd = page.FencePage.create()
        os.close(fd)
        real = getattr(page, name)

        def closing(*args: Any, made: page.FencePage = made, real: Any = real, **options: Any) -> Any:
            made.close()
            return real(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(page, name, closing)
            if name == "futex_wake":
                made.kick()
            else:
                with pytest.raises(ClosedError):
                    made.wait_until(lambda: False, timeout_s=5.0, pause_s=1e-3)
        assert made.closed
