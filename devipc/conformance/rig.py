"""Rig: one opened device with what every case needs to move content and to hold work back.

Owns staging memory, a stream, and latches. Device memory is never touched by the host: content moves by copies through
registered staging, so that the same case runs on every backend. Waiting is polling a marker under a deadline.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from devipc.interfaces.backend import Device
from devipc.interfaces.memory import Allocation, DeviceMemoryIPC
from devipc.interfaces.sync import DeviceSyncIPC
from devipc.interfaces.transfer import DeviceTransfer, Stream
from devipc.memfd import SharedMap, create_memfd
from devipc.spi import close_fds
from devipc.types import HandleKind

__all__ = ["STAGING_NBYTES", "Latch", "Rig", "Staging", "Unavailable", "attempt", "content", "given_back", "until"]

STAGING_NBYTES = 4 << 20
"""Size of the staging memory of a rig; more is moved in pieces."""
PAGE = 4096
_COPY_NBYTES = 32 << 20
_HOLD_S = 0.4


class Unavailable(Exception):
    """The device lacks what a case needs: the case is skipped, with this as the reason."""


def content(seed: int, nbytes: int) -> bytes:
    """Return the first ``nbytes`` bytes that ``seed`` stands for; no two seeds and no shifted copy look alike."""
    return random.Random(seed).randbytes(-(-nbytes // 4) * 4)[:nbytes]


def until(condition: Callable[[], bool], timeout_s: float, *, pause_s: float = 0.0005) -> bool:
    """Ask until ``condition()`` is true or the time is over; return whether it became true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True


@contextmanager
def given_back(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` at the end of the block; after a failure without waiting for it, since a driver may be stuck."""
    try:
        yield
    except BaseException:
        attempt(undo, 1.0)
        raise
    undo()


def attempt(call: Callable[[], object], timeout_s: float) -> bool:
    """Run a call that may never return, on a thread that is left behind then; return whether it did."""

    def run() -> None:
        with contextlib.suppress(Exception):
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


class Staging:
    """Host memory that the device reaches; the host reads and writes it through :attr:`view`."""

    def __init__(self, transfer: DeviceTransfer, nbytes: int) -> None:
        fd = create_memfd("devipc-staging", nbytes)
        try:
            self._map = SharedMap(fd, nbytes)
        finally:
            close_fds([fd])
        self._transfer = transfer
        self.nbytes = nbytes
        self.address = self._map.address
        try:
            self._registration = transfer.register_host(self._map.address, nbytes)
        except BaseException:
            self._map.close()
            raise
        self.ptr = self._registration.device_ptr

    @property
    def view(self) -> memoryview:
        """The bytes."""
        return self._map.view

    def word(self, index: int) -> int:
        """Load one 64-bit word."""
        words = self._map.view.cast("Q")
        try:
            return words[index]
        finally:
            words.release()

    def set_word(self, index: int, value: int) -> None:
        """Store one 64-bit word in one store."""
        words = self._map.view.cast("Q")
        words[index] = value
        words.release()

    def close(self) -> None:
        """Unregister and unmap."""
        self._transfer.unregister_host(self._registration)
        self._map.close()


class Latch:
    """Holds back whatever is submitted to a stream behind it, until it is opened.

    A device wait on a word where there are such; else a queue of copies that takes a while, so that :attr:`held` must
    be asked *after* each observation that depends on it.
    """

    def __init__(self, rig: Rig, stream: Stream) -> None:
        self._rig = rig
        self._word = -1
        sync = rig.device.sync
        waits = sync.word_waits if sync is not None else None
        if waits is not None:
            self._word = rig.take_word()
            waits.wait(stream, rig.word_ptr(self._word), 1)
            return
        rig.queue_copies(stream)
        self._marker = rig.transfer.create_marker()
        rig.transfer.record(self._marker, stream)

    @property
    def held(self) -> bool:
        """True while nothing behind the latch can have run."""
        if self._word >= 0:
            return self._rig.words.word(self._word) == 0
        return not self._rig.transfer.query_marker(self._marker)

    def open(self) -> None:
        """Let go; blocks for the copies where there is no word."""
        if self._word >= 0:
            self._rig.words.set_word(self._word, 1)
        else:
            until(lambda: not self.held, 10 * _HOLD_S)

    def close(self) -> None:
        """Open it, and give back what it took."""
        self.open()
        if self._word < 0:
            self._rig.transfer.destroy_marker(self._marker)


class Rig:
    """One device of this process, with staging and a stream.

    Parameters
    ----------
    device : Device
        Opened; closed with the rig.
    deadline_s : float
        Limit of every wait.

    Raises
    ------
    Unavailable
        When the device moves no data.
    """

    def __init__(self, device: Device, *, deadline_s: float) -> None:
        self.device = device
        self.deadline_s = deadline_s
        if device.transfer is None:
            answer = device.capabilities().get("transfer")
            raise Unavailable(f"no transfer interface: {answer.reason if answer else 'no reason given'}")
        self.transfer: DeviceTransfer = device.transfer
        self.staging = Staging(device.transfer, STAGING_NBYTES)
        self.words = Staging(device.transfer, PAGE)
        self.stream = device.transfer.create_stream()
        self._next_word = 0
        self._ballast: Allocation | None = None
        self._detour: Allocation | None = None
        self._copies = 0

    @property
    def memory(self) -> DeviceMemoryIPC:
        """The device's memory interface.

        Raises
        ------
        Unavailable
            When there is none.
        """
        if self.device.memory is None:
            answer = self.device.capabilities().get("memory")
            raise Unavailable(f"no memory interface: {answer.reason if answer else 'no reason given'}")
        return self.device.memory

    @property
    def sync(self) -> DeviceSyncIPC:
        """The device's sync interface.

        Raises
        ------
        Unavailable
            When there is none.
        """
        if self.device.sync is None:
            answer = self.device.capabilities().get("sync")
            raise Unavailable(f"no sync interface: {answer.reason if answer else 'no reason given'}")
        return self.device.sync

    # --- moving content ----------------------------------------------------------------------------------------------

    def write(self, ptr: int, data: bytes, *, stream: Stream | None = None) -> None:
        """Bring ``data`` to ``ptr`` and wait for it."""
        used = stream or self.stream
        for start in range(0, len(data), STAGING_NBYTES):
            part = data[start : start + STAGING_NBYTES]
            self.staging.view[: len(part)] = part
            self.transfer.copy(used, ptr + start, self.staging.ptr, len(part))
            self.finish(used, f"a copy of {len(part)} bytes to the device")

    def read(self, ptr: int, nbytes: int, *, stream: Stream | None = None) -> bytes:
        """Return ``nbytes`` bytes from ``ptr``."""
        used = stream or self.stream
        parts = []
        for start in range(0, nbytes, STAGING_NBYTES):
            length = min(STAGING_NBYTES, nbytes - start)
            self.transfer.copy(used, self.staging.ptr, ptr + start, length)
            self.finish(used, f"a copy of {length} bytes from the device")
            parts.append(bytes(self.staging.view[:length]))
        return b"".join(parts)

    def carry(self, stream: Stream, dst: int, src: int, nbytes: int) -> None:
        """Enqueue the move of at most a page between two places of host memory: through the device, see `copy`."""
        assert nbytes <= PAGE
        if self._detour is None:
            self._detour = self.memory.allocate(PAGE)
        self.transfer.copy(stream, self._detour.ptr, src, nbytes)
        self.transfer.copy(stream, dst, self._detour.ptr, nbytes)

    def fill(self, ptr: int, nbytes: int, seed: int) -> None:
        """Bring the content of ``seed`` to ``ptr``."""
        self.write(ptr, content(seed, nbytes))

    def expect(self, ptr: int, nbytes: int, seed: int, what: str) -> None:
        """Raise AssertionError unless the content of ``seed`` is at ``ptr``."""
        compare(self.read(ptr, nbytes), content(seed, nbytes), what)

    def finish(self, stream: Stream, what: str, *, timeout_s: float | None = None) -> None:
        """Wait until everything on ``stream`` is done; AssertionError after the deadline."""
        marker = self.transfer.create_marker()
        try:
            self.transfer.record(marker, stream)
            limit = self.deadline_s if timeout_s is None else timeout_s
            done = until(lambda: self.transfer.query_marker(marker), limit)
        finally:
            self.transfer.destroy_marker(marker)
        if not done:
            raise AssertionError(f"{what} was not done after {limit:g} s")

    # --- streams, words, latches -------------------------------------------------------------------------------------

    @contextmanager
    def new_stream(self) -> Iterator[Stream]:
        """Yield a stream that is finished and destroyed afterwards."""
        stream = self.transfer.create_stream()
        with given_back(lambda: self.transfer.destroy_stream(stream)):
            yield stream
            self.finish(stream, "a stream that is no longer used")

    @contextmanager
    def latch(self, stream: Stream) -> Iterator[Latch]:
        """Yield a latch on ``stream``; it is open afterwards."""
        latch = Latch(self, stream)
        try:
            yield latch
        finally:
            latch.close()
        self.finish(stream, "work behind an opened latch")

    @contextmanager
    def new_staging(self, nbytes: int) -> Iterator[Staging]:
        """Yield registered host memory of its own."""
        staging = Staging(self.transfer, nbytes)
        with given_back(staging.close):
            yield staging

    @property
    def has_latches(self) -> bool:
        """True where a latch holds until it is opened; False where it is a queue of copies."""
        return self.device.sync is not None and self.device.sync.word_waits is not None

    def take_word(self) -> int:
        """Return the index of a word that is zero and that nobody waits for."""
        index = self._next_word
        self._next_word = (index + 1) % (PAGE // 8)
        self.words.set_word(index, 0)
        return index

    def word_ptr(self, index: int) -> int:
        """Return the device's address of a word."""
        return self.words.ptr + 8 * index

    def queue_copies(self, stream: Stream) -> None:
        """Queue copies inside the device that take about half a second."""
        if self._ballast is None:
            self._ballast = self.memory.allocate(2 * _COPY_NBYTES)
            started = time.monotonic()
            self._copy_ballast(stream, 8)
            self.finish(stream, "copies inside the device")
            self._copies = max(8, int(8 * _HOLD_S / max(time.monotonic() - started, 1e-4)))
        self._copy_ballast(stream, self._copies)

    def _copy_ballast(self, stream: Stream, count: int) -> None:
        assert self._ballast is not None
        for _ in range(count):
            self.transfer.copy(stream, self._ballast.ptr, self._ballast.ptr + _COPY_NBYTES, _COPY_NBYTES)

    def free_nbytes(self) -> int:
        """Return how much device memory is free."""
        return self.transfer.memory_info().free_nbytes

    def warm_up(self) -> None:
        """Use every primitive once, so that what a driver makes at its first use is no growth later."""
        self.write(self.staging.ptr + STAGING_NBYTES // 2, bytes(PAGE))
        with self.new_stream() as stream, self.latch(stream):
            pass
        if self.device.memory is not None:
            self.carry(self.stream, self.staging.ptr, self.staging.ptr + PAGE, PAGE)
            self.finish(self.stream, "a copy by way of the device")
            for kind in self.device.memory.kinds():
                self._warm_up_kind(kind)
        events = self.device.sync.events if self.device.sync is not None else None
        if events is not None:
            event = events.create()
            events.export(event)
            events.record(event, self.stream)
            events.destroy(event)

    def _warm_up_kind(self, kind: HandleKind) -> None:
        allocation = self.memory.allocate(PAGE, kind=kind, zero=True)
        try:
            self.memory.describe(allocation.ptr)
            self.memory.release(self.memory.export(allocation.ptr, PAGE))
        finally:
            self.memory.free(allocation)

    def close(self) -> None:
        """Give everything back and close the device."""
        self.transfer.destroy_stream(self.stream)
        self.words.close()
        self.staging.close()
        for allocation in (self._ballast, self._detour):
            if allocation is not None:
                self.memory.free(allocation)
        self.device.close()


def compare(found: bytes, expected: bytes, what: str) -> None:
    """Raise AssertionError that says where and how ``found`` differs."""
    if found == expected:
        return
    wrong = [index for index in range(len(expected)) if found[index] != expected[index]]
    shape = "all zeros" if not any(found) else "other content"
    raise AssertionError(
        f"{what}: {len(wrong)} of {len(expected)} bytes are wrong, the first at {wrong[0]}; it reads {shape}"
    )
