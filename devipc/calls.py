"""Requests that wait for their answers.

Owns the pairing of answers with requests, and the rule that every wait ends: with the answer, at its deadline, or with
the connection. It knows no socket.
"""

from __future__ import annotations

import copy
import itertools
import threading

from devipc.datagram import Deadline
from devipc.errors import DevIPCError
from devipc.message import Message

__all__ = ["Call", "Calls"]


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
        call.done.wait(None if deadline.timeout_s is None else deadline.left_s())
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
