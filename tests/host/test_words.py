"""Words and registered host memory in one process: values, order, bounds, capture and machines."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from devipc.host.backend import HostDevice
from devipc.host.sync import HostSync
from devipc.spi import (
    PAGE_NBYTES,
    ClosedError,
    HostRegistration,
    Mechanism,
    UsageError,
    Verdict,
)
from tests.host.conftest import Words
from tests.host.helpers import passed, until, waits_of, writes_of


@pytest.mark.parametrize("released_by", ["stream", "host"])
def test_a_word_wait_ends_at_or_above_its_value(device: HostDevice, words: Words, released_by: str) -> None:
    transfer = device.transfer
    waiter, writer = transfer.create_stream(), transfer.create_stream()
    waits_of(device).wait(waiter, words.at(7), 10)
    done = passed(transfer, waiter)

    def store(value: int) -> None:
        if released_by == "host":
            words.words[7] = value
        else:
            writes_of(device).write(writer, words.at(7), value)
            transfer.synchronize_stream(writer)

    store(9)
    time.sleep(0.02)
    assert not done()
    store(2**62 + 3)
    assert until(done)
    waits_of(device).wait(waiter, words.at(7), 2**62 + 4)
    later = passed(transfer, waiter)
    time.sleep(0.02)
    assert not later()
    store(2**63 - 1)
    assert until(later)


def test_word_writes_follow_the_copies_before_them(device: HostDevice, words: Words) -> None:
    """Whoever sees the word sees the bytes: 300 rounds between two streams, each reading what the other wrote."""
    transfer = device.transfer
    writer, reader = transfer.create_stream(), transfer.create_stream()
    nbytes = 16 * PAGE_NBYTES
    source, shared, result = (device.memory.allocate(nbytes) for _ in range(3))
    wrong: list[int] = []

    def check(turn: int) -> None:
        if ctypes.string_at(result.ptr, nbytes) != bytes([turn % 251]) * nbytes:
            wrong.append(turn)

    for turn in range(1, 301):
        waits_of(device).wait(writer, words.at(8), turn - 1)
        writer.call(partial(ctypes.memset, source.ptr, turn % 251, nbytes))
        transfer.copy(writer, shared.ptr, source.ptr, nbytes)
        writes_of(device).write(writer, words.at(0), turn)
        waits_of(device).wait(reader, words.at(0), turn)
        transfer.copy(reader, result.ptr, shared.ptr, nbytes)
        reader.call(partial(check, turn))
        writes_of(device).write(reader, words.at(8), turn)
    transfer.synchronize_stream(reader)
    assert words.words[0] == words.words[8] == 300
    assert not wrong


@pytest.mark.parametrize("value", [-1, 2**63, 2**64, "1", None, 1.0])
def test_wrong_word_values_are_refused(device: HostDevice, words: Words, value: Any) -> None:
    stream = device.transfer.create_stream()
    for call in (writes_of(device).write, waits_of(device).wait):
        with pytest.raises(UsageError):
            call(stream, words.at(0), value)


def test_words_must_be_aligned_and_registered(device: HostDevice, words: Words) -> None:
    stream = device.transfer.create_stream()
    memory = device.memory.allocate(PAGE_NBYTES)
    for pointer in (words.at(0) + 4, words.at(0) - 8, words.at(0) + PAGE_NBYTES, memory.ptr, 0, 8, -8, None):
        for call in (writes_of(device).write, waits_of(device).wait):
            with pytest.raises(UsageError) as caught:
                call(stream, pointer, 1)  # type: ignore[arg-type]
            assert caught.value.remedy
    assert not any(words.words)


def test_a_capturing_stream_is_refused(device: HostDevice, words: Words) -> None:
    transfer, events = device.transfer, device.sync.events
    assert events is not None
    stream = transfer.create_stream()
    event, marker = events.create(), transfer.create_marker()
    assert not transfer.is_capturing(stream)
    stream.begin_capture()
    assert transfer.is_capturing(stream)
    assert transfer.is_capturing(transfer.wrap_stream(stream.handle))
    calls: list[Callable[[], None]] = [
        lambda: writes_of(device).write(stream, words.at(0), 1),
        lambda: waits_of(device).wait(stream, words.at(0), 1),
        lambda: transfer.copy(stream, words.at(0), words.at(1), 8),
        lambda: transfer.record(marker, stream),
        lambda: events.record(event, stream),
    ]
    for call in calls:
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.code == "capturing"
    stream.end_capture()
    assert not transfer.is_capturing(stream)
    assert events.query(event)  # the refused record left no trace
    writes_of(device).write(stream, words.at(0), 1)
    transfer.synchronize_stream(stream)
    assert words.words[0] == 1


def test_unregistering_waits_for_queued_work(device: HostDevice, words: Words) -> None:
    transfer = device.transfer
    area = mmap.mmap(-1, PAGE_NBYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    registration = transfer.register_host(address, PAGE_NBYTES)
    stream = transfer.create_stream()
    waits_of(device).wait(stream, registration.device_ptr, 1)
    undone = threading.Event()

    def undo() -> None:
        transfer.unregister_host(registration)
        undone.set()

    thread = threading.Thread(target=undo)
    thread.start()
    assert not undone.wait(0.05)
    area[0] = 1
    assert undone.wait(10)
    thread.join()
    with pytest.raises(ClosedError):
        transfer.unregister_host(registration)
    area.close()


@pytest.fixture
def area() -> Iterator[int]:
    """Four private pages; the third is read-only and the fourth is not there."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(4 * PAGE_NBYTES), 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    libc.mprotect(ctypes.c_void_p(address + 2 * PAGE_NBYTES), ctypes.c_size_t(PAGE_NBYTES), 1)
    libc.munmap(ctypes.c_void_p(address + 3 * PAGE_NBYTES), ctypes.c_size_t(PAGE_NBYTES))
    yield address
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(3 * PAGE_NBYTES))


def test_registration_is_checked(device: HostDevice, area: int) -> None:
    transfer = device.transfer
    allocation = device.memory.allocate(PAGE_NBYTES)
    for address, nbytes, code in (
        (area + 8, 8, "usage"),
        (area, 0, "usage"),
        (area, -1, "usage"),
        (None, 1, "usage"),
        (area, 2 * PAGE_NBYTES + 1, "not_mapped"),
        (area + 2 * PAGE_NBYTES, 8, "not_mapped"),
        (area + 3 * PAGE_NBYTES, 8, "not_mapped"),
        (0, 8, "not_mapped"),
        (2**64 - PAGE_NBYTES, 8, "not_mapped"),
        (allocation.ptr, 8, "overlap"),
    ):
        with pytest.raises(UsageError) as caught:
            transfer.register_host(address, nbytes)  # type: ignore[arg-type]
        assert caught.value.code == code
    first = transfer.register_host(area, PAGE_NBYTES + 4)
    assert first.device_ptr == first.address == area
    for address, nbytes in ((area, PAGE_NBYTES), (area + PAGE_NBYTES, 8), (area, 2 * PAGE_NBYTES)):
        with pytest.raises(UsageError) as caught:
            transfer.register_host(address, nbytes)
        assert caught.value.code == "overlap"
    stream = transfer.create_stream()
    with pytest.raises(UsageError):  # the last word is only half registered
        writes_of(device).write(stream, area + PAGE_NBYTES, 1)
    transfer.unregister_host(first)
    for nbytes in (2 * PAGE_NBYTES, 4, 1):
        transfer.unregister_host(transfer.register_host(area, nbytes))
    with pytest.raises(UsageError):
        transfer.unregister_host(HostRegistration(area, 8, area, object()))
    with pytest.raises(UsageError):
        transfer.unregister_host(None)  # type: ignore[arg-type]


def test_words_and_events_are_absent_where_stores_are_not_known_to_be_ordered(device: HostDevice) -> None:
    sync = HostSync(device._driver, machine="riscv64")
    assert (sync.word_writes, sync.word_waits, sync.events) == (None, None, None)
    answers = sync.mechanisms()
    assert answers[Mechanism.STREAM_MEMOP].verdict is Verdict.UNTESTED
    assert "riscv64" in answers[Mechanism.STREAM_MEMOP].reason
    assert answers[Mechanism.HOST]
    known = HostSync(device._driver, machine="x86_64")
    assert None not in (known.word_writes, known.word_waits, known.events)
    assert set(known.mechanisms()) == set(Mechanism)
