"""Opening what a peer exported: side by side where the backend can place it, one by one elsewhere, under a deadline.

Owns one call into the driver and what is undone when it fails or is given up. It knows one device's memory interface;
it counts no uses and knows no peer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from devipc.capabilities import Capability
from devipc.deadline import call_with_deadline
from devipc.descriptors import close_fds
from devipc.errors import CapabilityError, DriverError, ResourceExhausted
from devipc.interfaces.memory import DeviceMemoryIPC, SideBySide
from devipc.types import ExportedExtent, HandleKind, OpenedExtent
from devipc.undoing import gather_left, try_each, undo, what_is_left

__all__ = ["close_extents", "open_extents", "placement"]


def _duplicate_fds(fds: Sequence[int], copies: list[int]) -> None:
    """Add a duplicate of each descriptor to ``copies``, also of those before one that fails.

    Raises
    ------
    ResourceExhausted
        When this process has no descriptor left.
    """
    try:
        copies.extend(map(os.dup, fds))  # by map: no interrupt comes between a duplicate and the list
    except OSError as error:
        raise ResourceExhausted(
            f"no file descriptor left while duplicating {len(fds)} ({error.strerror})",
            code="fds",
            remedy="raise `ulimit -n` or close mappings that are no longer used",
        ) from error


def placement(memory: DeviceMemoryIPC, kind: HandleKind) -> Capability:
    """Return whether several extents of ``kind`` are mapped side by side here, and if not, why; no driver call."""
    if isinstance(memory, SideBySide):
        return memory.side_by_side(kind)
    return Capability.no(
        "this backend maps every extent where its driver chooses", remedy="share one allocation instead of several"
    )


def open_extents(
    memory: DeviceMemoryIPC,
    extents: Sequence[ExportedExtent],
    *,
    timeout_s: float,
    driving: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    on_refused: Callable[[Exception], None] = lambda _error: None,
) -> tuple[OpenedExtent, ...]:
    """Map all of ``extents`` or none; each is closed on its own later. Their descriptors stay the caller's.

    Runs on a thread of its own, which outlives this call, and then undoes what it did, when the driver does not return
    in time. That thread is in what ``driving`` returns for as long. ``on_refused`` as for :func:`close_extents`.

    Raises
    ------
    CompletionTimeout
        When the driver did not return.
    DriverError
        When it mapped another length than was shared.
    """
    # The thread may outlive this call and the caller's descriptors, so that it gets its own: whoever takes them out of
    # here closes them.
    duplicates: list[list[int]] = [[]]

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with driving():
            try:
                yield
            except Exception as error:  # of an undo, also of one that a backend has for a part of its own
                _tell(on_refused, error)
                raise

    def open_all() -> tuple[OpenedExtent, ...]:
        fds = duplicates.pop()
        try:
            return _open_all(memory, _with_fds(extents, fds))
        except Exception as error:
            for one in gather_left(error):  # of what was opened, and could not be closed again, by the backend or here
                on_refused(one)
            raise
        finally:
            close_fds(fds)

    try:
        _duplicate_fds([fd for extent in extents for fd in extent.fds], duplicates[0])
        return call_with_deadline(
            open_all, timeout_s=timeout_s, what="open", undo=lambda all_: close_extents(memory, all_), around=around
        )
    except BaseException:
        with contextlib.suppress(IndexError):  # the thread has them
            close_fds(duplicates.pop())
        raise


def _with_fds(extents: Sequence[ExportedExtent], fds: Sequence[int]) -> list[ExportedExtent]:
    """Return ``extents`` with these descriptors, in order, instead of their own."""
    owned, at = [], 0
    for extent in extents:
        owned.append(ExportedExtent(extent.kind, extent.chunks, tuple(fds[at : at + len(extent.fds)])))
        at += len(extent.fds)
    return owned


def _open_all(memory: DeviceMemoryIPC, extents: Sequence[ExportedExtent]) -> tuple[OpenedExtent, ...]:
    opened: list[OpenedExtent] = []
    try:
        opened += _open_beside(memory, extents)
        for extent in extents[len(opened) :]:
            opened.append(memory.open(extent))
        if any(one.nbytes != extent.nbytes for one, extent in zip(opened, extents, strict=True)):
            raise DriverError(
                "the driver mapped another length than was shared",
                code="short_mapping",
                remedy="run the same driver and backend version in both processes, and report it if they are",
            )
    except BaseException:
        undo(close_extents, memory, opened)
        raise
    return tuple(opened)


def _open_beside(memory: DeviceMemoryIPC, extents: Sequence[ExportedExtent]) -> tuple[OpenedExtent, ...]:
    """Open all side by side, or nothing, where the backend cannot place them."""
    if len({extent.kind for extent in extents}) == 1 < len(extents) and isinstance(memory, SideBySide):
        try:
            return memory.open_side_by_side(extents)
        except CapabilityError as error:  # a kind that the driver places itself: one by one
            if what_is_left(error):
                raise
    return ()


def close_extents(
    memory: DeviceMemoryIPC,
    opened: Sequence[OpenedExtent],
    *,
    on_refused: Callable[[Exception], None] = lambda _error: None,
) -> None:
    """Close all, whatever is refused: ``on_refused`` hears of each that stays mapped, and the first is raised.

    An interrupt is raised when all were tried.
    """

    def close_one(one: OpenedExtent) -> None:
        try:
            memory.close(one)
        except Exception as error:
            _tell(on_refused, error)
            raise

    try_each([partial(close_one, one) for one in opened])


def _tell(on_refused: Callable[[Exception], None], error: Exception) -> None:
    """Tell of ``error``, and of what is noted at it, whatever of the same it is that could not be undone."""
    for one in (error, *what_is_left(error)):
        on_refused(one)
