"""Host memory that a driver pins: in steps, undone in reverse, and where the steps meet.

Owns what is the same for every driver: all steps or none, one device address for all of them, and the splitting of
copies at the borders between steps, since drivers refuse a copy whose host side lies in two registrations. How one step
is pinned is the backend's. Submits nothing.

Registration goes in steps since one call has limits (a kernel bug at 2 GiB on Linux 6.11 to 6.13, a driver limit at
hundreds of GiB) and stalls the whole node's device calls while it runs.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import resource
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

from devipc.errors import CapabilityError, DevIPCError, UsageError
from devipc.interfaces.transfer import HostRegistration
from devipc.memfd import PAGE_NBYTES
from devipc.undoing import note_left, try_each, undo

__all__ = ["PIN_STEP_NBYTES", "Pinning", "Pins", "Rectangle", "pinning_limits"]

PIN_STEP_NBYTES = 2**30
"""How much one driver call pins."""

Rectangle = tuple[int, int, int, int, int, int]
"""dst, src, dst_pitch, src_pitch, width, height: a row of ``copy_strided``."""


class Pinning(Protocol):
    """One driver's calls about one step. All raise typed errors; all block in proportion to the size."""

    def pin(self, address: int, nbytes: int) -> None:
        """Pin and map one step."""
        ...

    def unpin(self, address: int) -> None:
        """Undo :meth:`pin`."""
        ...

    def device_ptr(self, address: int) -> int:
        """Return where the device reaches a pinned step."""
        ...

    def settle(self) -> None:
        """Take a failure that the driver keeps for its next call, so that it hits neither clean-up nor bystanders."""
        ...

    def explain(self, error: DevIPCError, *, nbytes: int, pinned: int) -> DevIPCError:
        """Return ``error`` in words about host memory; ``pinned`` bytes of ``nbytes`` had been pinned before it."""
        ...


class Pins:
    """Registrations of one device in this process. May be used from any thread.

    Parameters
    ----------
    pinning : Pinning
        The driver's calls.
    backend : str
        Name put into errors.
    step_nbytes : int
        Bytes pinned by one driver call; a multiple of the page size.
    """

    def __init__(self, pinning: Pinning, *, backend: str, step_nbytes: int = PIN_STEP_NBYTES) -> None:
        self._pinning = pinning
        self._backend = backend
        self._step = step_nbytes
        self._lock = threading.Lock()
        self._live: set[int] = set()
        self.borders: list[int] = []

    def register(self, address: int, nbytes: int) -> HostRegistration:
        """Pin and map ``[address, address + nbytes)``; all steps or none."""
        if address <= 0 or address % PAGE_NBYTES or nbytes <= 0:
            raise UsageError(
                f"host memory of {nbytes} bytes that is not aligned to pages of {PAGE_NBYTES}",
                remedy="register page-aligned memory of at least one byte",
                backend=self._backend,
            )
        starts = list(range(address, address + nbytes, self._step))
        done: list[int] = []
        try:
            for start in starts:
                self._pinning.pin(start, min(self._step, address + nbytes - start))
                done.append(start)
            registration = HostRegistration(address, nbytes, self._device_ptr(starts), tuple(starts))
            self._change(registration, live=True)
        except DevIPCError as error:
            self._pinning.settle()
            undo(self._unpin, done)
            explained = self._pinning.explain(error, nbytes=nbytes, pinned=len(done) * self._step)
            for one in error.left if explained is not error else ():
                note_left(explained, one)
            raise explained from error
        except BaseException:
            self._pinning.settle()
            undo(self._unpin, done)
            with contextlib.suppress(DevIPCError):  # an interrupt is raised when the call of a step has returned
                self._unpin(starts[len(done) : len(done) + 1])
            self._pinning.settle()
            raise
        return registration

    def _device_ptr(self, starts: list[int]) -> int:
        """Return the device address of the first step; all steps must follow it without a gap."""
        found = [self._pinning.device_ptr(start) for start in starts]
        if any(ptr - found[0] != start - starts[0] for ptr, start in zip(found, starts, strict=True)):
            raise CapabilityError(
                "this platform gives parts of registered host memory unrelated device addresses",
                code="host_memory",
                remedy=f"register at most {self._step} bytes at once",
            )
        return found[0]

    def _change(self, registration: HostRegistration, *, live: bool) -> None:
        steps = registration.token
        assert isinstance(steps, tuple)
        shift = registration.device_ptr - registration.address
        inner = {start for step in steps[1:] for start in (step, step + shift)}
        with self._lock:
            if not live and registration.address not in self._live:
                raise UsageError(
                    "the host memory was unregistered before", remedy="unregister it once", backend=self._backend
                )
            (self._live.add if live else self._live.discard)(registration.address)
            # A new list: readers in other threads keep the one that they have.
            self.borders = sorted((set(self.borders) | inner) if live else (set(self.borders) - inner))

    def unregister(self, registration: HostRegistration) -> None:
        """Undo :meth:`register`; every step is tried, the first failure is raised, at which the others are noted."""
        self._change(registration, live=False)
        steps = registration.token
        assert isinstance(steps, tuple)
        self._unpin(steps)

    def _unpin(self, starts: Sequence[int]) -> None:
        try_each([partial(self._pinning.unpin, start) for start in reversed(starts)])

    def split(self, copy: Rectangle) -> Iterator[Rectangle]:
        """Yield ``copy`` in parts that cross no border between steps of a registration."""
        dst, src, dst_pitch, src_pitch, width, height = copy
        for base, pitch in ((dst, dst_pitch), (src, src_pitch)):
            end = base + (height - 1) * pitch + width
            index = bisect.bisect_right(self.borders, base)
            if index == len(self.borders) or self.borders[index] >= end:
                continue
            row, column = divmod(self.borders[index] - base, pitch) if height > 1 else (0, self.borders[index] - base)
            if column >= width:  # the border lies between two rows
                row, column = row + 1, 0
            yield from self._parts(copy, row, column)
            return
        yield copy

    def _parts(self, copy: Rectangle, row: int, column: int) -> Iterator[Rectangle]:
        """Cut before ``row`` and, when ``column`` is not 0, inside of it."""
        dst, src, dst_pitch, src_pitch, width, height = copy

        def part(row: int, column: int, width: int, height: int) -> Iterator[Rectangle]:
            if width and height:
                d, s = dst + row * dst_pitch + column, src + row * src_pitch + column
                yield from self.split((d, s, dst_pitch, src_pitch, width, height))

        yield from part(0, 0, width, row)
        if column:
            yield from part(row, 0, column, 1)
            yield from part(row, column, width - column, 1)
            row += 1
        yield from part(row, 0, width, height - row)


def pinning_limits() -> str:
    """Return the limits of this process and machine that pinning runs into, as a text for errors."""
    soft, hard = (_limit(n) for n in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    return (
        f"RLIMIT_MEMLOCK {soft}, at most {hard}; uid {os.geteuid()}, CAP_IPC_LOCK"
        f" {'held' if _may_lock() else 'not held'}; {_available()} available"
    )


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value} bytes"


def _proc_field(path: str, name: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(f"{name}:")), "")
    except OSError:
        return ""


def _may_lock() -> bool:
    return bool(int(_proc_field("/proc/self/status", "CapEff") or "0", 16) >> 14 & 1)


def _available() -> str:
    return _proc_field("/proc/meminfo", "MemAvailable") or "unknown memory"
