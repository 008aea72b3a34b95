"""Requests under way: ours, which wait for the peer's answers, and the peer's, which wait to be served.

Owns the pairing of answers with requests, the rule that every wait ends (with the answer, at its deadline, or with the
connection), and how much of a peer's asking is kept. It knows no socket.
"""

from __future__ import annotations

import copy
import itertools
import queue
import threading

from devipc.channel.datagram import Deadline
from devipc.channel.message import Message
from devipc.channel.peerstate import PeerState
from devipc.errors import DevIPCError

__all__ = ["Call", "Calls", "Inbox"]

_MAX_REQUESTS = 256
_MAX_NOTICES = 4096
_MAX_NBYTES = 64 * 1024 * 1024


class Call:
    """One request under way."""

    __slots__ = ("answer", "done", "error", "request")

    def __init__(self, request: int) -> None:
        self.request = request
        self.done = threading.Event()
        self.answer: Message | None = None
        self.error: DevIPCError | None = None


class Calls:
    """All requests of one link that wait. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Call] = {}
        self._ending: DevIPCError | None = None

    def check(self) -> None:
        """Raise the error that ended the connection, if it has ended."""
        if self._ending is not None:
            raise copy.copy(self._ending)

    def begin(self) -> Call:
        """Return a new call with a number that was never used on this link; it must be given to :meth:`forget`."""
        with self._lock:
            self.check()
            call = Call(next(self._numbers))
            self._waiting[call.request] = call
            return call

    def result(self, call: Call, deadline: Deadline, what: str) -> Message:
        """Wait for the answer; raise what came instead of it. Blocks until the deadline.

        Raises
        ------
        CompletionTimeout
            When nothing came in time.
        """
        call.done.wait(deadline.left_s())
        self.forget(call)
        if call.error is not None:
            raise call.error
        if call.answer is None:
            raise deadline.expired(what)
        answer, call.answer = call.answer, None
        return answer

    def forget(self, call: Call) -> None:
        """Let an answer that comes from now on be dropped; again does nothing."""
        with self._lock:
            self._waiting.pop(call.request, None)

    def finish(self, request: int, answer: Message | None, error: DevIPCError | None) -> None:
        """Give a call its end; the answer of one that is no longer waiting is dropped and its descriptors closed."""
        with self._lock:
            call = self._waiting.pop(request, None)
            if call is not None:
                call.answer, call.error = answer, error
        if call is not None:
            call.done.set()
        elif answer is not None:
            answer.close_fds()

    def end(self, error: DevIPCError) -> None:
        """End all calls, and all later ones, with ``error``; the first end stays."""
        with self._lock:
            self._ending = self._ending or error
            calls = list(self._waiting.values())
            self._waiting.clear()
            for call in calls:
                call.error = copy.copy(error)
        for call in calls:
            call.done.set()


class Inbox:
    """What a peer sent and nobody has served yet: messages, and behind them its final state. One thread takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Message | PeerState | None] = queue.SimpleQueue()
        self._count = 0
        self._nbytes = 0
        self._closed = False

    def admit(self, message: Message) -> bool:
        """Keep ``message`` and its descriptors; False, and nothing is kept, when that is too much or the end was put.

        Messages that need no answer have more room, since they cannot be refused.
        """
        with self._lock:
            limit = _MAX_REQUESTS if message.request else _MAX_NOTICES
            if self._closed or self._count >= limit or self._nbytes + len(message.body) > _MAX_NBYTES:
                return False
            self._count += 1
            self._nbytes += len(message.body)
            self._queue.put(message)
            return True

    def put(self, state: PeerState) -> None:
        """Put a state behind all messages."""
        self._queue.put(state)

    def take(self) -> Message | PeerState | None:
        """Wait for the next thing and return it, owned by the caller; None at the end."""
        item = self._queue.get()
        if isinstance(item, Message):
            with self._lock:
                self._count -= 1
                self._nbytes -= len(item.body)
        return item

    def close(self) -> None:
        """Put the end behind all that is there, and keep nothing more."""
        with self._lock:
            self._closed = True
            self._queue.put(None)
