"""Threads that repeat small tasks: looking at markers, storing a poison again.

Owns when a task runs next and when its thread ends. It knows nothing of what the tasks do. A thread lives only while
it has a task, one for each name and process.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable

from devipc.deadline import no_thread

__all__ = ["IDLE", "Task", "Ticker", "ticker"]

IDLE = math.inf
"""What a task returns that has nothing to do until it is woken."""

Task = Callable[[], "float | None"]
"""Returns the seconds until it wants to run again, :data:`IDLE`, or None when it is finished for good."""

_log = logging.getLogger("devipc.completion")
_tickers: dict[tuple[int, str], Ticker] = {}
_tickers_lock = threading.Lock()


def ticker(name: str) -> Ticker:
    """Return this process's ticker of that name. A forked child gets its own: the parent's thread is not in it."""
    key = (os.getpid(), name)
    with _tickers_lock:
        return _tickers.setdefault(key, Ticker(name))


class Ticker:
    """Runs tasks on one daemon thread; all methods may be called from any thread, tasks included."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = threading.Condition()
        self._due: dict[Task, float] = {}
        self._running = False

    def wake(self, task: Task) -> None:
        """Run ``task`` as soon as possible, adding it when it is new.

        Raises
        ------
        ResourceExhausted
            When there is no thread yet, and none is to be had; the task then waits for somebody who wakes another.
        """
        with self._condition:
            self._due[task] = 0.0
            if not self._running:  # the new thread waits for the lock
                try:
                    threading.Thread(target=self._run, name=self._name, daemon=True).start()
                except RuntimeError as error:
                    raise no_thread("look after a fence", error) from error
                self._running = True
            self._condition.notify()

    def remove(self, task: Task) -> None:
        """Forget ``task``; a run that has begun goes on, so the task itself must notice that its object is closed."""
        with self._condition:
            self._due.pop(task, None)
            self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                if not self._due:
                    self._running = False
                    return
                now = time.monotonic()
                ready = [task for task, due in self._due.items() if due <= now]
                if not ready:
                    pause = min(self._due.values()) - now
                    self._condition.wait(None if pause == IDLE else pause)
                    continue
                for task in ready:
                    self._due[task] = IDLE  # a wake() while it runs must not be lost
            for task in ready:
                self._settle(task, _next_run(task))

    def _settle(self, task: Task, pause_s: float | None) -> None:
        with self._condition:
            if pause_s is None:
                if self._due.get(task) == IDLE:
                    del self._due[task]
            elif task in self._due:
                self._due[task] = min(self._due[task], time.monotonic() + pause_s)


def _next_run(task: Task) -> float | None:
    try:
        return task()
    except Exception:
        _log.exception("a background task of a fence failed and is not run again")
        return None
