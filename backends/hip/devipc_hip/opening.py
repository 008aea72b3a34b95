"""Opens of what a peer exported: under a deadline, in a thread that can be given up.

Owns the deadline, and what becomes of an open that returns too late. Knows no kind of handle.

Sources: an attach of memory that its exporter freed first never returns (ROCm/rocm-systems 9827), nor does the open of
an event on some runtimes (LMCache 4419); the runtime's own socket gives up after 10 s, where it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from devipc.spi import CompletionTimeout, DriverError, call_with_deadline
from devipc_hip.context import Context

__all__ = ["OPEN_TIMEOUT_S", "open_in_time"]

T = TypeVar("T")

OPEN_TIMEOUT_S = 20.0
"""How long a runtime may take to open what a peer exported."""


def open_in_time(context: Context, call: Callable[[], T], undo: Callable[[T], object], what: str) -> T:
    """Run an open in a thread that can be given up; what it opens after that is closed again by that thread.

    Raises
    ------
    DriverError
        When the runtime does not return in time. It may hold locks: other calls of the process may stand still too.
    """

    def inside() -> T:
        with context:
            return call()

    def undone(opened: T) -> None:
        with context:
            undo(opened)

    try:
        return call_with_deadline(inside, timeout_s=OPEN_TIMEOUT_S, what=what, undo=undone)
    except CompletionTimeout as error:
        raise DriverError(
            error.message,
            code="driver_blocked",
            remedy="the exporter freed the memory before it was opened, or the runtime hangs; restart this process if"
            " its other calls do not return either",
            backend="hip",
            device=context.uuid,
        ) from error
