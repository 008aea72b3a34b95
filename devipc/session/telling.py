"""What a peer must hear, and may not take now: it is told again, by a thread that can be spared.

Owns the repetition. It knows neither messages nor a connection; whoever tells says whether it was heard.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from devipc.deadline import start_thread

__all__ = ["tell_surely"]

_AGAIN_S = 0.1


def tell_surely(tell: Callable[[], bool]) -> None:
    """Call ``tell``; when it returns False or is interrupted, again on another thread until it returns True.

    What an interrupt broke off may have been heard, so that the peer must bear to hear it twice. Raises the interrupt.
    Blocks as ``tell`` does, once.

    Raises
    ------
    ResourceExhausted
        When it was not heard, and there is no thread to repeat it.
    """
    heard = False
    try:
        heard = tell()
    finally:
        if not heard:
            again = threading.Thread(target=_repeat, args=(tell,), name="devipc-tell-again", daemon=True)
            start_thread(again, "tell a peer what it did not take")


def _repeat(tell: Callable[[], bool]) -> None:
    while not tell():
        time.sleep(_AGAIN_S)
