"""The "driver": which addresses the device may touch, and threads that run its work in order.

Owns what a vendor's library owns elsewhere. No address reaches a copy unless it lies in a live range, and no range is
unmapped while queued work uses it. Everything may be called from any thread.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from devipc.spi import ClosedError, ForkError, MemoryKind, ResourceExhausted, SharedMap, UsageError, report

__all__ = ["NAME", "Driver", "Range", "Worker"]

NAME = "acorn"
"""Name of the backend, in its entry point and in its errors."""

_numbers = itertools.count(1)
_NAP_S = 0.0001


@dataclass(slots=True, eq=False)
class Range:
    """Addresses ``[start, end)`` that device work may touch.

    ``mapping`` and ``fd`` are owned by it, where there are any; ``uses`` counts the queued work that touches it.
    """

    start: int
    end: int
    kind: MemoryKind
    mapping: SharedMap | None = None
    fd: int = -1
    number: int = 0
    uses: int = 0
    live: bool = True


class _Stopped(Exception):
    """The worker was stopped while its work waited."""


class Worker:
    """Work in order on one thread.

    ``completed`` is how many pieces have run. The thread is a daemon: a process that exits does not wait for it.
    """

    def __init__(self, driver: Driver) -> None:
        self.handle = next(_numbers)
        self.completed = 0
        self._driver = driver
        self._submitted = 0
        self._closing = self._stopped = False
        self._changed = threading.Condition()
        self._work: deque[tuple[Callable[[], None], list[Range]]] = deque()
        self._thread = threading.Thread(target=self._run, name=f"{NAME}-{self.handle}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise ResourceExhausted(
                "no thread left for a stream", code="threads", remedy="raise `ulimit -u`", backend=NAME
            ) from error

    def submit(self, run: Callable[[], None], held: list[Range]) -> None:
        """Append work that uses ``held``; returns at once."""
        with self._changed:
            if self._closing or self._stopped:
                self._driver.drop(held)
                raise ClosedError("the stream is destroyed", remedy="make a new stream", backend=NAME)
            self._work.append((run, held))
            self._submitted += 1
            self._changed.notify_all()

    def mark(self) -> int:
        """Return what ``completed`` will be when all work submitted so far has run."""
        with self._changed:
            return self._submitted

    def wait(self, number: int) -> None:
        """Block until ``completed`` is ``number``; raise ClosedError when the device is closed meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self.completed >= number or self._stopped)
            if self.completed < number:
                raise ClosedError("the device was closed", remedy="close it after its work", backend=NAME)

    def poll(self, ready: Callable[[], bool]) -> None:
        """Hold this worker until ``ready()``; for use inside of work."""
        while not ready():
            if self._stopped:
                raise _Stopped
            time.sleep(_NAP_S)

    def finish(self) -> None:
        """Take no more work, wait for what there is, and end the thread."""
        with self._changed:
            self._closing = True
        self.wait(self._submitted)
        self.stop()

    def stop(self) -> None:
        """Drop the work that has not begun, and end the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work or self._stopped)
                if self._stopped:
                    break
                run, held = self._work.popleft()
            try:
                run()
            except _Stopped:
                break
            finally:
                self._driver.drop(held)
            with self._changed:
                self.completed += 1
                self._changed.notify_all()
        for _, held in self._work:
            self._driver.drop(held)


class Driver:
    """State of the device in this process: its ranges and its workers."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._ranges: dict[int, Range] = {}
        self._workers: dict[int, Worker] = {}
        self.closed = False

    def enter(self, call: str) -> None:
        """Check that this process may use the device, and tell the trace: first thing in every call."""
        if os.getpid() != self._pid:
            raise ForkError("the device was opened before fork", remedy="spawn processes instead", backend=NAME)
        if self.closed:
            raise ClosedError("the device is closed", remedy="open it again", backend=NAME)
        report(f"acorn_{call}")

    def add(self, new: Range) -> Range:
        """Let work use a range. Raises UsageError when it overlaps a live one."""
        with self._changed:
            for other in self._ranges.values():
                if other.start < new.end and new.start < other.end:
                    raise UsageError(
                        f"[{new.start:#x}, {new.end:#x}) overlaps live {other.kind} memory",
                        code="overlap",
                        remedy="register each piece of host memory once, and no device memory",
                        backend=NAME,
                    )
            new.number = next(_numbers)
            self._ranges[new.number] = new
            return new

    def find(self, ptr: int, nbytes: int = 1) -> Range | None:
        """Return the live range around ``[ptr, ptr + nbytes)``."""
        with self._changed:
            return self._find(ptr, nbytes)

    def _find(self, ptr: int, nbytes: int) -> Range | None:
        return next((one for one in self._ranges.values() if one.start <= ptr and ptr + nbytes <= one.end), None)

    def hold(self, spans: Iterable[tuple[int, int]]) -> list[Range]:
        """Return the ranges around all ``(ptr, nbytes)`` and count one more use of each: all, or UsageError."""
        held: list[Range] = []
        with self._changed:
            for ptr, nbytes in spans:
                found = self._find(ptr, nbytes)
                if found is None:
                    raise UsageError(
                        f"[{ptr:#x}, {ptr + nbytes:#x}) lies in no live memory of the device",
                        code="address",
                        remedy="use memory that was allocated, opened or registered here",
                        backend=NAME,
                    )
                held.append(found)
            for one in held:
                one.uses += 1
        return held

    def drop(self, held: list[Range]) -> None:
        """Count one use less of each; the last one of a retired range unmaps it."""
        with self._changed:
            for one in held:
                one.uses -= 1
                if not one.live and not one.uses:
                    _unmap(one)
            self._changed.notify_all()

    def retire(self, number: object, kind: MemoryKind, *, wait: bool = False) -> None:
        """Take a range back: new work is refused at once, and it is unmapped behind the last queued work.

        ``wait`` blocks until then. Raises ClosedError when there is no such range (any more).
        """
        with self._changed:
            found = self._ranges.get(number) if isinstance(number, int) else None
            if found is None or found.kind is not kind:
                raise ClosedError(
                    "this memory was given back before, or is not of this device",
                    remedy="give back once what this device returned",
                    backend=NAME,
                )
            del self._ranges[found.number]
            found.live = False
            if found.fd >= 0:
                os.close(found.fd)
            if not found.uses:
                _unmap(found)
            if wait:
                self._changed.wait_for(lambda: not found.uses)

    def duplicate(self, found: Range) -> int:
        """Return a new descriptor of a range's file, owned by the caller."""
        with self._changed:
            if not found.live:
                raise ClosedError("the memory was freed meanwhile", remedy="export before freeing", backend=NAME)
            try:
                return os.dup(found.fd)
            except OSError as error:
                raise ResourceExhausted(
                    f"no descriptor for an export ({error.strerror})", code="fds", remedy="raise `ulimit -n`"
                ) from error

    def start(self) -> Worker:
        """Start a worker."""
        worker = Worker(self)
        with self._changed:
            self._workers[worker.handle] = worker
        return worker

    def worker(self, handle: object) -> Worker:
        """Return the worker with this handle; UsageError when there is none."""
        with self._changed:
            found = self._workers.get(handle) if isinstance(handle, int) else None
        if found is None:
            raise UsageError(f"there is no stream {handle!r}", remedy="pass the handle of a live stream", backend=NAME)
        return found

    def finish(self, worker: Worker) -> None:
        """End a worker after its work."""
        worker.finish()
        with self._changed:
            self._workers.pop(worker.handle, None)

    def close(self) -> None:
        """Stop all workers and unmap everything. Calling it again does nothing."""
        with self._changed:
            if self.closed:
                return
            self.closed = True
            workers, left = list(self._workers.values()), list(self._ranges.values())
        for worker in workers:
            worker.stop()
        for one in left:
            self.retire(one.number, one.kind)


def _unmap(old: Range) -> None:
    if old.mapping is not None:
        old.mapping.close()
