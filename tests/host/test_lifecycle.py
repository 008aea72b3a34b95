"""What opening, using, leaking, forking and exiting leaves behind: nothing; and the calls that a trace shows."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from devipc.calltrace import observe
from devipc.host.backend import HostBackend, HostDevice
from devipc.host.plugin import DEVIPC_CONTRACT, devipc_backend
from devipc.spi import (
    CONTRACT_VERSION,
    PAGE_NBYTES,
    Backend,
    CapabilityError,
    ClosedError,
    Device,
    DeviceMemoryIPC,
    DeviceSyncIPC,
    DeviceTransfer,
    HandleKind,
    ResourceExhausted,
)
from tests.host.conftest import Words, held
from tests.host.peer import ROOT, Peer


def run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *options, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30)


def test_the_plugin_fulfils_the_contracts() -> None:
    assert DEVIPC_CONTRACT == CONTRACT_VERSION
    backend = devipc_backend()
    assert isinstance(backend, Backend)
    assert backend.name == "host"
    assert all(isinstance(value, str) for value in backend.facts().values())
    (info,) = backend.devices()
    assert info.uuid.startswith("host-")
    assert int(info.uuid.removeprefix("host-"), 16)
    assert info.total_nbytes > 0
    device = backend.open_device(info.uuid)
    assert backend.open_device() is device
    assert isinstance(device, Device)
    assert isinstance(device.memory, DeviceMemoryIPC)
    assert isinstance(device.sync, DeviceSyncIPC)
    assert isinstance(device.transfer, DeviceTransfer)
    assert all(device.capabilities()[name] for name in ("memory", "sync", "transfer"))
    assert device.memory.kinds()[HandleKind.MEMFD]
    device.close()


def test_the_device_has_the_same_name_in_every_process() -> None:
    code = "from devipc.host.backend import HostBackend; print(HostBackend().devices()[0].uuid)"
    assert run(code).stdout.strip() == HostBackend().devices()[0].uuid


@pytest.mark.parametrize("uuid", ["", "host-", "other"])
def test_another_device_is_refused_with_a_list(uuid: str) -> None:
    backend = HostBackend()
    with pytest.raises(CapabilityError, match=backend.devices()[0].uuid):
        backend.open_device(uuid)


def test_listing_starts_nothing_and_closing_returns_everything() -> None:
    backend = HostBackend()
    before = held()
    backend.devices()
    device = backend.open_device()
    assert held() == before
    words = Words(device)
    stream, other = device.transfer.create_stream(), device.transfer.create_stream()
    made = device.memory.allocate_grown([PAGE_NBYTES] * 3)
    extent = device.memory.export(made.ptr, made.nbytes)
    device.memory.open(extent)  # left open on purpose
    device.memory.release(extent)
    events = device.sync.events
    waits = device.sync.word_waits
    assert events is not None
    assert waits is not None
    events.open(events.export(events.create()))
    device.transfer.copy(stream, made.ptr, made.ptr + 100, 50)
    device.transfer.copy(other, made.ptr, made.ptr + 100, 50)
    waits.wait(stream, words.at(0), 1)
    other.stall()
    device.transfer.copy(other, made.ptr, made.ptr + 100, 50)
    events.record(events.create(), other)
    started = time.monotonic()
    device.close()
    assert time.monotonic() - started < 5
    device.close()
    words.map.close()
    os.close(words.fd)
    assert held() == before
    for call in (device.transfer.create_stream, events.create, lambda: device.memory.free(made)):
        with pytest.raises(ClosedError):
            call()


@pytest.mark.once
def test_a_thousand_cycles_leak_nothing(device: HostDevice, words: Words) -> None:
    events, memory, transfer = device.sync.events, device.memory, device.transfer
    assert events is not None
    events.destroy(events.create())

    def cycle() -> None:
        made = memory.allocate_grown([PAGE_NBYTES, PAGE_NBYTES])
        extent = memory.export(made.ptr + 9, PAGE_NBYTES)
        opened = memory.open(extent)
        stream = transfer.create_stream()
        event = events.create()
        seen = events.open(events.export(event))
        registration = transfer.register_host(words.map.address, 64)
        transfer.copy(stream, opened.ptr, made.ptr, 9)
        events.record(event, stream)
        transfer.destroy_stream(stream)
        assert events.query(seen)
        transfer.unregister_host(registration)
        events.destroy(seen)
        events.destroy(event)
        memory.close(opened)
        memory.release(extent)
        memory.free(made)

    transfer.unregister_host(words.registration)
    before = held()
    for _ in range(1000):
        cycle()
    assert held() == before
    words.registration = transfer.register_host(words.map.address, PAGE_NBYTES)


def test_cycles_across_processes_leak_nothing_on_either_side(device: HostDevice, peer: Peer) -> None:
    made = device.memory.allocate(3 * PAGE_NBYTES)

    def cycle() -> None:
        extent = device.memory.export(made.ptr + 1, 2 * PAGE_NBYTES)
        there, _ = peer.open(extent)
        device.memory.release(extent)
        peer.call("close", there)

    theirs = Path(f"/proc/{peer.process.pid}")

    def both() -> tuple[object, int, int]:
        return held(), len(os.listdir(theirs / "fd")), (theirs / "maps").read_text().count("devipc")

    cycle()
    before = both()
    for _ in range(300):
        cycle()
    assert both() == before


FORKED = """
import os, sys
from devipc.host.backend import HostBackend
from devipc.spi import ForkError
backend = HostBackend()
device = backend.open_device()
memory, transfer, sync = device.memory, device.transfer, device.sync
stream, marker, event = transfer.create_stream(), transfer.create_marker(), sync.events.create()
made = memory.allocate(4096)
extent = memory.export(made.ptr, 10)
opened = memory.open(extent)
payload = sync.events.export(event)
stream.call(lambda: None)
transfer.synchronize_stream(stream)
calls = [
    backend.open_device, lambda: memory.kinds(), lambda: memory.allocate(1), lambda: memory.free(made),
    lambda: memory.describe(made.ptr), lambda: memory.export(made.ptr, 1), lambda: memory.release(extent),
    lambda: memory.open(extent), lambda: memory.close(opened), transfer.create_stream,
    lambda: transfer.wrap_stream(0), lambda: transfer.destroy_stream(stream),
    lambda: transfer.synchronize_stream(stream), lambda: transfer.is_capturing(stream),
    lambda: transfer.copy(stream, made.ptr, made.ptr, 1), lambda: transfer.register_host(4096, 1),
    transfer.create_marker, lambda: transfer.record(marker, stream), lambda: transfer.query_marker(marker),
    lambda: transfer.wait_marker(stream, marker), lambda: transfer.destroy_marker(marker), transfer.memory_info,
    lambda: sync.word_writes.write(stream, 8, 1), lambda: sync.word_waits.wait(stream, 8, 1), sync.events.create,
    lambda: sync.events.open(payload), lambda: sync.events.export(event), lambda: sync.events.query(event),
    lambda: sync.events.record(event, stream), lambda: sync.events.destroy(event), lambda: stream.call(print),
    stream.stall, stream.resume, stream.begin_capture, device.lose, device.close,
]
child = os.fork()
if child == 0:
    bad = 0
    for index, call in enumerate(calls):
        try:
            call()
            bad = bad or index + 1
        except ForkError as error:
            bad = bad if error.remedy else index + 1
        except BaseException as error:
            print(index, repr(error), flush=True)
            bad = bad or index + 1
    os._exit(bad)
_, status = os.waitpid(child, 0)
memory.free(made)
device.close()
print(len(calls), os.waitstatus_to_exitcode(status))
"""


def test_every_call_is_refused_in_a_forked_child() -> None:
    done = run(FORKED, "-W", "ignore")
    assert (done.stdout, done.stderr) == ("36 0\n", "")


EXIT = """
import os, threading, time
from devipc.host.backend import HostBackend
from devipc.spi import SharedMap, create_memfd
device = HostBackend().open_device()
page = SharedMap(create_memfd("x", 4096), 4096)
registration = device.transfer.register_host(page.address, 4096)
big = device.memory.allocate(256 << 20)
streams = [device.transfer.create_stream() for _ in range(4)]
device.sync.word_waits.wait(streams[0], registration.device_ptr, 1)
streams[1].stall()
streams[1].call(print)
for _ in range(200):
    device.transfer.copy(streams[2], big.ptr, big.ptr + (128 << 20), 128 << 20)
streams[3].call(lambda: None)
threading.Thread(target=lambda: device.transfer.synchronize_stream(streams[0]), daemon=True).start()
time.sleep(0.05)
print("leaving", flush=True)
"""


def test_an_interpreter_with_live_streams_exits_at_once_and_silently() -> None:
    started = time.monotonic()
    done = run(EXIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")
    assert time.monotonic() - started < 10


def test_the_trace_shows_the_mechanism(device: HostDevice, words: Words) -> None:
    events, writes, waits = device.sync.events, device.sync.word_writes, device.sync.word_waits
    assert events is not None
    assert writes is not None
    assert waits is not None
    stream = device.transfer.create_stream()
    event = events.create()
    calls: list[str] = []
    with observe(calls.append):
        writes.write(stream, words.at(0), 1)
        waits.wait(stream, words.at(0), 1)
        events.record(event, stream)
        events.query(event)
        device.transfer.copy(stream, words.at(1), words.at(0), 8)
        device.transfer.synchronize_stream(stream)
    assert calls == [
        "host_write_word",
        "host_wait_word",
        "host_event_record",
        "host_event_query",
        "host_copy",
        "host_synchronize_stream",
    ]


def test_an_observer_that_raises_leaves_no_trace(device: HostDevice, words: Words) -> None:
    """The report comes before the call: whatever stops there, nothing was begun."""

    def stop(call: str) -> None:
        raise KeyboardInterrupt(call)

    stream, writes = device.transfer.create_stream(), device.sync.word_writes
    assert writes is not None
    before = held()
    for call in (
        lambda: device.memory.allocate(1),
        lambda: writes.write(stream, words.at(0), 1),
        lambda: device.transfer.copy(stream, words.at(1), words.at(0), 8),
        lambda: device.transfer.unregister_host(words.registration),
        lambda: device.transfer.destroy_stream(stream),
    ):
        with pytest.raises(KeyboardInterrupt), observe(stop):
            call()
    assert held() == before
    device.transfer.synchronize_stream(stream)
    assert not any(words.words)


LIMITED = """
import resource
from devipc.host.backend import HostBackend
from devipc.spi import ResourceExhausted
device = HostBackend().open_device()
made = device.memory.allocate_grown([4096] * 8)
import os
fds = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 3,) * 2)
for call in (lambda: device.memory.export(made.ptr, made.nbytes), lambda: device.memory.allocate_grown([4096] * 8)):
    try:
        print(call())
    except ResourceExhausted as error:
        print(error.code, bool(error.remedy), len(os.listdir("/proc/self/fd")) - fds)
device.memory.free(made)
device.close()
"""


def test_running_out_of_descriptors_is_typed_and_leaves_nothing() -> None:
    done = run(LIMITED)
    assert (done.stdout, done.stderr) == ("fds True 0\nfds True 0\n", "")


def test_a_thread_that_cannot_start_is_typed(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    made = device.memory.allocate(PAGE_NBYTES)
    stream = device.transfer.create_stream()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ResourceExhausted) as caught:
            device.transfer.copy(stream, made.ptr, made.ptr + 8, 8)
    assert caught.value.code == "threads"
    before = held()
    device.memory.free(made)  # the refused copy holds nothing back
    assert held()[1] == before[1] - 1


def test_no_call_says_closed_while_a_stream_still_reads_memory() -> None:
    """Whoever hears that the device is closed unmaps; a wait that has not left its word would end the process."""
    device = HostBackend().open_device()
    transfer = device.transfer
    stream, marker = transfer.create_stream(), transfer.create_marker()
    entered, go = threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        go.wait(20)

    stream.call(slow)
    transfer.record(marker, stream)
    assert entered.wait(10)
    closing = threading.Thread(target=device.close)
    closing.start()
    while not device.closed:
        time.sleep(1e-3)
    assert not transfer.query_marker(marker)
    with pytest.raises(ClosedError):
        transfer.create_stream()
    with pytest.raises(ClosedError):
        stream.call(slow)
    go.set()
    closing.join(10)
    with pytest.raises(ClosedError):
        transfer.query_marker(marker)
