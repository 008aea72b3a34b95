"""Awaiting a condition from a coroutine, without a thread for each who waits.

Owns the way back to the event loop. It knows no fence: what is asked is a function.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial

from devipc.completion.ticker import Ticker

__all__ = ["until"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 1e-3


async def until(condition: Callable[[], bool], ticker: Ticker, *, timeout_s: float) -> bool:
    """Await that ``condition()`` is true, at most ``timeout_s``; return whether it became true.

    It is asked on the ticker's thread, at growing intervals up to a millisecond, and must not block. What it raises
    reaches the caller. A cancelled await asks no more.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[bool] = loop.create_future()
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S

    def settle(failure: Exception | None, *, result: bool) -> None:
        if answer.done():
            return
        if failure is None:
            answer.set_result(result)
        else:
            answer.set_exception(failure)

    def ask() -> float | None:
        nonlocal pause_s
        result, failure = False, None
        try:
            result = condition()
        except Exception as error:
            failure = error
        if not result and failure is None and time.monotonic() < deadline:
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            return pause_s
        with contextlib.suppress(RuntimeError):  # the loop was closed, and nobody waits any more
            loop.call_soon_threadsafe(partial(settle, failure, result=result))
        return None

    try:
        ticker.wake(ask)
        return await answer
    finally:
        ticker.remove(ask)
