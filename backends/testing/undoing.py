"""Allocating, and opening what a peer exported, while each call of the driver fails, and each that is made to undo it.

Owns the peer that tries them all, and an interrupt at one of them. Knows no vendor: the calls are those that were seen
where nothing failed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from devipc.calltrace import observe
from devipc.errors import DevIPCError
from devipc.opening import close_extents, open_extents
from devipc.spi import Allocation, HandleKind, OpenedExtent, close_fds
from devipc.undoing import what_is_left

from .peers import Channel, peer, vendor

MIB = 2**20
COUNT = 2
_TIMEOUT_S = 20.0


class _Tries:
    """Something made in this process again and again, disturbed by rules.

    With ``cold`` each time on a device that was just opened, so that what is only done once is done each time.
    """

    def __init__(
        self,
        sim: Any,
        device: Any,
        make: Callable[[Any, list[Exception]], Any],
        take_back: Callable[[Any, Any], None],
        *,
        status: int,
        cold: bool,
    ) -> None:
        self._sim, self._device, self._make, self._take_back = sim, device, make, take_back
        self._status, self._cold = status, cold
        self.calls: list[str] = []
        self._said = 0

    def _live(self) -> dict[str, int]:
        """What the driver has of this process's, without events, which are kept and used again."""
        counters = self._sim.report().counters
        other = ("live_bytes", "live_events")
        return {name: count for name, count in counters.items() if name.startswith("live_") and name not in other}

    @contextmanager
    def _on(self) -> Iterator[Any]:
        """The device, with its pools and caches as they are between two uses."""
        if not self._cold:
            self._take_back(self._device, self._make(self._device, []))
            yield self._device
            return
        device = vendor().open_device()
        try:
            yield device
        finally:
            device.close()

    @contextmanager
    def _disturbed(self, numbers: Sequence[int]) -> Iterator[None]:
        """Let the calls of these numbers fail, and note all."""
        for number in numbers:
            name = self.calls[number]
            before = sum(call.startswith(name) for call in self.calls[:number])
            self._sim.inject(f"{name}*@{before + 1}={self._status}")
        self.calls = []
        try:
            with observe(self.calls.append):
                yield
        finally:
            self._sim.clear_faults()

    def _once(self, *numbers: int) -> bool:
        """Make it, and take it back; return False when it was not to be had, and what stays of it was said."""
        names = [self.calls[number] for number in numbers]
        heard = list[Exception]()
        failed: DevIPCError | None = None
        before = self._live()
        with self._on() as device:
            if not self._cold:
                before = self._live()
            try:
                with self._disturbed(numbers):
                    made = self._make(device, heard)
            except DevIPCError as error:
                failed = error
            else:
                self._take_back(device, made)
        if failed is None:
            assert not heard
            assert self._live() == before, f"without a word, though {names} failed"
            return True
        self._check(before, failed, heard, names)
        return False

    def _check(self, before: dict[str, int], error: DevIPCError, heard: list[Exception], names: list[str]) -> None:
        """What stays was said, by the calls that failed: each keeps one thing of a kind."""
        left = what_is_left(error)
        deadline = time.monotonic() + 2.0  # of work that was queued before the failure
        while max(grown := self._grown(before), default=0) > len(left):
            assert time.monotonic() < deadline, f"{names} failed: {error}: {grown}, and said is {left}"
            time.sleep(0.01)
        assert heard == list(left), f"{names} failed: heard was {heard}, and said is {left}"
        for one in left:
            assert isinstance(one, DevIPCError)
            assert one.status is not None
            assert one.status.value == self._status, f"{names} failed: {error}"
            assert any(one.status.call.startswith(name) for name in names), f"{one.status} is none of {names}"
        assert len(left) <= len(names), f"{names} failed: {error}"
        assert not (left and error.retryable)
        assert not self._sim.counter("writes_of_freed")
        self._said += bool(left)

    def _grown(self, before: dict[str, int]) -> list[int]:
        return [count - before[name] for name, count in self._live().items() if count > before[name]]

    def all(self) -> None:
        """Try every call, and with each that matters every one that is made after it."""
        assert self._once()
        calls = list(self.calls)
        for number in range(len(calls)):
            self.calls = list(calls)
            if self._once(number) and self.calls == calls:
                continue
            undone = list(self.calls)
            for later in range(number + 1, len(undone)):
                self.calls = list(undone)
                self._once(number, later)
        assert self._said, "nothing was ever left: no undoing was disturbed"


def fail_to_open(device: Any, sim: Any, channel: Channel) -> None:
    """Open what the other side exports for each try anew."""
    status, cold = channel.receive()

    def opened(device: Any, heard: list[Exception]) -> tuple[OpenedExtent, ...]:
        channel.send("next")
        extents = [channel.receive_extent() for _ in range(COUNT)]
        try:
            return open_extents(device.memory, extents, timeout_s=_TIMEOUT_S, on_refused=heard.append)
        finally:
            for extent in extents:
                close_fds(extent.fds)

    def closed(device: Any, made: tuple[OpenedExtent, ...]) -> None:
        close_extents(device.memory, made)

    _Tries(sim, device, opened, closed, status=status, cold=cold).all()
    channel.send("done")
    channel.receive()
    os._exit(0)  # with what the driver did not take back


def fail_to_allocate(device: Any, sim: Any, channel: Channel) -> None:
    """Allocate memory of a kind, or of whichever can be had, with zeros."""
    kind, status, cold = channel.receive()

    def allocated(device: Any, heard: list[Exception]) -> Allocation:
        try:
            made: Allocation = device.memory.allocate(2 * MIB, kind=kind and HandleKind(kind), zero=True)
        except DevIPCError as error:
            heard += error.left  # at the error itself, where a caller looks
            raise
        return made

    def freed(device: Any, made: Allocation) -> None:
        device.memory.free(made)

    _Tries(sim, device, allocated, freed, status=status, cold=cold).all()
    channel.send("done")
    channel.receive()
    os._exit(0)


def check_allocations(kind: str | None, *, status: int = 999, cold: bool = False) -> None:
    """Let a peer try to allocate memory of a kind, while calls answer ``status``."""
    with peer(fail_to_allocate) as other:
        other.channel.send((kind, status, cold))
        assert other.channel.receive() == "done"
        other.channel.send()


def check_opens(device: Any, kind: str, *, status: int = 999, cold: bool = False) -> None:
    """Export memory of a kind to a peer that tries to open it, while calls answer ``status``."""
    shared: list[Any] = []

    def unshare() -> None:
        while shared:
            extent, block = shared.pop()
            device.memory.release(extent)
            device.memory.free(block)

    with peer(fail_to_open) as other:
        other.channel.send((status, cold))
        while other.channel.receive() == "next":
            unshare()
            for _ in range(COUNT):
                block = device.memory.allocate(2 * MIB, kind=HandleKind(kind))
                shared.append((device.memory.export(block.ptr, block.nbytes), block))
                other.channel.send_extent(shared[-1][0])
        other.channel.send()
    unshare()


@contextmanager
def interrupted(driver: Any, name: str, *, before: bool = False) -> Iterator[None]:
    """Interrupt one call of a vendor's module, behind it or before it."""
    call, name_of = driver.call, [name]

    def interrupting(called: str, *args: Any, **options: Any) -> Any:
        hit = called in name_of
        if hit:
            name_of.clear()
        if hit and before:
            raise KeyboardInterrupt
        value = call(called, *args, **options)
        if hit:
            raise KeyboardInterrupt
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "call", interrupting)
        yield


def check_same(before: dict[str, int], sim: Any) -> None:
    """Compare what the driver has of memory with what it had."""
    after = sim.report().counters
    names = ("live_allocations", "live_maps", "live_physical", "live_pools", "live_pool_pointers", "live_reservations")
    assert [(name, after[name]) for name in names] == [(name, before[name]) for name in names]
