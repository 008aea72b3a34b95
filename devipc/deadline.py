"""Deadlines: the time that is left, and calls that can be given up.

Owns how long a wait may be and what becomes of a call whose caller no longer waits. It knows nothing of what is called.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from types import TracebackType
from typing import TypeVar

from devipc.errors import CompletionTimeout, ResourceExhausted
from devipc.undoing import undo as undo_for_a_cause

__all__ = [
    "bounded",
    "call_with_deadline",
    "deadline_after",
    "made_in",
    "no_thread",
    "pause_after",
    "remaining",
    "start_thread",
]

T = TypeVar("T")
_LONGEST_S = 86400.0 * 365
_LEAST_PAUSE_S, _LATE = 20e-6, 1 / 16
_around: ContextVar[Callable[[], AbstractContextManager[object]]] = ContextVar("around", default=nullcontext)


def deadline_after(timeout_s: float) -> float:
    """Return the monotonic time ``timeout_s`` seconds from now."""
    return time.monotonic() + timeout_s


def remaining(deadline: float) -> float:
    """Return the seconds left until ``deadline``: never below zero, at most what every wait can take."""
    return bounded(deadline - time.monotonic())


def bounded(timeout_s: float) -> float:
    """Return ``timeout_s`` as a wait can take it: infinity is a very long time, and no number is none."""
    return min(max(0.0, timeout_s), _LONGEST_S)


def pause_after(waited_s: float, most_s: float) -> float:
    """Return for how many seconds to sleep before looking again for what wakes nobody, having waited for ``waited_s``.

    A sixteenth of that, so that what took long is noticed relatively as soon as what did not; at most ``most_s``.
    """
    return min(max(_LATE * waited_s, _LEAST_PAUSE_S), most_s)


def no_thread(what: str, error: RuntimeError) -> ResourceExhausted:
    """Return the error for work that no thread could be started for."""
    return ResourceExhausted(
        f"no thread to be had to {what} ({error})",
        code="threads",
        remedy="raise `ulimit -u` or the container's pids limit, or free memory",
    )


def start_thread(thread: threading.Thread, what: str) -> None:
    """Start a thread that is to do ``what``.

    Raises
    ------
    ResourceExhausted
        When none is to be had.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise no_thread(what, error) from error


class made_in:  # noqa: N801 - used as a function
    """Enter what ``around`` returns; so does each thread of :func:`call_with_deadline` that is started in there."""

    __slots__ = ("_around", "_before", "_entered")

    def __init__(self, around: Callable[[], AbstractContextManager[object]]) -> None:
        self._around = around

    def __enter__(self) -> None:
        self._before = _around.set(self._around)
        self._entered = self._around()
        self._entered.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, trace)
        _around.reset(self._before)


def _call_in(around: Callable[[], AbstractContextManager[object]], function: Callable[[T], None], value: T) -> None:
    with around():
        function(value)


def _blocked(what: str, timeout_s: float) -> CompletionTimeout:
    return CompletionTimeout(
        f"{what} did not return within {timeout_s:g} s",
        code="driver_blocked",
        retryable=False,
        remedy="the driver hangs; check the peer, then restart this process if it does not return",
    )


def call_with_deadline(
    call: Callable[[], T],
    *,
    timeout_s: float,
    what: str,
    undo: Callable[[T], None],
    around: Callable[[], AbstractContextManager[object]] | None = None,
) -> T:
    """Run ``call`` in a thread of its own; give it up after ``timeout_s``.

    A call that returns after it was given up, at the deadline or by an interrupt, is undone by that thread, so that
    nothing stays behind; one that was given up before it began never begins. Call and undo are made in what ``around``
    returns; when it is None, in what the call is made in that this one is a part of.

    Raises
    ------
    CompletionTimeout
        When the time is up. The driver may still hold locks: do not retry on the same device at once.
    ResourceExhausted
        When no thread can be started; ``call`` did not begin.
    """
    done = threading.Event()
    lock = threading.Lock()
    outcome: list[T] = []
    failure: list[BaseException] = []
    abandoned = threading.Event()
    entered = around or _around.get()

    def run() -> None:
        _around.set(entered)
        with entered():
            attempt()
        done.set()

    def attempt() -> None:
        if abandoned.is_set():  # if only later, what was entered is not left before the call is undone
            return
        try:
            result = call()
        except BaseException as error:
            failure.append(error)
        else:
            with lock:
                late = abandoned.is_set()
                if not late:
                    outcome.append(result)
            if late:
                undo(result)

    def give_up() -> bool:
        with lock:
            if not outcome and not failure:
                abandoned.set()
        return abandoned.is_set()

    try:
        try:
            threading.Thread(target=run, name=f"devipc-{what}", daemon=True).start()
        except RuntimeError as error:
            raise no_thread(what, error) from error
        in_time = done.wait(timeout_s)
    except BaseException:
        if not give_up() and outcome:
            undo_for_a_cause(_call_in, entered, undo, outcome[0])
        raise
    if not in_time and give_up():
        raise _blocked(what, timeout_s)
    if failure:
        raise failure[0]
    return outcome[0]
