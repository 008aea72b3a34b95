"""Rig: one opened device with what every case needs to move content and to hold work back.

Owns staging memory, a stream, and latches. Device memory is never touched by the host: content moves by copies through
registered staging, so that the same case runs on every backend. Waiting is polling a marker under a deadline.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from devipc.absence import missing
from devipc.conformance.staging import PAGE, STAGING_NBYTES, Staging, Unavailable, compare, content, given_back, until
from devipc.errors import CapabilityError, DevIPCError
from devipc.interfaces.backend import Device
from devipc.interfaces.memory import Allocation, DeviceMemoryIPC
from devipc.interfaces.sync import InterprocessEvents, WordWaits, WordWrites
from devipc.interfaces.transfer import DeviceTransfer, Stream
from devipc.types import HandleKind

__all__ = ["Latch", "Rig"]

_COPY_NBYTES = 32 << 20
_HOLD_S = 0.4


class Latch:
    """Holds back whatever is submitted to a stream behind it, until it is opened.

    A device wait on a word where there are such; else a queue of copies that takes a while, so that :attr:`held` must
    be asked *after* each observation that depends on it.
    """

    def __init__(self, rig: Rig, stream: Stream) -> None:
        self._rig = rig
        self._word = -1
        if rig.has_latches:
            self._word = rig.take_word()
            rig.word_waits.wait(stream, rig.word_ptr(self._word), 1)
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
            raise Unavailable(missing(device, "transfer").message)
        self.transfer: DeviceTransfer = device.transfer
        with contextlib.ExitStack() as undo:
            try:
                self.staging = Staging(device.transfer, STAGING_NBYTES)
            except CapabilityError as error:
                raise Unavailable(f"content cannot be moved, host memory is not registered: {error.message}") from error
            undo.callback(self.staging.close)
            self.words = Staging(device.transfer, PAGE)
            undo.callback(self.words.close)
            self.stream = device.transfer.create_stream()
            undo.pop_all()
        self._next_word = 1  # primitives are tried on word 0
        self._refusals: dict[str, str] = {}
        self._ballast: tuple[Allocation, Staging] | None = None
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
            raise Unavailable(missing(self.device, "memory").message)
        return self.device.memory

    @property
    def word_writes(self) -> WordWrites:
        """Word writes that were seen working; raises :class:`Unavailable` where they are missing or refused by type."""
        return cast(WordWrites, self._primitive("word_writes", lambda it: it.write(self.stream, self.word_ptr(0), 0)))

    @property
    def word_waits(self) -> WordWaits:
        """Word waits that were seen working, likewise."""
        return cast(WordWaits, self._primitive("word_waits", lambda it: it.wait(self.stream, self.word_ptr(0), 0)))

    @property
    def events(self) -> InterprocessEvents:
        """Events that could be made, likewise."""
        return cast(InterprocessEvents, self._primitive("events", lambda it: it.destroy(it.create())))

    def _primitive(self, name: str, use: Callable[[Any], object]) -> object:
        """Return a primitive after trying it once: drivers claim more than they do, and refuse at the first use."""
        primitive = getattr(self.device.sync, name, None)
        if name not in self._refusals:
            self._refusals[name] = missing(self.device, name).message if primitive is None else ""
            if primitive is not None:
                try:
                    use(primitive)
                except CapabilityError as error:
                    self._refusals[name] = f"{name} refused: {error.message}"
        if self._refusals[name]:
            raise Unavailable(self._refusals[name])
        return primitive

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
        with contextlib.suppress(Unavailable):
            return self.word_waits is not None
        return False

    def take_word(self) -> int:
        """Return the index of a word that is zero and that nobody waits for."""
        index = self._next_word
        self._next_word = index % (PAGE // 8 - 1) + 1
        self.words.set_word(index, 0)
        return index

    def word_ptr(self, index: int) -> int:
        """Return the device's address of a word."""
        return self.words.ptr + 8 * index

    def queue_copies(self, stream: Stream) -> None:
        """Queue copies to the device that take about half a second: over the wire, since queues are not endless."""
        if self._ballast is None:
            staging = Staging(self.transfer, _COPY_NBYTES)
            try:
                self._ballast = self.memory.allocate(_COPY_NBYTES), staging
            except BaseException:
                staging.close()
                raise
            self._copy_ballast(stream, 2)  # the first ones also touch the memory for the first time
            self.finish(stream, "copies to the device")
            started = time.monotonic()
            self._copy_ballast(stream, 8)
            self.finish(stream, "copies to the device")
            self._copies = max(8, int(8 * _HOLD_S / max(time.monotonic() - started, 1e-4)))
        self._copy_ballast(stream, self._copies)

    def _copy_ballast(self, stream: Stream, count: int) -> None:
        assert self._ballast is not None
        allocation, staging = self._ballast
        for _ in range(count):
            self.transfer.copy(stream, allocation.ptr, staging.ptr, _COPY_NBYTES)

    def free_nbytes(self) -> int:
        """Return how much device memory is free."""
        return self.transfer.memory_info().free_nbytes

    def warm_up(self) -> None:
        """Use every primitive once, so that what a driver makes at its first use is no growth later."""
        steps: list[Callable[[], object]] = [self._warm_up_streams, self._warm_up_events]
        for kind in self.device.memory.kinds() if self.device.memory is not None else ():
            steps.append(functools.partial(self._warm_up_kind, kind))
        for step in steps:
            with contextlib.suppress(DevIPCError, AssertionError, Unavailable):
                step()

    def _warm_up_streams(self) -> None:
        self.carry(self.stream, self.staging.ptr, self.staging.ptr + PAGE, PAGE)
        self.finish(self.stream, "a copy by way of the device")
        with self.new_stream() as stream, self.latch(stream):
            pass

    def _warm_up_events(self) -> None:
        events = self.events
        event = events.create()
        try:
            events.export(event)
            events.record(event, self.stream)
        finally:
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
        if self._detour is not None:
            self.memory.free(self._detour)
        if self._ballast is not None:
            self.memory.free(self._ballast[0])
            self._ballast[1].close()
        self.device.close()
