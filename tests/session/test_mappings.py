"""The import cache: one driver open per export, nothing stale handed out, nothing in use dropped."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from devipc.calltrace import observe
from devipc.deadline import call_with_deadline
from devipc.errors import ClosedError, CompletionTimeout, StaleError, UsageError
from devipc.interfaces.memory import DeviceMemoryIPC
from devipc.mappings import Mapping, MappingCache, local_exports
from devipc.registry import load_backend
from devipc.types import ExportedExtent, OpenedExtent
from devipc.wire import MemoryHandle

PEER = b"p" * 16
ME = b"m" * 16


@pytest.fixture
def memory() -> DeviceMemoryIPC:
    memory = load_backend("host").open_device().memory
    assert memory is not None
    return memory


@pytest.fixture
def extents(memory: DeviceMemoryIPC) -> Iterator[list[ExportedExtent]]:
    allocations = [memory.allocate(4096) for _ in range(4)]
    extents = [memory.export(allocation.ptr, 4096) for allocation in allocations]
    yield extents
    for extent, allocation in zip(extents, allocations, strict=True):
        memory.release(extent)
        memory.free(allocation)


def handle(extent: ExportedExtent, number: int, *, generation: int = 1, instance: bytes = PEER) -> MemoryHandle:
    return MemoryHandle("host", "device", instance, generation, bytes([number]) * 16, extent)


def test_one_open_serves_many_users(memory: DeviceMemoryIPC, extents: list[ExportedExtent]) -> None:
    unmapped: list[bytes] = []
    cache = MappingCache(memory, instance=ME, idle_limit=0, on_unmapped=lambda mapping: unmapped.append(mapping.key[2]))
    first, fresh = cache.acquire(handle(extents[0], 1), timeout_s=5)
    again, fresh_again = cache.acquire(handle(extents[0], 1), timeout_s=5)
    assert (fresh, fresh_again, first) == (True, False, again)
    cache.release(first)
    assert unmapped == []
    cache.release(again)
    assert unmapped == [b"\x01" * 16]
    with pytest.raises(UsageError):
        cache.release(again)


def test_idle_mappings_are_kept_up_to_the_limit_and_used_ones_never_dropped(
    memory: DeviceMemoryIPC, extents: list[ExportedExtent]
) -> None:
    unmapped: list[bytes] = []
    cache = MappingCache(memory, instance=ME, idle_limit=1, on_unmapped=lambda mapping: unmapped.append(mapping.key[2]))
    used, _ = cache.acquire(handle(extents[0], 0), timeout_s=5)
    for number in (1, 2, 3):
        mapping, _ = cache.acquire(handle(extents[number], number), timeout_s=5)
        cache.release(mapping)
    assert unmapped == [b"\x01" * 16, b"\x02" * 16]
    assert cache.stats()["open"] == 2
    cache.close()
    assert unmapped[-1] == b"\x03" * 16
    cache.release(used)
    assert cache.stats() == {"open": 0, "idle": 0, "nbytes": 0}
    with pytest.raises(ClosedError):
        cache.acquire(handle(extents[0], 0), timeout_s=5)


@pytest.mark.parametrize("cause", ["generation", "revoke", "death"])
def test_what_ends_an_export_ends_its_mappings_at_once(
    memory: DeviceMemoryIPC, extents: list[ExportedExtent], cause: str
) -> None:
    unmapped: list[bytes] = []
    cache = MappingCache(memory, instance=ME, on_unmapped=lambda mapping: unmapped.append(mapping.key[2]))
    used, _ = cache.acquire(handle(extents[0], 1), timeout_s=5)
    idle, _ = cache.acquire(handle(extents[1], 1 if cause == "revoke" else 2), timeout_s=5)
    cache.release(idle)
    if cause == "generation":
        cache.new_generation(PEER, 2)
    elif cause == "revoke":
        cache.revoke(b"\x01" * 16)
    else:
        cache.peer_died(PEER)
        cache.collect()
    assert used.stale
    with pytest.raises(StaleError):
        cache.acquire(handle(extents[0], 1), timeout_s=5)
    cache.release(used)
    assert len(unmapped) == (1 if cause == "revoke" else 2)
    cache.close()


def test_eight_threads_share_one_driver_open(memory: DeviceMemoryIPC, extents: list[ExportedExtent]) -> None:
    cache = MappingCache(memory, instance=ME, idle_limit=8)
    calls: list[str] = []
    mappings: list[Mapping] = []

    def use() -> None:
        for _ in range(200):
            mapping, _ = cache.acquire(handle(extents[0], 1), timeout_s=10)
            mappings.append(mapping)
            cache.release(mapping)

    with observe(calls.append):
        threads = [threading.Thread(target=use) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(map(id, mappings))) == 1
    assert sum("map" in call for call in calls) <= 2, calls
    cache.close()


def test_the_own_export_is_served_without_a_driver_call(memory: DeviceMemoryIPC, extents: list[ExportedExtent]) -> None:
    cache = MappingCache(memory, instance=ME)
    calls: list[str] = []
    own = handle(extents[0], 9, instance=ME)
    with pytest.raises(StaleError):
        cache.acquire(own, timeout_s=5)
    local_exports.add(own.export_id, 0x1000, 4096)
    try:
        with observe(calls.append):
            mapping, _ = cache.acquire(own, timeout_s=5)
            assert (mapping.ptr, mapping.local) == (0x1000, True)
            cache.release(mapping)
        assert calls == []
    finally:
        local_exports.remove(own.export_id)
    cache.close()


def test_a_blocking_open_is_given_up_and_undone_when_it_returns() -> None:
    let_go, undone = threading.Event(), threading.Event()

    def slow() -> OpenedExtent:
        let_go.wait(20)
        return OpenedExtent(1, 1, None)

    start = time.monotonic()
    with pytest.raises(CompletionTimeout, match="did not return"):
        call_with_deadline(slow, timeout_s=0.1, what="open", undo=lambda _opened: undone.set())
    assert time.monotonic() - start < 2
    assert not undone.is_set()
    let_go.set()
    assert undone.wait(5)


def test_a_thousand_cycles_leak_nothing(memory: DeviceMemoryIPC, extents: list[ExportedExtent]) -> None:
    cache = MappingCache(memory, instance=ME, idle_limit=0)

    def cycle() -> None:
        mapping, _ = cache.acquire(handle(extents[0], 1), timeout_s=5)
        cache.release(mapping)

    cycle()
    fds, maps = len(os.listdir("/proc/self/fd")), _maps()
    for _ in range(1000):
        cycle()
    assert (len(os.listdir("/proc/self/fd")), _maps() <= maps + 8) == (fds, True)
    cache.close()


def _maps() -> int:
    with open("/proc/self/maps") as lines:
        return sum(1 for _ in lines)
