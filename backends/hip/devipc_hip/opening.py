"""Opens of what a peer exported: under a deadline, in a thread that can be given up.

Owns the deadline, what becomes of an open that returns too late, and what is said of a handle that the runtime keeps.
Knows no kind of handle.

Sources: an attach of memory that its exporter freed first never returns (ROCm/rocm-systems 9827), nor does the open of
an event on some runtimes (LMCache 4419); the runtime's own socket gives up after 10 s, where it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from devipc.spi import CompletionTimeout, DevIPCError, DriverError, call_with_deadline, note_left
from devipc_hip import driver
from devipc_hip.context import Context

__all__ = ["OPEN_TIMEOUT_S", "let_go", "not_let_go", "open_in_time"]

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


def let_go(name: str, handle: int) -> None:
    """Give back by the call ``name`` what served its purpose.

    Raises
    ------
    DriverError
        When the runtime keeps it, which is noted there as what is left.
    """
    try:
        driver.call(name, handle)
    except DevIPCError as error:
        raise not_let_go(error) from error


def not_let_go(error: DevIPCError) -> DriverError:
    """Return what to raise when ``error`` keeps something that this package is done with."""
    refused = DriverError(
        "the runtime does not let go of a handle or of memory that is not used any more",
        code="not_let_go",
        remedy="restart this process: it keeps the memory from its owner",
        status=error.status,
    )
    note_left(refused, error)
    return refused
