"""Undoing what a failed call did before it failed: every step is tried, and what is not undone is said.

Owns how that is said: noted at the error that is on its way, where whoever made the call finds it. Knows no driver.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from devipc.errors import DevIPCError

__all__ = ["gather_left", "note_left", "raise_first", "try_each", "undo", "what_is_left"]

_LEFT = "_devipc_left"


def undo(function: Callable[..., object], *args: object) -> None:
    """Call ``function(*args)`` in an ``except`` block, to undo a part of what failed.

    The error on its way is the cause, and is not hidden. When this fails too, something stays mapped or held until the
    process ends: that is noted at the cause, and trying again would leave more.
    """
    cause = sys.exception()
    try:
        function(*args)
    except Exception as failed:
        if cause is None:
            raise
        note_left(cause, failed)


def note_left(cause: BaseException, failed: Exception) -> None:
    """Note at ``cause`` that ``failed`` kept something of it from being undone."""
    _set(cause, _once((*_own(cause), failed, *_own(failed))))
    if not isinstance(cause, DevIPCError):
        cause.add_note(f"not undone: {failed}")


def gather_left(error: BaseException) -> tuple[Exception, ...]:
    """Note at ``error`` itself what those that it was made from could not undo, and return it.

    For an error that goes where those do not: to a peer, or as a copy.
    """
    left = what_is_left(error)
    if left:
        _set(error, left)
    return left


def _set(cause: BaseException, left: tuple[Exception, ...]) -> None:
    if isinstance(cause, DevIPCError):
        cause.left, cause.retryable = left, False
    else:
        setattr(cause, _LEFT, left)


def try_each(steps: Iterable[Callable[[], object]]) -> None:
    """Take every step, whatever fails of them; raise the first failure, at which the others are noted.

    An interrupt skips no step but its own either: it is raised when all were tried, with the failures noted at it.
    """
    failures: list[Exception] = []
    interrupt: BaseException | None = None
    for step in steps:
        try:
            step()
        except Exception as error:
            failures.append(error)
        except BaseException as error:
            interrupt = error if interrupt is None else interrupt
    if interrupt is not None:
        for failed in failures:
            note_left(interrupt, failed)
        raise interrupt
    raise_first(failures)


def raise_first(failures: Sequence[Exception]) -> None:
    """Raise the first of these, if there is any; the others are noted at it."""
    for other in failures[1:]:
        note_left(failures[0], other)
    if failures:
        raise failures[0]


def what_is_left(error: BaseException) -> tuple[Exception, ...]:
    """Return what kept ``error``, or one that it was made from, from being undone: each names what stays, once."""
    found: list[Exception] = []
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        found += _own(at)
        at = at.__cause__ or at.__context__
    return _once(found)


def _own(error: BaseException) -> tuple[Exception, ...]:
    return error.left if isinstance(error, DevIPCError) else getattr(error, _LEFT, ())


def _once(errors: Iterable[Exception]) -> tuple[Exception, ...]:
    return tuple({id(error): error for error in errors}.values())
