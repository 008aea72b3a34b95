"""Deadlines: the time that is left, and calls that can be given up.

Owns how long a wait may be and what becomes of a call whose caller no longer waits. It knows nothing of what is called.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from devipc.errors import CompletionTimeout, ResourceExhausted

__all__ = ["bounded", "call_with_deadline", "deadline_after", "no_thread", "remaining"]

T = TypeVar("T")
_LONGEST_S = 86400.0 * 365


def deadline_after(timeout_s: float) -> float:
    """Return the monotonic time ``timeout_s`` seconds from now."""
    return time.monotonic() + timeout_s


def remaining(deadline: float) -> float:
    """Return the seconds left until ``deadline``: never below zero, at most what every wait can take."""
    return bounded(deadline - time.monotonic())


def bounded(timeout_s: float) -> float:
    """Return ``timeout_s`` as a wait can take it: infinity is a very long time, and no number is none."""
    return min(max(0.0, timeout_s), _LONGEST_S)


def no_thread(what: str, error: RuntimeError) -> ResourceExhausted:
    """Return the error for work that no thread could be started for."""
    return ResourceExhausted(
        f"no thread to be had to {what} ({error})",
        code="threads",
        remedy="raise `ulimit -u` or the container's pids limit, or free memory",
    )


def call_with_deadline(
    call: Callable[[], T],
    *,
    timeout_s: float,
    what: str,
    undo: Callable[[T], None],
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> T:
    """Run ``call`` in a thread of its own; give it up after ``timeout_s``.

    A call that returns after it was given up, at the deadline or by an interrupt, is undone by that thread, so that
    nothing stays behind. Call and undo are made in what ``around`` returns.

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
    abandoned = False

    def run() -> None:
        with around():
            attempt()
        done.set()

    def attempt() -> None:
        try:
            result = call()
        except BaseException as error:
            failure.append(error)
        else:
            with lock:
                late = abandoned
                if not late:
                    outcome.append(result)
            if late:
                undo(result)

    def give_up() -> bool:
        nonlocal abandoned
        with lock:
            abandoned = not outcome and not failure
        return abandoned

    try:
        threading.Thread(target=run, name=f"devipc-{what}", daemon=True).start()
    except RuntimeError as error:
        raise no_thread(what, error) from error
    try:
        in_time = done.wait(timeout_s)
    except BaseException:
        if not give_up() and outcome:
            undo(outcome[0])
        raise
    if not in_time and give_up():
        raise CompletionTimeout(
            f"{what} did not return within {timeout_s:g} s",
            code="driver_blocked",
            retryable=False,
            remedy="the driver hangs; check the peer, then restart this process if it does not return",
        )
    if failure:
        raise failure[0]
    return outcome[0]
