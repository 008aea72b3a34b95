"""How long entries of batches take to submit, by one thread and by several, is measured when an engine begins."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from devipc.errors import DriverError
from devipc.hicache.moving import entrytimes
from devipc.hicache.moving.arena import HostArena
from devipc.hicache.moving.entrytimes import submitting
from devipc.hicache.planning.forms import Submitting
from devipc.interfaces.backend import Device
from devipc.registry import load_backend


@pytest.fixture
def device() -> Iterator[Device]:
    opened = load_backend("host").open_device()
    yield opened
    opened.close()


@pytest.fixture
def arena(device: Device) -> Iterator[HostArena]:
    made = HostArena(2**20)
    registration = device.transfer.register_host(made.address, made.nbytes)  # type: ignore[union-attr]
    yield made
    device.transfer.unregister_host(registration)  # type: ignore[union-attr]
    made.close()


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have several threads chosen, and everything tried as often as it is at most, however busy the machine is."""
    monkeypatch.setattr(entrytimes, "_NO_LOOP_S", math.inf)
    monkeypatch.setattr(entrytimes, "_LIMIT_S", math.inf)


def test_memory_is_not_freed_under_copies_that_may_still_run(device: Device, arena: HostArena) -> None:
    """The first batch is on its stream, the second is refused."""
    assert device.transfer is not None
    transfer: Any = device.transfer
    streams: list[Any] = [transfer.create_stream() for _ in range(2)]
    freed: list[bool] = []
    batches: list[Any] = []

    class Refusing:
        transfer: Any
        memory: Any

        def __getattr__(self, name: str) -> Any:
            return getattr(device.memory if name in ("allocate",) else device.transfer, name)

        def copy_batch(self, stream: Any, *columns: Any) -> None:
            batches.append(stream)
            if len(batches) == 2:
                threading.Timer(0.1, streams[0].resume).start()
                raise DriverError("the driver refused the copy", remedy="none: it was asked to")
            streams[0].stall()
            device.transfer.copy_batch(stream, *columns)  # type: ignore[union-attr]

        def free(self, allocation: Any) -> None:
            marker = transfer.create_marker()
            transfer.record(marker, streams[0])
            freed.append(transfer.query_marker(marker))
            transfer.destroy_marker(marker)
            device.memory.free(allocation)  # type: ignore[union-attr]

    refusing: Any = Refusing()
    refusing.transfer = refusing.memory = refusing
    assert submitting(refusing, streams, arena.address, arena.nbytes, most=3).threads == 1
    assert freed == [True]
    for stream in streams:
        transfer.destroy_stream(stream)


class SlowToSubmit:
    """Passes everything on, and counts what is made; a batch takes so many microseconds before it returns.

    Until then it keeps the interpreter, or lets it go. Batches whose target is in ``cheap`` take a quarter of that.
    """

    def __init__(self, device: Device, *, keeps: bool, takes_us: int, fault: Callable[[str], object] = str) -> None:
        self._device = device
        self._sleep = (ctypes.PyDLL if keeps else ctypes.CDLL)(None).usleep
        self._takes_us = takes_us
        self.fault = fault
        self.cheap = range(0)
        self.made: list[Any] = []
        self.transfer = self.memory = self

    def __getattr__(self, name: str) -> Any:
        found: Any = getattr(self._device.memory if name in ("allocate", "free") else self._device.transfer, name)

        def made(*arguments: Any, **options: Any) -> Any:
            self.fault(name)
            one = found(*arguments, **options)
            self.made.append(one)
            return one

        def undone(one: Any) -> None:
            found(one)
            self.made.remove(one)

        if name in ("allocate", "create_stream", "register_host"):
            return made
        return undone if name in ("free", "destroy_stream", "unregister_host") else found

    def copy_batch(self, stream: Any, dst: Any, src: Any, nbytes: Any) -> None:
        self.fault("copy")
        self._device.transfer.copy_batch(stream, dst, src, nbytes)  # type: ignore[union-attr]
        self._sleep(self._takes_us // (4 if int(dst[0]) in self.cheap else 1))


@pytest.mark.timing
@pytest.mark.parametrize(("keeps", "threads"), [(False, 3), (True, 1)])
def test_several_threads_submit_where_a_batch_lets_go_of_the_interpreter(
    device: Device, arena: HostArena, *, keeps: bool, threads: int
) -> None:
    some: Any = SlowToSubmit(device, keeps=keeps, takes_us=2000)
    content = arena.view.tobytes()
    found = submitting(some, [], arena.address, arena.nbytes, most=3)
    assert found.threads == threads
    assert keeps == (found == Submitting())
    for entries in () if keeps else (found.to_device, found.to_host):
        assert 1.9e-6 < entries.long_s < 8e-6  # 1,024 of them in 2 ms
        assert 1.9e-6 < entries.short_s < 8e-6
    assert arena.view.tobytes() == content
    assert not some.made
    assert submitting(some, [], arena.address, arena.nbytes, most=1) == Submitting()
    assert submitting(some, [], arena.address, 4096, most=3) == Submitting()


@pytest.mark.timing
def test_several_threads_submit_where_a_driver_that_keeps_one_waiting_is_still_sooner_than_any_loop(
    device: Device, arena: HostArena
) -> None:
    some: Any = SlowToSubmit(device, keeps=True, takes_us=0)
    some.copy_batch = lambda *_: ctypes.PyDLL(None).usleep(50)
    found = submitting(some, [], arena.address, arena.nbytes, most=3)
    assert found.threads == 3
    assert found.to_device.long_s < 1.5e-6


@pytest.mark.timing
def test_entries_to_the_host_are_measured_by_themselves(device: Device, arena: HostArena) -> None:
    some: Any = SlowToSubmit(device, keeps=False, takes_us=8000)
    allocated = device.memory.allocate(2**20)  # type: ignore[union-attr]
    some.memory = Lending(device, allocated)
    some.cheap = range(allocated.ptr, allocated.ptr + allocated.nbytes)
    found = submitting(some, [], arena.address, arena.nbytes, most=3)
    device.memory.free(allocated)  # type: ignore[union-attr]
    assert 1.9e-6 < found.to_device.long_s < 6e-6  # 1,024 of them in 2 ms
    assert found.to_host.long_s > 7.8e-6


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("most", [2, 3, 7])
@pytest.mark.parametrize("nbytes", [512 * 1024, 1023 * 1024 + 5, 8 * 2**20 + 4096, 33 * 2**20 - 1])
def test_entries_of_any_size_stay_in_memory_that_is_there(device: Device, nbytes: int, most: int) -> None:
    """And none is written to host memory of others."""
    some: Any = SlowToSubmit(device, keeps=False, takes_us=0)
    address = 1 << 45  # nothing is copied
    lists = list[tuple[Any, Any, Any]]()
    some.copy_batch = lambda _stream, *columns: lists.append(columns)
    there = list[range]()

    def register_host(*where: int) -> Any:
        there.append(range(where[0], sum(where)))
        return device.transfer.register_host(*where)  # type: ignore[union-attr]

    def allocate(size: int) -> Any:
        made = device.memory.allocate(size)  # type: ignore[union-attr]
        there.append(range(made.ptr, made.ptr + size))
        return made

    some.register_host, some.unregister_host = register_host, device.transfer.unregister_host  # type: ignore[union-attr]
    some.allocate, some.free = allocate, device.memory.free  # type: ignore[union-attr]
    assert submitting(some, [], address, nbytes, most=most).threads == most
    on_device, scratch = there
    ways = set[bool]()
    for dst, src, size in lists:
        to_host = int(dst[0]) in scratch
        ways.add(to_host)
        for at, where in zip(
            (dst, src), (scratch, on_device) if to_host else (on_device, range(address, address + nbytes)), strict=True
        ):
            assert where.start <= int(at.min()) <= int((at + size).max()) <= where.stop
    assert ways == {False, True}


class Lending:
    """Memory that is known beforehand."""

    def __init__(self, device: Device, allocated: Any) -> None:
        self._allocated = allocated

    def allocate(self, nbytes: int) -> Any:
        assert nbytes <= self._allocated.nbytes
        return self._allocated

    def free(self, allocation: Any) -> None:
        assert allocation is self._allocated


def test_of_a_slow_driver_each_is_tried_once(device: Device, arena: HostArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a batch that takes half a second would be; an engine's start waits for it."""
    some: Any = SlowToSubmit(device, keeps=False, takes_us=0)
    monkeypatch.setattr(entrytimes, "_NO_LOOP_S", math.inf)
    monkeypatch.setattr(entrytimes, "_LIMIT_S", 1e-3)
    monkeypatch.setattr(entrytimes, "_COLD_LIMIT_S", 10e-3)
    batches = list[None]()

    def copy_batch(*_: object) -> None:
        batches.append(None)
        ctypes.CDLL(None).usleep(20_000)

    some.copy_batch = copy_batch
    assert submitting(some, [], arena.address, arena.nbytes, most=3).threads == 3
    assert len(batches) == 5 * 3


@pytest.mark.usefixtures("untimed")
def test_short_entries_are_read_from_memory_that_was_not_just_read(device: Device) -> None:
    some: Any = SlowToSubmit(device, keeps=False, takes_us=1)
    read, arena = dict[int, set[int]](), HostArena(40 * 2**20)

    def copy_batch(_stream: Any, _dst: Any, src: Any, nbytes: Any) -> None:
        if arena.address <= int(src[0]) < arena.address + arena.nbytes:
            assert int((src + nbytes).max()) <= arena.address + arena.nbytes
            read.setdefault(int(nbytes[0]), set()).add((int(src[0]) - arena.address) // (1024 * int(nbytes[0])))

    some.copy_batch = copy_batch
    assert submitting(some, [], arena.address, arena.nbytes, most=3).threads == 3
    assert read == {32 * 1024: {0}, 8 * 1024: {0, 1, 2, 3, 4}}
    arena.close()


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("call", ["allocate", "create_stream", "register_host", "copy"])
@pytest.mark.parametrize("behind", [0, 1, 60])
def test_what_cannot_be_measured_is_left_to_one_thread_and_leaves_nothing_behind(
    device: Device, arena: HostArena, call: str, behind: int
) -> None:
    calls = [behind]

    def fault(name: str) -> None:
        calls[0] -= name == call
        if calls[0] < 0:
            raise DriverError(f"the driver refused to {call}", remedy="none: it was asked to")

    some: Any = SlowToSubmit(device, keeps=False, takes_us=0, fault=fault)
    found = submitting(some, [], arena.address, arena.nbytes, most=3)
    assert found == Submitting() or calls[0] >= 0
    assert calls[0] < 0 or (behind and call != "copy")
    assert not some.made


@pytest.mark.usefixtures("untimed")
def test_memory_that_is_still_registered_stays_mapped(device: Device, arena: HostArena) -> None:
    """Another mapping at its address could not be registered, or a device would read and write what is not its own."""
    some: Any = SlowToSubmit(device, keeps=False, takes_us=0)

    def refused(_registration: Any) -> None:
        raise DriverError("the driver does not unregister", remedy="none: it was asked to")

    some.unregister_host = refused
    with pytest.raises(DriverError, match="does not unregister"):
        submitting(some, [], arena.address, arena.nbytes, most=3)
    (registration,) = some.made  # streams and device memory are given back all the same
    mapped = [line.split("-")[0] for line in Path("/proc/self/maps").read_text().splitlines() if "-scratch" in line]
    assert registration.address in [int(begin, 16) for begin in mapped]
    device.transfer.unregister_host(registration)  # type: ignore[union-attr]
    ctypes.CDLL(None).munmap(ctypes.c_void_p(registration.address), ctypes.c_size_t(registration.nbytes))
