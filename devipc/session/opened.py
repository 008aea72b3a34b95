"""Fences that were opened from one peer: poisoned when it dies, closed when this side leaves.

Owns the list. It knows fences; it knows no connection.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from devipc.completion import Fence
from devipc.deadline import deadline_after, remaining
from devipc.errors import UsageError
from devipc.types import PoisonReason

__all__ = ["OpenedFences"]

_log = logging.getLogger("devipc.session")


class OpenedFences:
    """Fences of one peer that this process follows. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fences: list[Fence] = []
        self._over = False

    def add(self, fence: Fence) -> bool:
        """Keep ``fence``; False, and nothing kept, once the peer has left: nobody would poison it."""
        with self._lock:
            if not self._over:
                self._fences = [*(kept for kept in self._fences if not kept.closed), fence]
            return not self._over

    def poison(self, reason: PoisonReason, *, writer_gone: Callable[[], bool]) -> None:
        """Poison all of them, and keep no further one; see :meth:`devipc.completion.Fence.poison`."""
        with self._lock:
            self._over = True
            fences = list(self._fences)
        for fence in fences:
            try:
                fence.poison(reason, writer_gone=writer_gone)
            except UsageError:
                _log.debug("fence was closed while its peer left")
            except Exception:  # the waiters of the next fence must be released too
                _log.exception("a fence of a peer that left is not poisoned again")

    def close(self, *, timeout_s: float) -> None:
        """Close all of them, together within about ``timeout_s``, and keep no further one."""
        with self._lock:
            self._over = True
            fences, self._fences = self._fences, []
        deadline = deadline_after(timeout_s)
        for fence in fences:
            try:
                fence.close(remaining(deadline))
            except Exception:  # what a driver refuses must not keep the others open
                _log.exception("a fence of a peer could not be closed")

    @property
    def all_closed(self) -> bool:
        """True when none is open here. A fence outlives its peer, so that whoever waits for it learns why it failed."""
        with self._lock:
            return all(fence.closed for fence in self._fences)
