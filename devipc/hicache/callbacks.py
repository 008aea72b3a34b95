"""The thread on which a client's callbacks run, so that no engine thread ever waits for a caller's code.

Owns its life: it starts with the first callback. It knows nothing of what it calls.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

__all__ = ["CallbackThread"]

_log = logging.getLogger("devipc.hicache")


class CallbackThread:
    """Runs callables in order. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, call: Callable[[], None]) -> None:
        """Call it soon; after :meth:`close` it is dropped, and said so."""
        with self._lock:
            if self._closed:
                _log.warning("a callback came after its client was closed")
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="devipc-hicache-callbacks", daemon=True)
                self._thread.start()
            self._queue.put(call)

    def close(self) -> None:
        """Run what is queued, then end the thread; waits for that, except on the thread itself."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except Exception:
                _log.exception("a callback of a cache operation failed")
