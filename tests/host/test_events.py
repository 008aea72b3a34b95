"""Inter-process events in one process: the vendor's semantics, the limit, and handles that cannot be trusted."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable

import pytest

from devipc.host.backend import HostBackend, HostDevice
from devipc.host.events import EVENT_LIMIT, HostEvents
from devipc.spi import ClosedError, HandleError, ResourceExhausted, UsageError

FIELDS = struct.Struct("<4sIIIIQQQ")


@pytest.fixture
def events(device: HostDevice) -> HostEvents:
    found = device.sync.events
    assert found is not None
    return found


def test_never_recorded_answers_true(events: HostEvents) -> None:
    """The trap that vendors set: fences must not rely on an event that may not have been recorded."""
    event = events.create()
    assert events.query(event)
    assert events.query(events.open(events.export(event)))


def test_query_speaks_of_the_latest_record(device: HostDevice, events: HostEvents) -> None:
    stream = device.transfer.create_stream()
    event = events.create()
    opened = events.open(events.export(event))
    events.record(event, stream)
    device.transfer.synchronize_stream(stream)
    both = (event, opened)
    assert [events.query(one) for one in both] == [True, True]
    stream.stall()
    events.record(event, stream)
    assert [events.query(one) for one in both] == [False, False]
    events.record(event, stream)
    gate = threading.Event()
    stream.call(lambda: gate.wait(20))
    events.record(event, stream)
    stream.resume()
    time.sleep(0.03)
    assert [events.query(one) for one in both] == [False, False]  # two of three records were passed
    gate.set()
    device.transfer.synchronize_stream(stream)
    assert [events.query(one) for one in both] == [True, True]


def test_records_on_two_streams_leave_the_latest(device: HostDevice, events: HostEvents) -> None:
    slow, fast = device.transfer.create_stream(), device.transfer.create_stream()
    event = events.create()
    slow.stall()
    events.record(event, slow)
    events.record(event, fast)
    device.transfer.synchronize_stream(fast)
    assert events.query(event)
    slow.resume()
    device.transfer.synchronize_stream(slow)
    assert events.query(event)


def test_destroyed_events_are_typed_on_both_sides(device: HostDevice, events: HostEvents) -> None:
    stream = device.transfer.create_stream()
    event = events.create()
    payload = events.export(event)
    opened = events.open(payload)
    stream.stall()
    events.record(event, stream)
    events.destroy(event)
    with pytest.raises(HandleError) as caught:
        events.query(opened)
    assert caught.value.code == "stale_event"
    with pytest.raises(HandleError) as caught:
        events.open(payload)
    assert caught.value.code == "stale_event"
    successor = events.create()
    assert successor.slot == event.slot
    events.record(successor, stream)
    gate = threading.Event()
    later = events.create()
    stream.call(lambda: gate.wait(20))
    events.record(later, stream)
    stream.resume()
    time.sleep(0.02)
    assert events.query(successor)  # its own record, not the one of the event that had the slot before
    assert not events.query(later)
    with pytest.raises(HandleError):
        events.query(opened)
    gate.set()
    events.destroy(opened)
    for call in (events.query, events.export, events.destroy, lambda one: events.record(one, stream)):
        with pytest.raises(ClosedError):
            call(event)
    with pytest.raises(ClosedError):
        events.destroy(opened)


def test_a_queued_record_of_a_destroyed_event_spares_the_next_owner_of_its_slot(
    device: HostDevice, events: HostEvents
) -> None:
    stream, other = device.transfer.create_stream(), device.transfer.create_stream()
    first = events.create()
    stream.stall()
    for _ in range(5):
        events.record(first, stream)
    events.destroy(first)
    second = events.create()
    assert second.slot == first.slot
    other.stall()
    events.record(second, other)
    stream.resume()
    device.transfer.synchronize_stream(stream)
    assert not events.query(second)
    other.resume()
    device.transfer.synchronize_stream(other)
    assert events.query(second)


def test_only_the_maker_records_and_exports(device: HostDevice, events: HostEvents) -> None:
    stream = device.transfer.create_stream()
    opened = events.open(events.export(events.create()))
    with pytest.raises(UsageError, match="maker"):
        events.record(opened, stream)
    with pytest.raises(UsageError, match="maker"):
        events.export(opened)
    other = HostBackend().open_device()
    theirs = other.sync.events
    assert theirs is not None
    foreign = theirs.create()
    for call in (events.query, events.destroy, events.export):
        with pytest.raises(UsageError):
            call(foreign)
        with pytest.raises(UsageError):
            call(object())
    other.close()


def test_the_limit_is_named_and_slots_come_back(events: HostEvents) -> None:
    made = [events.create() for _ in range(EVENT_LIMIT)]
    with pytest.raises(ResourceExhausted, match=str(EVENT_LIMIT)) as caught:
        events.create()
    assert caught.value.code == "events"
    events.destroy(made.pop())
    made.append(events.create())
    for event in made:
        events.destroy(event)


def tampered(payload: bytes, index: int, value: object) -> bytes:
    fields = list(FIELDS.unpack(payload))
    fields[index] = value
    return FIELDS.pack(*fields)


@pytest.mark.parametrize(
    ("tamper", "code"),
    [
        (lambda p: b"", "handle"),
        (lambda p: p[:-1], "handle"),
        (lambda p: p + b"\0", "handle"),
        (lambda p: p.hex(), "handle"),
        (lambda p: None, "handle"),
        (lambda p: tampered(p, 0, b"nope"), "handle"),
        (lambda p: tampered(p, 1, 2), "handle"),
        (lambda p: tampered(p, 4, EVENT_LIMIT), "handle"),
        (lambda p: tampered(p, 7, 0), "handle"),
        (lambda p: tampered(p, 5, 1), "pid_namespace"),
        (lambda p: tampered(p, 2, 2**31 - 1), "exporter_gone"),
        (lambda p: tampered(p, 2, 0), "exporter_gone"),
        (lambda p: tampered(p, 3, 2**31 - 1), "exporter_gone"),
        (lambda p: tampered(p, 6, 1), "exporter_gone"),
        (lambda p: tampered(p, 4, 5), "stale_event"),
        (lambda p: tampered(p, 7, 99), "stale_event"),
    ],
)
def test_bad_handles_are_typed_and_leave_nothing(
    events: HostEvents, tamper: Callable[[bytes], object], code: str
) -> None:
    payload = events.export(events.create())
    before = os.listdir("/proc/self/fd")
    with pytest.raises(HandleError) as caught:
        events.open(tamper(payload))
    assert caught.value.code == code
    assert caught.value.remedy
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("kind", ["pipe", "unsealed", "small"])
def test_a_handle_that_names_another_file_is_refused_without_blocking(events: HostEvents, kind: str) -> None:
    payload = events.export(events.create())
    ends = os.pipe() if kind == "pipe" else (os.memfd_create("devipc-test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC),)
    if kind == "unsealed":
        os.ftruncate(ends[0], EVENT_LIMIT * 64)
    named = tampered(tampered(payload, 3, ends[0]), 6, os.fstat(ends[0]).st_ino)
    with pytest.raises(HandleError) as caught:
        events.open(named)
    assert caught.value.code == ("exporter_gone" if kind == "pipe" else "unsealed")
    for fd in ends:
        os.close(fd)


def test_events_survive_descriptors_of_the_opener(device: HostDevice, events: HostEvents) -> None:
    before = len(os.listdir("/proc/self/fd"))
    event = events.create()
    payload = events.export(event)
    opened = [events.open(payload) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before + 1  # the page of this device; opening keeps none
    for one in opened:
        events.destroy(one)
