"""What became of an operation and of each of its pages.

Owns the values that answer an operation. It knows neither who answers nor how the answer travels.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from devipc.errors import DevIPCError
from devipc.hicache.operations import Status

__all__ = ["Answer", "Outcome", "PageResult", "Results", "defect", "fresh"]

Results = npt.NDArray[np.uint8]
"""One :class:`PageResult` a page, uint8 ``(n,)``."""


class PageResult(enum.IntEnum):
    """What became of one page."""

    NOT_DONE = 0
    """Nothing: the operation was refused, or ended before it came to this page."""
    STORED = 1
    """Copied to the host tier, and visible from now on."""
    PRESENT = 2
    """In the host tier already; not copied."""
    RESTORED = 3
    """Copied to the device."""
    HIT = 4
    """Found, and kept while its lease lasts; for a restore: about to be copied."""
    MISSING = 5
    """Not in the host tier. The destination was not touched."""
    NO_ROOM = 6
    """Left out because the host tier holds no more."""
    DROPPED = 7
    """Copied for nothing: invalidated, flushed, discarded or cancelled before it was visible."""
    FAILED = 8
    """A copy failed: what a destination holds is unknown."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine tells a client with an event.

    Parameters
    ----------
    results : numpy.ndarray or None
        One :class:`PageResult` a page, where the operation has pages.
    error : DevIPCError or None
        Why it was refused or failed.
    detail : mapping or None
        What a question was answered with, as JSON-ready values.
    """

    results: Results | None = None
    error: DevIPCError | None = None
    detail: dict[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an operation ended on the client's side.

    Parameters
    ----------
    status : Status
        The one status.
    results : numpy.ndarray
        One :class:`PageResult` a page; empty for operations without pages.
    error : DevIPCError or None
        Why it is not ``completed``, where somebody gave a reason.
    """

    status: Status
    results: Results
    error: DevIPCError | None = None

    def count(self, result: PageResult) -> int:
        """Return how many pages ended as ``result``."""
        return int(np.count_nonzero(self.results == result))


def defect(error: BaseException) -> DevIPCError:
    """Return what is told of an error that nobody expected; one that has a type of ours is told as it is."""
    if isinstance(error, DevIPCError):
        return error
    return DevIPCError(f"{type(error).__name__}: {error}", code="defect", remedy="report it")


def fresh(error: DevIPCError) -> DevIPCError:
    """Return an equal error to raise: one that is raised again and again would collect a traceback each time."""
    again = type(error)(
        error.message,
        code=error.code,
        remedy=error.remedy,
        retryable=error.retryable,
        backend=error.backend,
        device=error.device,
        status=error.status,
    )
    again.left = error.left
    again.__cause__ = error.__cause__
    return again
