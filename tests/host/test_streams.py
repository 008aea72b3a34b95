"""Streams, markers and the memory that queued work uses, in one process: order, stalls, waits and destruction."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from functools import partial

import pytest

from devipc.host.backend import HostBackend, HostDevice
from devipc.host.transfer import HostStream
from devipc.spi import (
    PAGE_NBYTES,
    ClosedError,
    DeviceTransfer,
    DevIPCError,
    UsageError,
)
from tests.host.conftest import Words
from tests.host.helpers import passed, until, writes_of


def test_work_runs_in_order(device: HostDevice) -> None:
    transfer = device.transfer
    stream = transfer.create_stream()
    seen: list[int] = []
    for index in range(500):
        stream.call(partial(seen.append, index))
    transfer.synchronize_stream(stream)
    assert seen == list(range(500))


def test_submitting_never_waits_and_a_stall_holds_work_back(device: HostDevice, words: Words) -> None:
    transfer = device.transfer
    stream, other = transfer.create_stream(), transfer.create_stream()
    stream.stall()
    started = time.monotonic()
    writes_of(device).write(stream, words.at(0), 5)
    done = passed(transfer, stream)
    assert time.monotonic() - started < 5
    writes_of(device).write(other, words.at(1), 6)
    transfer.synchronize_stream(other)
    time.sleep(0.05)
    assert (words.words[0], words.words[1], done()) == (0, 6, False)
    stream.resume()
    transfer.synchronize_stream(stream)
    assert (words.words[0], done()) == (5, True)


def test_a_stall_waits_for_nothing_and_running_work_goes_on(device: HostDevice) -> None:
    transfer = device.transfer
    stream = transfer.create_stream()
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def long() -> None:
        begun.set()
        go.wait(20)
        ended.set()

    stream.call(long)
    second = threading.Event()
    stream.call(second.set)
    assert begun.wait(10)
    stream.stall()
    go.set()
    assert ended.wait(10)
    assert not second.wait(0.05)
    stream.resume()
    assert second.wait(10)


def test_synchronize_waits_for_what_was_submitted_before_it(device: HostDevice) -> None:
    transfer = device.transfer
    stream = transfer.create_stream()
    stream.stall()
    ran: list[int] = []
    stream.call(lambda: ran.append(1))
    finished = threading.Event()

    def wait() -> None:
        transfer.synchronize_stream(stream)
        finished.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not finished.wait(0.05)
    stream.resume()
    assert finished.wait(10)
    thread.join()
    assert ran == [1]


def test_a_marker_is_not_done_before_it_was_recorded_and_moves(device: HostDevice) -> None:
    transfer = device.transfer
    stream = transfer.create_stream()
    marker = transfer.create_marker()
    assert not transfer.query_marker(marker)
    transfer.record(marker, stream)
    assert transfer.query_marker(marker)
    stream.stall()
    stream.call(lambda: None)
    assert transfer.query_marker(marker)
    transfer.record(marker, stream)
    assert not transfer.query_marker(marker)
    stream.resume()
    transfer.synchronize_stream(stream)
    assert transfer.query_marker(marker)
    transfer.destroy_marker(marker)
    with pytest.raises(ClosedError):
        transfer.query_marker(marker)
    with pytest.raises(ClosedError):
        transfer.destroy_marker(marker)


def test_a_stream_waits_for_a_marker_as_it_was_recorded_then(device: HostDevice) -> None:
    transfer = device.transfer
    source, sink = transfer.create_stream(), transfer.create_stream()
    order: list[str] = []
    marker = transfer.create_marker()
    with pytest.raises(UsageError, match="never recorded"):
        transfer.wait_marker(sink, marker)
    source.stall()
    source.call(lambda: order.append("source"))
    transfer.record(marker, source)
    transfer.wait_marker(sink, marker)
    sink.call(lambda: order.append("sink"))
    done = passed(transfer, sink)
    time.sleep(0.02)
    assert not done()
    # moving the marker behind later work does not move a wait that was enqueued already
    gate = threading.Event()
    source.call(lambda: gate.wait(20))
    transfer.record(marker, source)
    transfer.destroy_marker(marker)
    source.resume()
    assert until(done)
    assert order == ["source", "sink"]
    gate.set()


def test_streams_are_wrapped_by_handle_or_object(device: HostDevice) -> None:
    transfer: DeviceTransfer = device.transfer
    made = transfer.create_stream(priority=-5)
    assert made.handle > 0
    assert made.priority == -5  # type: ignore[attr-defined]
    for borrowed in (transfer.wrap_stream(made.handle), transfer.wrap_stream(made)):
        assert borrowed.handle == made.handle
        transfer.destroy_stream(borrowed)
        with pytest.raises(ClosedError):
            transfer.synchronize_stream(borrowed)
        transfer.synchronize_stream(made)
    default = transfer.wrap_stream(0)
    assert default.handle == 0
    ran = threading.Event()
    assert isinstance(default, HostStream)
    default.call(ran.set)
    transfer.synchronize_stream(transfer.wrap_stream(0))
    assert ran.is_set()
    wrong: object
    for wrong in (None, "1", 10**9, -1, object()):
        with pytest.raises(UsageError):
            transfer.wrap_stream(wrong)


def test_streams_of_others_are_refused(device: HostDevice) -> None:
    other = HostBackend().open_device()
    foreign = other.transfer.create_stream()
    with pytest.raises(UsageError, match="no stream of this device"):
        device.transfer.synchronize_stream(foreign)
    with pytest.raises(UsageError):
        device.transfer.wrap_stream(foreign.handle)
    with pytest.raises(UsageError):
        device.transfer.query_marker(other.transfer.create_marker())
    with pytest.raises(UsageError):
        device.transfer.copy(7, 0, 0, 0)  # type: ignore[arg-type]
    other.close()


def test_destroying_a_stream_waits_for_its_work_and_ends_its_thread(device: HostDevice) -> None:
    transfer = device.transfer
    threads = threading.active_count()
    stream = transfer.create_stream()
    assert threading.active_count() == threads  # lazy
    borrowed = transfer.wrap_stream(stream.handle)
    ran = threading.Event()

    def slow() -> None:
        time.sleep(0.05)
        ran.set()

    stream.call(slow)
    transfer.destroy_stream(stream)
    assert ran.is_set()
    assert threading.active_count() == threads
    for dead in (stream, borrowed):
        with pytest.raises(ClosedError):
            transfer.synchronize_stream(dead)
    with pytest.raises(ClosedError):
        transfer.destroy_stream(stream)
    with pytest.raises(UsageError):
        transfer.wrap_stream(stream.handle)


def test_what_could_never_return_is_refused(device: HostDevice) -> None:
    transfer = device.transfer
    stream = transfer.create_stream()
    refused: list[DevIPCError] = []

    def wait_for_oneself() -> None:
        for call in (transfer.synchronize_stream, transfer.destroy_stream):
            try:
                call(stream)
            except UsageError as error:
                refused.append(error)

    stream.call(wait_for_oneself)
    transfer.synchronize_stream(stream)
    assert len(refused) == 2
    stream.stall()
    stream.call(lambda: None)
    with pytest.raises(UsageError, match="stalled"):
        transfer.destroy_stream(stream)
    stream.resume()
    transfer.destroy_stream(stream)


def test_freed_memory_stays_mapped_until_queued_work_has_used_it(device: HostDevice) -> None:
    memory, transfer = device.memory, device.transfer
    stream = transfer.create_stream()
    source, target = memory.allocate(PAGE_NBYTES), memory.allocate(PAGE_NBYTES)
    extent = memory.export(source.ptr, 64)
    opened = memory.open(extent)
    memory.release(extent)
    ctypes.memset(source.ptr, 9, 64)
    stream.stall()
    transfer.copy(stream, target.ptr, opened.ptr, 64)
    transfer.copy(stream, target.ptr + 64, source.ptr, 64)
    memory.close(opened)
    memory.free(source)
    for ptr in (opened.ptr, source.ptr):
        with pytest.raises(UsageError, match="live range"):
            transfer.copy(stream, target.ptr, ptr, 1)
        assert is_mapped(ptr)
    stream.resume()
    transfer.synchronize_stream(stream)
    assert ctypes.string_at(target.ptr, 128) == b"\x09" * 128
    assert until(lambda: not is_mapped(opened.ptr) and not is_mapped(source.ptr))


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, high = (int(border, 16) for border in line.split(maxsplit=1)[0].split("-"))
            if low <= address < high:
                return "memfd:devipc" in line
    return False


def test_many_threads_share_a_device(device: HostDevice, words: Words) -> None:
    """Eight threads allocate, export, open, copy and give back; none sees another's bytes or a wrong error."""
    shared = device.transfer.create_stream()
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            stream = device.transfer.create_stream()
            for turn in range(40):
                made, other = device.memory.allocate(PAGE_NBYTES), device.memory.allocate(PAGE_NBYTES)
                extent = device.memory.export(made.ptr + 3, 500)
                opened = device.memory.open(extent)
                ctypes.memset(made.ptr, 1 + (number * 40 + turn) % 250, PAGE_NBYTES)
                used = shared if turn % 2 else stream
                device.transfer.copy(used, other.ptr, opened.ptr, 500)
                device.transfer.synchronize_stream(used)
                assert ctypes.string_at(other.ptr, 500) == ctypes.string_at(made.ptr, 500)
                device.memory.release(extent)
                device.memory.close(opened)
                device.memory.free(made)
                device.memory.free(other)
            device.transfer.destroy_stream(stream)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_memory_info_is_no_more_than_the_machine_has(device: HostDevice) -> None:
    """How limits combine is tested on made-up files; what is free right now, other processes decide too."""
    machine = os.sysconf("SC_PHYS_PAGES") * PAGE_NBYTES
    found = device.transfer.memory_info()
    assert 0 < found.free_nbytes < found.total_nbytes <= machine
    assert device.info.total_nbytes == found.total_nbytes
