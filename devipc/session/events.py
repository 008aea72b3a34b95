"""What happened to peers, in order: a queue to take from, and callbacks.

Owns the order. Events are noted under whatever lock their cause holds; callbacks run later, outside of it, one by one.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from devipc.channel.link import PeerState

if TYPE_CHECKING:
    from devipc.session.peer import Peer

__all__ = ["PeerEvent", "PeerEvents"]

_log = logging.getLogger("devipc.session")
_MAX_EVENTS = 1024  # those that nobody takes keep their peers alive; the oldest go


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """Something that happened to a peer, in the order in which it was noticed."""

    peer: Peer
    state: PeerState


class PeerEvents:
    """All events of one endpoint. Any thread."""

    def __init__(self) -> None:
        self.taken: queue.SimpleQueue[PeerEvent] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._callbacks: tuple[Callable[[PeerEvent], None], ...] = ()
        self._untold: deque[PeerEvent] = deque()
        self._telling = False

    def subscribe(self, callback: Callable[[PeerEvent], None]) -> None:
        """Have ``callback`` told of every later event."""
        with self._lock:
            self._callbacks = (*self._callbacks, callback)

    def note(self, event: PeerEvent) -> None:
        """Put an event in its place. Never blocks and calls nobody; :meth:`tell` follows, outside of all locks."""
        with self._lock:
            self.taken.put(event)
            if self.taken.qsize() > _MAX_EVENTS:
                self.taken.get_nowait()
            self._untold.append(event)

    def tell(self) -> None:
        """Run the callbacks of all noted events, unless another thread is at it: then that one goes on to these."""
        with self._lock:
            if self._telling:
                return
            self._telling = True
        while True:
            with self._lock:
                if not self._untold:
                    self._telling = False
                    return
                event, callbacks = self._untold.popleft(), self._callbacks
            for callback in callbacks:
                try:
                    callback(event)
                except BaseException:  # also an exit: the thread has to go on, it has more to tell
                    _log.exception("an event callback failed")
