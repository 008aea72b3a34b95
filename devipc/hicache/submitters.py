"""Threads that submit parts of one list of copies beside the lane's own thread.

Owns these threads and nothing of what they do. A driver takes .5 to 1 us of processor for each small copy, and takes
copies from several threads at once.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence

__all__ = ["Submitters", "submitter_count"]

_MOST = 3
_PROCESSORS_EACH = 4
_JOIN_S = 5.0


def submitter_count(processors: int | None = None) -> int:
    """Return how many threads may submit copies of one direction at a time, the lane's own among them.

    One for every four processors that this process may run on (``processors``, when given), at most three.
    """
    usable = len(os.sched_getaffinity(0)) if processors is None else processors
    return max(1, min(_MOST, usable // _PROCESSORS_EACH))


class _Part:
    """A piece of work that exactly one thread begins."""

    __slots__ = ("_owner", "error", "over", "work")

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.over = threading.Event()
        self.error: BaseException | None = None
        self._owner: dict[None, object] = {}

    def claim(self, who: object) -> bool:
        """Return True when ``who`` is the one; asked again, the answer is the same."""
        return self._owner.setdefault(None, who) is who


class Submitters:
    """Threads beside the caller's, made when they are first needed. One caller at a time.

    They are daemons: one that a driver does not let go of keeps no interpreter from exiting.
    """

    def __init__(self) -> None:
        self._parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """Do all of ``works`` at once, one on the caller's thread; it also does what no thread has begun meanwhile.

        Raises the first failure, and begins nothing more behind one of its own. When this returns or raises, nothing is
        under way any more, whatever interrupts it.
        """
        parts = [_Part(work) for work in works]
        failures: list[BaseException] = []
        try:
            while len(self._threads) < len(parts) - 1:
                thread = threading.Thread(target=self._run, name="devipc-submit", daemon=True)
                thread.start()
                self._threads.append(thread)
            for part in parts[1:]:
                self._parts.put(part)
            for part in parts:
                if part.claim(self):
                    part.work()
        except BaseException as error:
            failures.append(error)
        for part in parts:
            while not (part.claim(self) or part.over.is_set()):
                try:
                    part.over.wait()
                except BaseException as error:  # an interrupt: what others submit is not to go on unseen
                    failures.append(error)
        failures += [part.error for part in parts if part.error is not None]
        if failures:
            raise failures[0]

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
        for _ in self._threads:
            self._parts.put(None)
        while self._threads:
            self._threads.pop().join(_JOIN_S)
