"""The states of a peer, and telling those who want to know.

Owns the order in which callbacks hear of states. Who finds out about a state is not decided here.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["PeerState", "StateListeners"]

_log = logging.getLogger(__name__)


class PeerState(enum.StrEnum):
    """What is known of the peer.

    ``closed``: it, or this side, ended the connection in good order. ``dying``: it hung up without a word, broke the
    protocol or is being ended; nothing of it can be relied on, yet its device work may still land. ``gone``: its
    process is over. ``closed`` and ``gone`` are final.
    """

    CONNECTED = "connected"
    CLOSED = "closed"
    DYING = "dying"
    GONE = "gone"


class StateListeners:
    """Callbacks that hear of each state once, in order, even when several threads report. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[PeerState], None]] = []
        self._untold: deque[PeerState] = deque()
        self._telling = False
        self._closed = False

    def add(self, callback: Callable[[PeerState], None]) -> None:
        """Let ``callback`` hear of all states from now on."""
        with self._lock:
            self._callbacks.append(callback)

    def tell(self, state: PeerState) -> None:
        """Run all callbacks with ``state``, here or, while another thread is telling, behind it there.

        What a callback raises is logged.
        """
        with self._lock:
            self._untold.append(state)
            if self._telling:
                return
            self._telling = True
        while (item := self._next()) is not None:
            next_state, callbacks = item
            for callback in callbacks:
                try:
                    callback(next_state)
                except Exception:
                    _log.exception("a callback about peer state %s failed", next_state)

    def _next(self) -> tuple[PeerState, list[Callable[[PeerState], None]]] | None:
        with self._lock:
            if not self._untold or self._closed:
                self._telling = False
                return None
            return self._untold.popleft(), list(self._callbacks)

    def close(self) -> None:
        """Tell nothing more."""
        self._closed = True
