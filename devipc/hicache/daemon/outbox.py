"""Answers on their way to one client, who may not take them: nobody that answers ever waits for that.

Owns the order of the answers and what is kept while the client does not keep up. How much that can be is bounded by
who submits: the client's own thread here takes no request while something is kept.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque

from devipc.deadline import deadline_after, remaining
from devipc.errors import CompletionTimeout, DevIPCError, ResourceExhausted
from devipc.hicache.operations import Event
from devipc.hicache.results import Answer
from devipc.hicache.wire import protocol as p
from devipc.hicache.wire.codec import frame_of_answer
from devipc.hicache.wire.transport import Transport
from devipc.wire import MAX_BODY_NBYTES

__all__ = ["Outbox"]

_log = logging.getLogger("devipc.hicache")


class Outbox:
    """See the module. Any thread.

    Parameters
    ----------
    transport : Transport
        Stays the caller's.
    joins : bool
        The client takes several events in one answer.

    Attributes
    ----------
    waiting : deque of bytes
        Answers that the client has not made room for. To look at, not to change.
    """

    def __init__(self, transport: Transport, *, joins: bool) -> None:
        self._transport = transport
        self._joins = joins
        self._lock = threading.Lock()
        self.waiting: deque[bytes] = deque()
        self._over = False
        self._answered: Counter[Event] = Counter()

    @property
    def answered(self) -> Counter[str]:
        """Answers given, by event."""
        return Counter({event.value: count for event, count in self._answered.copy().items()})

    def answer(self, op: int, event: Event, answer: Answer, passed: tuple[Event, ...] = ()) -> None:
        """Send an answer, or keep it. Never blocks, and raises nothing: whoever answers has others to look after."""
        if self._joins:
            self._send(_encoded(op, event, answer, passed), event, passed)
            return
        for one in (*passed, event):
            self._send(_encoded(op, one, answer), one)

    def completed(self, op: int) -> None:
        """Answer that an operation without any result is completed; as :meth:`answer`."""
        self._send(p.pack(p.AnswerFrame(op=op, event=Event.COMPLETED)), Event.COMPLETED)

    def _send(self, frame: bytes, event: Event, passed: tuple[Event, ...] = ()) -> None:
        with self._lock:
            self._answered[event] += 1
            for one in passed:
                self._answered[one] += 1
            if self._over:
                return
            if not self.waiting and len(frame) <= MAX_BODY_NBYTES:
                try:
                    self._transport.push(frame, timeout_s=0.0)
                    return
                except (ResourceExhausted, CompletionTimeout):
                    pass
                except DevIPCError:  # the client is gone, or broke the rules: its thread finds out by itself
                    self._over = True
                    return
            self.waiting.append(frame)

    def flush(self, *, timeout_s: float) -> bool:
        """Send what was kept; True when all of it is out. The one thread that calls this may block for ``timeout_s``.

        Raises
        ------
        DevIPCError
            When the client is gone.
        """
        # What is on its way stays in the list, so that nothing overtakes it.
        deadline = deadline_after(timeout_s)
        while self.waiting:
            try:
                self._transport.push(self.waiting[0], timeout_s=remaining(deadline))
            except (ResourceExhausted, CompletionTimeout):
                # A client can make its socket too small for an answer: then this is said at once, again and again.
                time.sleep(remaining(deadline))
                return False
            with self._lock:
                self.waiting.popleft()
        return True

    def end(self) -> None:
        """Drop what is kept, and what comes."""
        with self._lock:
            self._over = True
            self.waiting.clear()


def _encoded(op: int, event: Event, answer: Answer, passed: tuple[Event, ...] = ()) -> bytes:
    try:
        frame = frame_of_answer(op, event, answer, passed)
        # What is only a list of results, no longer than the request's, is within every limit.
        return p.pack(frame) if answer.error is None and answer.detail is None else p.encode(frame)
    except DevIPCError as error:  # what cannot travel must not keep the status back
        _log.error("the answer %s of operation %d does not travel: %s", event.value, op, error)
        return p.encode(frame_of_answer(op, event, Answer(answer.results, error), passed))
