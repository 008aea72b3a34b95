"""Allocating, and opening what a peer exported, while each call of the driver fails, and each that is made to undo it.

Owns the peer that tries them all. Knows no vendor: the calls are those that were seen where nothing failed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from devipc.calltrace import observe
from devipc.errors import DevIPCError
from devipc.opening import close_extents, open_extents
from devipc.spi import Allocation, HandleKind, OpenedExtent, close_fds
from devipc.undoing import what_is_left

from .peers import Channel, peer

MIB = 2**20
COUNT = 2
_FAILS = 999
_TIMEOUT_S = 20.0


class _Tries:
    """Something made in this process again and again, disturbed by rules."""

    def __init__(self, sim: Any, make: Callable[[list[Exception]], Any], take_back: Callable[[Any], None]) -> None:
        self._sim, self._make, self._take_back = sim, make, take_back
        self.calls: list[str] = []
        self._said = 0

    def _live(self) -> dict[str, int]:
        """What the driver has of this process's."""
        counters = self._sim.report().counters
        return {name: count for name, count in counters.items() if name.startswith("live_") and "bytes" not in name}

    @contextmanager
    def _disturbed(self, numbers: Sequence[int]) -> Iterator[None]:
        """Let the calls of these numbers fail, and note all."""
        for number in numbers:
            name = self.calls[number]
            before = sum(call.startswith(name) for call in self.calls[:number])
            self._sim.inject(f"{name}*@{before + 1}={_FAILS}")
        self.calls = []
        try:
            with observe(self.calls.append):
                yield
        finally:
            self._sim.clear_faults()

    def _once(self, *numbers: int) -> bool:
        """Make it, and take it back; return False when it was not to be had, and what stays of it was said."""
        before, heard = self._live(), list[Exception]()
        try:
            with self._disturbed(numbers):
                made = self._make(heard)
        except DevIPCError as error:
            self._check(before, error, heard)
            return False
        assert not heard
        self._take_back(made)
        assert self._live() == before, f"without a word, though {numbers} failed"
        return True

    def _check(self, before: dict[str, int], error: DevIPCError, heard: list[Exception]) -> None:
        """What stays was said; each call that fails keeps one thing of a kind."""
        left = what_is_left(error)
        deadline = time.monotonic() + 2.0  # of work that was queued before the failure
        while max(grown := self._grown(before), default=0) > len(left):
            assert time.monotonic() < deadline, f"{error}: {grown}, and said is {left}"
            time.sleep(0.01)
        assert heard == list(left)
        assert all(isinstance(one, DevIPCError) and one.status is not None for one in left)
        assert not (left and error.retryable)
        self._said += bool(left)

    def _grown(self, before: dict[str, int]) -> list[int]:
        return [count - before[name] for name, count in self._live().items() if count > before[name]]

    def all(self) -> None:
        """Try every call, and with each that matters every one that is made after it."""
        self._take_back(self._make([]))  # what is only done once is done
        assert self._once()
        calls = list(self.calls)
        for number in range(len(calls)):
            self.calls = list(calls)
            if self._once(number):
                continue
            undone = list(self.calls)
            for later in range(number + 1, len(undone)):
                self.calls = list(undone)
                self._once(number, later)
        assert self._said, "nothing was ever left: no undoing was disturbed"


def fail_to_open(device: Any, sim: Any, channel: Channel) -> None:
    """Open what the other side exports for each try anew."""

    def opened(heard: list[Exception]) -> tuple[OpenedExtent, ...]:
        channel.send("next")
        extents = [channel.receive_extent() for _ in range(COUNT)]
        try:
            return open_extents(device.memory, extents, timeout_s=_TIMEOUT_S, on_refused=heard.append)
        finally:
            for extent in extents:
                close_fds(extent.fds)

    _Tries(sim, opened, lambda made: close_extents(device.memory, made)).all()
    channel.send("done")
    channel.receive()
    os._exit(0)  # with what the driver did not take back


def fail_to_allocate(device: Any, sim: Any, channel: Channel) -> None:
    """Allocate memory of a kind, with zeros."""
    kind = HandleKind(channel.receive())

    def allocated(heard: list[Exception]) -> Allocation:
        try:
            made: Allocation = device.memory.allocate(2 * MIB, kind=kind, zero=True)
        except DevIPCError as error:
            heard += what_is_left(error)
            raise
        return made

    _Tries(sim, allocated, device.memory.free).all()
    channel.send("done")
    channel.receive()
    os._exit(0)


def check_allocations(kind: str) -> None:
    """Let a peer try to allocate memory of a kind."""
    with peer(fail_to_allocate) as other:
        other.channel.send(kind)
        assert other.channel.receive() == "done"
        other.channel.send()


def check_opens(device: Any, kind: str) -> None:
    """Export memory of a kind to a peer that tries to open it."""
    shared: list[Any] = []

    def unshare() -> None:
        while shared:
            extent, block = shared.pop()
            device.memory.release(extent)
            device.memory.free(block)

    with peer(fail_to_open) as other:
        while other.channel.receive() == "next":
            unshare()
            for _ in range(COUNT):
                block = device.memory.allocate(2 * MIB, kind=HandleKind(kind))
                shared.append((device.memory.export(block.ptr, block.nbytes), block))
                other.channel.send_extent(shared[-1][0])
        other.channel.send()
    unshare()
