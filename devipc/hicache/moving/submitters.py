"""Threads that submit parts of one list of copies beside the lane's own thread.

Owns these threads and nothing of what they do. A driver takes .5 to 1 us of processor for each small copy, and takes
copies from several threads at once.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from devipc.deadline import deadline_after, remaining
from devipc.errors import DeviceLostError, DevIPCError

__all__ = ["Submitters", "raise_gravest", "submitter_count"]

_MOST = 3
_PROCESSORS_EACH = 4
_JOIN_S = 5.0
_log = logging.getLogger("devipc.hicache")


def submitter_count(processors: float | None = None) -> int:
    """Return how many threads may submit copies of one direction at a time, the lane's own among them.

    One for every four processors that this process may use (``processors``, when given), at most three.
    """
    usable = min(len(os.sched_getaffinity(0)), _quota()) if processors is None else processors
    return max(1, min(_MOST, int(usable // _PROCESSORS_EACH)))


def _quota(proc: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Return how many processors' time the control groups of this process have; infinity: no limit, or none is told.

    Source: ``cpu.max`` is a quota, or "max", and its period, of a group and all below it (Linux, cgroup v2).
    """
    try:
        own = next(
            line[3:].strip() for line in proc.read_text("utf-8", "replace").splitlines() if line.startswith("0::")
        )
    except (OSError, StopIteration):
        return math.inf
    folder = groups / own.lstrip("/")
    return min(_quota_of(group) for group in (folder, *folder.parents) if group.is_relative_to(groups))


def _quota_of(group: Path) -> float:
    try:
        quota, period = (group / "cpu.max").read_text("ascii").split()
        return math.inf if quota == "max" else float(quota) / float(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def _nothing() -> None:
    """Stand for work that is done."""


class _Part:
    """A piece of work that exactly one thread begins."""

    __slots__ = ("_owner", "error", "over", "work")

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.over = threading.Event()
        self.error: BaseException | None = None
        self._owner: dict[None, object] = {}

    def claim(self, who: object) -> bool:
        """Return True when ``who`` is the one (``setdefault`` is atomic); asked again, the answer is the same."""
        return self._owner.setdefault(None, who) is who


class Submitters:
    """Threads beside the caller's, made when they are first needed. One caller at a time, which no signal interrupts.

    They are daemons: one that a driver does not let go of keeps no interpreter from exiting.
    """

    def __init__(self) -> None:
        self._parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._told = False

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """Do all of ``works`` at once, one on the caller's thread; it also does what no thread has begun meanwhile.

        Begins nothing more behind a failure of its own. When this returns or raises, nothing is under way any more. Of
        several failures the gravest is raised.
        """
        parts = [_Part(work) for work in works]
        failures: list[BaseException] = []
        try:
            self._make(len(parts) - 1)
            for part in parts[1:] if self._threads else ():
                self._parts.put(part)
            for part in parts:
                if part.claim(self):
                    part.work()
        except BaseException as error:
            failures.append(error)
        for part in parts:
            if not part.claim(self):
                part.over.wait()
            part.work = _nothing  # it may still be in the queue
        failures += [part.error for part in parts if part.error is not None]
        try:
            raise_gravest(failures)
        finally:
            parts.clear()  # or the error's frame would keep them, and with them what they were to copy

    def _make(self, count: int) -> None:
        """Have ``count`` threads, or as many as there can be: what nobody begins the caller does."""
        while len(self._threads) < count:
            thread = threading.Thread(target=self._run, name="devipc-submit", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if not self._told:
                    _log.warning("copies are submitted by fewer threads: %s", error)
                self._told = True
                return
            self._threads.append(thread)

    def _run(self) -> None:
        while (part := self._parts.get()) is not None:
            if part.claim(part):
                try:
                    part.work()
                except BaseException as error:
                    part.error = error
                finally:
                    part.over.set()
            del part  # would be kept until the next one comes

    def close(self) -> None:
        """End the threads; nothing may be under way."""
        deadline = deadline_after(_JOIN_S)
        for _ in self._threads:
            self._parts.put(None)
        while self._threads:
            thread = self._threads.pop()
            thread.join(remaining(deadline))
            if thread.is_alive():
                _log.warning("a thread that submits copies does not end: a driver call keeps it")


def raise_gravest(failures: list[BaseException]) -> None:
    """Raise the gravest of these, if there is any, with the others noted at it; the list is empty afterwards.

    A defect comes before a lost device, and this before any other error: it decides what is done about all of them.
    """

    def rank(error: BaseException) -> int:
        if not isinstance(error, DevIPCError):
            return 0 if not isinstance(error, Exception) else 1
        return 2 if isinstance(error, DeviceLostError) else 3

    if failures:
        worst = min(failures, key=rank)
        for other in failures:
            if other is not worst:
                worst.add_note(f"and beside it: {other!r}")
        failures.clear()
        try:
            raise worst
        finally:
            del worst, other
