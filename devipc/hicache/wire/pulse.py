"""The pulse of an engine process: words by which another process tells a stuck driver call from an idle thread.

Owns the layout of one page of shared memory, with one writer: the engine. It knows nothing of what threads do.

Word 0 is counted up every tenth of a second by a thread that does nothing else: it stands still when the process is
stopped, or a driver call keeps the interpreter. Then one word for each watched thread: 0 while it waits for work, else
the monotonic nanoseconds at which it went to the driver; then, by direction, how many copies were submitted in each
form. Both processes read one clock: they share a kernel, and the
engine is the supervisor's child.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType

from devipc.deadline import no_thread
from devipc.hicache.moving.fan import FORMS
from devipc.hicache.wire.ring import check_machine
from devipc.memfd import PAGE_NBYTES, SharedMap, create_memfd, validate_memfd

__all__ = ["THREADS", "WATCHED", "Pulse", "PulseReader"]

WATCHED = ("backup", "restore", "watch")
"""Threads that have a word of their own."""
THREADS = (*WATCHED, "beside")
"""Who is watched; the last are several threads, of which the oldest counts."""

_BEAT_S = 0.1
_FIRST = 8  # a line of its own
_BESIDE = _FIRST + THREADS.index("beside")
_LANES = THREADS[:2]
_COUNTS = _FIRST + 8


class Pulse:
    """The engine's end. Any thread; each watched thread writes its own word.

    Raises
    ------
    ResourceExhausted
        When no thread is to be had to count with; nothing stays behind.
    """

    def __init__(self) -> None:
        check_machine()
        self._fd = create_memfd("devipc-pulse", PAGE_NBYTES)
        self._map = SharedMap(self._fd, PAGE_NBYTES)
        self._words = self._map.view.cast("Q")
        self._lock = threading.RLock()  # of what follows; memory may also be let go where garbage is collected
        self._beside: dict[_Beside, int] = {}  # in the order in which they came
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="devipc-pulse", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._unmap()
            raise no_thread("show that an engine process lives", error) from error

    def fileno(self) -> int:
        """Return the descriptor for the reader; it stays this object's."""
        return self._fd

    def busy(self, thread: str) -> None:
        """Say that ``thread`` goes to the driver now, or is still getting on there."""
        self._words[_FIRST + THREADS.index(thread)] = time.monotonic_ns()

    def idle(self, thread: str) -> None:
        """Say that ``thread`` is back."""
        self._words[_FIRST + THREADS.index(thread)] = 0

    def count(self, lane: str, counts: Mapping[str, int]) -> None:
        """Publish how many copies a lane has submitted in each form."""
        first = _COUNTS + _LANES.index(lane) * len(FORMS)
        for at, form in enumerate(FORMS, first):
            self._words[at] = counts[form]

    def beside(self) -> AbstractContextManager[None]:
        """Say that a thread beside those that have a word is in the driver, for the time of a block."""
        return _Beside(self)

    def come(self, one: _Beside) -> None:
        """Begin what :meth:`beside` returned."""
        with self._lock:
            self._beside[one] = time.monotonic_ns()
            self._say_beside()

    def go(self, one: _Beside) -> None:
        """End it."""
        with self._lock:
            del self._beside[one]
            self._say_beside()

    def _say_beside(self) -> None:
        if not self._map.closed:
            self._words[_BESIDE] = next(iter(self._beside.values()), 0)  # of the one who came first

    def _beat(self) -> None:
        while not self._stopping.wait(_BEAT_S):
            self._words[0] += 1

    def close(self) -> None:
        """Stop beating, and unmap. Only when no watched thread runs any more."""
        self._stopping.set()
        self._thread.join()
        self._unmap()

    def _unmap(self) -> None:
        with self._lock:
            self._words.release()
            self._map.close()
        os.close(self._fd)


class _Beside:
    """One time that a thread is in the driver: a class, since a generator would take several times as long."""

    __slots__ = ("_pulse",)

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse

    def __enter__(self) -> None:
        self._pulse.come(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pulse.go(self)


class PulseReader:
    """The supervisor's end. Any thread.

    Parameters
    ----------
    fd : int
        What :meth:`Pulse.fileno` returned; owned, also when this raises, and closed.

    Raises
    ------
    HandleError
        When it is no such memory.
    """

    def __init__(self, fd: int) -> None:
        try:
            validate_memfd(fd, min_nbytes=PAGE_NBYTES)
            self._map = SharedMap(fd, PAGE_NBYTES, writable=False)
        finally:
            os.close(fd)
        self._words = self._map.view.cast("Q")
        self._lock = threading.Lock()
        self._beats, self._seen = self._words[0], time.monotonic()

    def stuck(self) -> dict[str, float]:
        """Return for how many seconds each thread has been in the driver, and ``process`` since the last beat.

        The last is as exact as this is asked often. Empty once it is closed.
        """
        now = time.monotonic()
        with self._lock:
            if self._map.closed:
                return {}
            if self._words[0] != self._beats:
                self._beats, self._seen = self._words[0], now
            since = {name: self._words[_FIRST + at] for at, name in enumerate(THREADS)}
            silent_s = now - self._seen
        found = {name: max(0.0, now - began / 1e9) for name, began in since.items() if began}
        return {**found, "process": silent_s}

    def plans(self) -> dict[str, dict[str, int]]:
        """Return by direction how many copies were submitted in each form; empty once it is closed. Never blocks."""
        with self._lock:
            if self._map.closed:
                return {}
            counts = iter(self._words[_COUNTS : _COUNTS + len(_LANES) * len(FORMS)])
            return {lane: {form: next(counts) for form in FORMS} for lane in _LANES}

    def close(self) -> None:
        """Unmap. Calling it again does nothing."""
        with self._lock:
            if not self._map.closed:
                self._words.release()
                self._map.close()
