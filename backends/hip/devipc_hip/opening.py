"""Opens of what a peer exported: under a deadline, in a thread that can be given up.

Owns the deadline, what becomes of an open that returns too late, and the descriptor that such a call may still read.
Knows no kind of handle.

Sources: an attach of memory that its exporter freed first never returns (ROCm/rocm-systems 9827), nor does the open of
an event on some runtimes (LMCache 4419); the runtime's own socket gives up after 10 s, where it does.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import threading
from collections.abc import Callable
from typing import TypeVar

from devipc.spi import CompletionTimeout, DevIPCError, DriverError, call_with_deadline, explain_missing_fd
from devipc_hip.context import Context

__all__ = ["OPEN_TIMEOUT_S", "Descriptor", "open_in_time"]

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


class Descriptor:
    """A duplicate of a borrowed descriptor, for one import.

    A call that was given up may read its number for ever, so that it stays open then. Runtimes close what they are
    given, keep a duplicate, or read it when the memory is mapped (ROCm/rocm-systems 8304): so it is closed behind the
    mapping, and only if it is still the same file. A number that a runtime closed is free for anybody in this process,
    for the same file too: so no two of these have one number, and all are above those that the kernel gives to others.

    Raises
    ------
    ResourceExhausted
        When no descriptor is left.
    """

    def __init__(self, fd: int) -> None:
        try:
            self.number = _duplicate(fd)
        except OSError as failed:
            error = DriverError(
                f"the descriptor cannot be used: {failed.strerror}",
                code="descriptor",
                remedy="keep the descriptors of an extent open until it is opened; receive it again",
                backend="hip",
            )
            raise explain_missing_fd(error, backend="hip") from failed
        self._file = _file(self.number)
        self._closed = False

    def close(self, *, after: DevIPCError | None = None) -> None:
        """Close it once, unless the runtime did, or may still read it ``after`` it was given up."""
        if self._closed:
            return
        self._closed = True
        if after is not None and after.code == "driver_blocked":
            return  # the number is never used again: the call may still close it
        with _lock:
            if _file(self.number) == self._file:
                os.close(self.number)
            _numbers.discard(self.number)


_lock = threading.Lock()
_numbers: set[int] = set()
"""Numbers of all that are not closed, whether a runtime closed them or not."""
_HIGH = 512


def _duplicate(fd: int) -> int:
    """Return a duplicate at a number that no other :class:`Descriptor` has."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    start = _HIGH if soft == resource.RLIM_INFINITY else min(_HIGH, soft // 2)
    with _lock:
        taken: list[int] = []
        try:
            while True:
                try:
                    number = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, start)
                except OSError as error:
                    if error.errno != errno.EMFILE or not start:
                        raise
                    start = 0  # the upper numbers are all in use
                    continue
                if number not in _numbers:
                    _numbers.add(number)
                    return number
                taken.append(number)
        finally:
            for number in taken:
                os.close(number)


def _file(fd: int) -> tuple[int, int]:
    """Return what tells open files apart, zeros for a number that is not open."""
    try:
        found = os.fstat(fd)
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino
