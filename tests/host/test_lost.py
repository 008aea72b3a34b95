"""The lost device: what fails, what still gives back, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from devipc.host.backend import HostBackend, HostDevice
from devipc.host.transfer import HostStream
from devipc.spi import (
    PAGE_NBYTES,
    ClosedError,
    DeviceLostError,
)
from tests.host.conftest import Words
from tests.host.helpers import waits_of, writes_of


def test_an_exception_in_a_stream_loses_the_device(device: HostDevice, words: Words) -> None:
    memory, transfer, events = device.memory, device.transfer, device.sync.events
    assert events is not None
    stream, waiter = transfer.create_stream(), transfer.create_stream()
    made, event, marker = memory.allocate(PAGE_NBYTES), events.create(), transfer.create_marker()
    extent = memory.export(made.ptr, 8)
    waits_of(device).wait(waiter, words.at(0), 1)
    transfer.record(marker, waiter)
    events.record(event, waiter)
    stream.stall()
    stream.call(lambda: 1 / 0)
    writes_of(device).write(stream, words.at(1), 1)
    stream.resume()
    with pytest.raises(DeviceLostError, match="division"):
        transfer.synchronize_stream(waiter)  # a pending wait ends, and is no success
    calls: list[Callable[[], object]] = [
        lambda: memory.allocate(1),
        lambda: memory.describe(1),
        lambda: memory.export(made.ptr, 1),
        lambda: memory.open(extent),
        lambda: transfer.create_stream(),
        lambda: transfer.copy(stream, made.ptr, made.ptr, 1),
        lambda: transfer.synchronize_stream(stream),
        lambda: transfer.query_marker(marker),
        lambda: transfer.memory_info(),
        lambda: writes_of(device).write(stream, words.at(0), 1),
        lambda: events.query(event),
        lambda: events.create(),
    ]
    for call in calls:
        for _ in range(2):
            with pytest.raises(DeviceLostError) as caught:
                call()
            assert caught.value.device == device.info.uuid
            assert caught.value.status is not None
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
    time.sleep(0.02)
    assert words.words[1] == 0  # work behind the fault never ran
    memory.release(extent)
    memory.free(made)
    events.destroy(event)
    transfer.destroy_stream(stream)
    transfer.destroy_stream(waiter)


def test_work_that_was_given_up_never_counts_as_done(device: HostDevice, words: Words) -> None:
    """Whoever waits for a stream when the device is lost is told so, however the last wait of the stream ended."""
    outcomes: list[object] = []

    def wait(stream: HostStream) -> None:
        try:
            device.transfer.synchronize_stream(stream)
            outcomes.append(None)
        except DeviceLostError:
            outcomes.append(DeviceLostError)

    threads = []
    for _ in range(10):
        stream = device.transfer.create_stream()
        waits_of(device).wait(stream, words.at(0), 1)
        threads.append(threading.Thread(target=wait, args=(stream,)))
        threads[-1].start()
    time.sleep(0.05)
    device.lose()
    for thread in threads:
        thread.join(10)
    assert outcomes == [DeviceLostError] * 10


def test_lose_is_sticky_until_the_device_is_opened_again() -> None:
    backend = HostBackend()
    device = backend.open_device()
    stream = device.transfer.create_stream()
    stream.stall()
    stream.call(lambda: None)
    waiting: list[BaseException] = []

    def wait() -> None:
        try:
            device.transfer.synchronize_stream(stream)
        except DeviceLostError as error:
            waiting.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.02)
    device.lose("by test")
    device.lose("a second cause")
    thread.join(10)
    assert "by test" in str(waiting[0])
    assert backend.open_device() is device
    with pytest.raises(DeviceLostError, match="by test"):
        device.transfer.create_stream()
    device.close()
    device.close()
    with pytest.raises(ClosedError):
        device.transfer.create_stream()
    again = backend.open_device(device.info.uuid)
    assert again is not device
    again.transfer.synchronize_stream(again.transfer.create_stream())
    again.close()
