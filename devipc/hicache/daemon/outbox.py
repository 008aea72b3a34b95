"""Answers on their way to one client, who may not take them: nobody that answers ever waits for that.

Owns the order of the answers and what is kept while the client does not keep up. How much that can be is bounded by
who submits: the client's own thread here takes no request while something is kept.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque

from devipc.errors import DevIPCError, ResourceExhausted
from devipc.hicache import protocol as p
from devipc.hicache.codec import frame_of_answer
from devipc.hicache.operations import Event
from devipc.hicache.results import Answer
from devipc.hicache.transport import Transport
from devipc.wire import MAX_BODY_NBYTES

__all__ = ["Outbox"]

_log = logging.getLogger("devipc.hicache")


class Outbox:
    """See the module. Any thread.

    Parameters
    ----------
    transport : Transport
        Stays the caller's.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._over = False
        self.answered: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """Answers that the client has not made room for."""
        return len(self._waiting)

    def answer(self, op: int, event: Event, answer: Answer) -> None:
        """Send an answer, or keep it. Never blocks, and raises nothing: whoever answers has others to look after."""
        frame = _encoded(op, event, answer)
        with self._lock:
            self.answered[event.value] += 1
            if self._over:
                return
            if not self._waiting and len(frame) <= MAX_BODY_NBYTES:
                try:
                    self._transport.push(frame, timeout_s=0.0)
                    return
                except ResourceExhausted:
                    pass
                except DevIPCError:  # the client is gone, or broke the rules: its thread finds out by itself
                    self._over = True
                    return
            self._waiting.append(frame)

    def flush(self, *, timeout_s: float) -> bool:
        """Send what was kept; True when all of it is out. The one thread that calls this may block for ``timeout_s``.

        Raises
        ------
        DevIPCError
            When the client is gone.
        """
        # What is on its way stays in the list, so that nothing overtakes it.
        while self._waiting:
            try:
                self._transport.push(self._waiting[0], timeout_s=timeout_s)
            except ResourceExhausted:
                return False
            with self._lock:
                self._waiting.popleft()
        return True

    def end(self) -> None:
        """Drop what is kept, and what comes."""
        with self._lock:
            self._over = True
            self._waiting.clear()


def _encoded(op: int, event: Event, answer: Answer) -> bytes:
    try:
        frame = frame_of_answer(op, event, answer)
        # What is only a list of results, no longer than the request's, is within every limit.
        return p.pack(frame) if answer.error is None and answer.detail is None else p.encode(frame)
    except DevIPCError as error:  # what cannot travel must not keep the status back
        _log.error("the answer %s of operation %d does not travel: %s", event.value, op, error)
        return p.encode(frame_of_answer(op, event, Answer(answer.results, error)))
