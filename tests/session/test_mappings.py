"""The import cache: one driver open per export, nothing stale handed out, nothing in use dropped."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext

import pytest

from devipc.calltrace import observe
from devipc.deadline import call_with_deadline
from devipc.errors import ClosedError, CompletionTimeout, DevIPCError, DriverError, StaleError, UsageError
from devipc.interfaces.memory import DeviceMemoryIPC
from devipc.mappings import Mapping, MappingCache, local_exports
from devipc.registry import load_backend
from devipc.types import ExportedExtent, OpenedExtent
from devipc.wire import MemoryHandle

PEER = b"p" * 16
ME = b"m" * 16
BEGUN_S = 0.5  # within this a thread has begun, also where both processors are busy
LET_GO_S = 20.0


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
        let_go.wait(LET_GO_S)
        return OpenedExtent(1, 1, None)

    start = time.monotonic()
    with pytest.raises(CompletionTimeout, match="did not return"):
        call_with_deadline(slow, timeout_s=BEGUN_S, what="open", undo=lambda _opened: undone.set())
    assert time.monotonic() - start < LET_GO_S / 2
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


# --- what is given up, and what a driver does not unmap ---------------------------------------------------------------


class Driving:
    """What a cache is driving in: how many threads are, and what each of them can be kept from entering by."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.inside = 0
        self.refused: list[tuple[str, int]] = []
        self._before = before
        self._changed = threading.Condition()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self._before()
        with self._changed:
            self.inside += 1
        try:
            yield
        finally:
            with self._changed:
                self.inside -= 1
                self._changed.notify_all()

    def on_refused(self, error: Exception) -> None:
        self.refused.append((str(error), self.inside))

    def wait_left(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: not self.inside, 10)


class Refusing:
    """The host's memory interface, which unmaps and says that it did not; ``opening(number)`` precedes each open."""

    def __init__(self, real: DeviceMemoryIPC, opening: Callable[[int], None] = lambda _number: None) -> None:
        self._real = real
        self._opening = opening
        self._opened = 0

    def open(self, extent: ExportedExtent) -> OpenedExtent:
        self._opened += 1
        self._opening(self._opened)
        return self._real.open(extent)

    def close(self, opened: OpenedExtent) -> None:
        self._real.close(opened)
        raise DriverError("unmap failed")


def test_an_open_that_is_given_up_before_it_began_never_begins(
    memory: DeviceMemoryIPC, extents: list[ExportedExtent]
) -> None:
    let_go, entered = threading.Event(), threading.Event()
    calls: list[str] = []

    def before() -> None:
        if threading.current_thread().name == "devipc-open":
            let_go.wait(LET_GO_S)
            entered.set()

    driving = Driving(before)
    cache = MappingCache(memory, instance=ME, driving=driving)
    fds = len(os.listdir("/proc/self/fd"))
    with observe(calls.append):
        with pytest.raises(CompletionTimeout):
            cache.acquire(handle(extents[0], 1), timeout_s=0.1)
        assert (driving.inside, calls) == (0, [])
        let_go.set()
        assert entered.wait(5)
        for thread in threading.enumerate():
            if thread.name == "devipc-open":
                thread.join(5)
    assert calls == []
    assert len(os.listdir("/proc/self/fd")) == fds
    cache.close()


def test_an_open_within_an_open_is_where_that_is_for_as_long_as_it_lasts() -> None:
    let_go, began = threading.Event(), threading.Event()
    driving = Driving()

    def stuck() -> int:
        began.set()
        let_go.wait(LET_GO_S)
        return 1

    def of_a_backend() -> int:
        return call_with_deadline(stuck, timeout_s=BEGUN_S, what="open", undo=lambda _opened: None)

    with pytest.raises(CompletionTimeout):
        call_with_deadline(of_a_backend, timeout_s=10, what="open", undo=lambda _opened: None, around=driving)
    assert began.is_set()
    assert driving.inside == 1
    let_go.set()
    driving.wait_left()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_drives_hears_that_an_open_which_was_given_up_is_not_undone(
    memory: DeviceMemoryIPC, extents: list[ExportedExtent]
) -> None:
    let_go, driving = threading.Event(), Driving()

    def opening(_number: int) -> None:
        let_go.wait(LET_GO_S)

    stuck = Refusing(memory, opening)
    cache = MappingCache(stuck, instance=ME, driving=driving, on_refused=driving.on_refused)  # type: ignore[arg-type]
    with pytest.raises(CompletionTimeout):
        cache.acquire(handle(extents[0], 1), timeout_s=BEGUN_S)
    assert (driving.inside, driving.refused) == (1, [])
    let_go.set()
    driving.wait_left()
    assert [error for error, _ in driving.refused] == ["unmap failed"]
    assert driving.refused[0][1] == 1, "heard only when nothing seems to be under way any more"


@pytest.mark.parametrize("what", ["open_fails", "stale", "released"])
def test_who_drives_hears_of_what_is_not_unmapped(
    memory: DeviceMemoryIPC, extents: list[ExportedExtent], what: str
) -> None:
    driving = Driving()

    def opening(number: int) -> None:
        if what == "open_fails" and number == 2:
            raise DriverError("open failed")
        if what == "stale":
            cache.peer_died(PEER)

    cache = MappingCache(
        Refusing(memory, opening),  # type: ignore[arg-type]
        instance=ME,
        idle_limit=0,
        driving=driving,
        on_refused=driving.on_refused,
    )

    def use() -> None:
        for mapping, _ in cache.acquire_all([handle(extents[n], n) for n in (1, 2)], timeout_s=5, leases=[1, 2]):
            cache.release(mapping)

    with pytest.raises(DevIPCError) as caught:
        use()
    first = {"open_fails": "open failed", "stale": "the exporter died", "released": "unmap failed"}
    assert caught.value.message == first[what], "what failed first is no less true when its undoing fails too"
    assert len(caught.value.left) == {"open_fails": 1, "stale": 2, "released": 0}[what]
    assert [error for error, _ in driving.refused[:1]] == ["unmap failed"]
    assert all(inside for _, inside in driving.refused)
    assert driving.inside == 0


@pytest.mark.parametrize("what", ["stale", "released", "closed"])
def test_who_lent_it_hears_of_an_unmap_when_nobody_drives_any_more(
    memory: DeviceMemoryIPC, extents: list[ExportedExtent], what: str
) -> None:
    """It may stand still, and take nothing for seconds: that is no driver that hangs."""
    driving = Driving()
    heard: list[tuple[Hashable, int]] = []

    class Real(Refusing):
        def close(self, opened: OpenedExtent) -> None:
            self._real.close(opened)

    def opening(_number: int) -> None:
        if what == "stale":
            cache.peer_died(PEER)

    cache = MappingCache(
        Real(memory, opening),  # type: ignore[arg-type]
        instance=ME,
        idle_limit=0 if what == "released" else 8,
        on_unmapped=lambda mapping: heard.append((mapping.lease, driving.inside)),
        driving=driving,
    )
    with pytest.raises(StaleError) if what == "stale" else nullcontext():
        for mapping, _ in cache.acquire_all([handle(extents[n], n) for n in (1, 2)], timeout_s=5, leases=[1, 2]):
            cache.release(mapping)
    cache.close()
    assert heard == [(1, 0), (2, 0)]
