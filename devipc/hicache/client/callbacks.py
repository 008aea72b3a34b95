"""The thread on which a client's callbacks run, so that no engine thread ever waits for a caller's code.

Owns its life: it starts with the first callback. It knows nothing of what it calls.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial

from devipc.deadline import start_thread

__all__ = ["CallbackThread", "run_hooks"]

_log = logging.getLogger("devipc.hicache")


class CallbackThread:
    """Runs callables in order. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def later(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return what lets ``call`` run soon, once it is called itself: that cannot fail any more, nor block.

        Raises
        ------
        ResourceExhausted
            When no thread can be started.
        """
        with self._lock:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="devipc-hicache-callbacks", daemon=True)
                start_thread(thread, "run callbacks")
                self._thread = thread
        return partial(self._put, call)

    def _put(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._closed:
                self._queue.put(call)
                return
        _log.warning("a callback came after its client was closed")

    def close(self, timeout_s: float) -> None:
        """Run what is queued, then end the thread; waits for that, except on the thread itself.

        A callback that does not return in time is left behind, and said so.
        """
        with self._lock:
            self._closed = True
            thread = self._thread
            self._queue.put(None)
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout_s)
        if thread.is_alive():
            _log.warning("a callback has not returned %g s after its client was closed", timeout_s)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except BaseException:  # SystemExit too: the callbacks behind it are others'
                _log.exception("a callback of a cache operation failed")


def run_hooks(hooks: list[Callable[[], None]]) -> None:
    """Call all of them: one that fails is neither the others' trouble nor that of the thread that brought a status."""
    for hook in hooks:
        try:
            hook()
        except KeyboardInterrupt:
            raise
        except BaseException:
            _log.exception("a hook of a cache operation failed")
