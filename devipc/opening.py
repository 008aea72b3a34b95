"""Opening what a peer exported: side by side where the backend can place it, one by one elsewhere, under a deadline.

Owns one call into the driver and what is undone when it fails or is given up. It knows one device's memory interface;
it counts no uses and knows no peer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

from devipc.capabilities import Capability
from devipc.deadline import call_with_deadline
from devipc.errors import CapabilityError, DevIPCError, DriverError, ResourceExhausted
from devipc.interfaces.memory import DeviceMemoryIPC, SideBySide
from devipc.types import ExportedExtent, HandleKind, OpenedExtent

__all__ = ["duplicate_fds", "open_extents", "placement"]


def duplicate_fds(fds: Sequence[int]) -> tuple[int, ...]:
    """Duplicate descriptors, all or none.

    Raises
    ------
    ResourceExhausted
        When this process has no descriptor left.
    """
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))
    except OSError as error:
        for fd in copies:
            os.close(fd)
        raise ResourceExhausted(
            f"no file descriptor left while duplicating {len(fds)} ({error.strerror})",
            code="fds",
            remedy="raise `ulimit -n` or close mappings that are no longer used",
        ) from error
    return tuple(copies)


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
) -> tuple[OpenedExtent, ...]:
    """Map all of ``extents`` or none; each is closed on its own later. Their descriptors stay the caller's.

    Runs on a thread of its own, which outlives this call, and then undoes what it did, when the driver does not return
    in time. That thread is in what ``driving`` returns for as long.

    Raises
    ------
    CompletionTimeout
        When the driver did not return.
    DriverError
        When it mapped another length than was shared.
    """
    # The thread may outlive this call and the caller's descriptors, so that it gets its own.
    fds = duplicate_fds([fd for extent in extents for fd in extent.fds])
    owned, at = [], 0
    for extent in extents:
        owned.append(ExportedExtent(extent.kind, extent.chunks, fds[at : at + len(extent.fds)]))
        at += len(extent.fds)
    begun = False

    def open_all() -> tuple[OpenedExtent, ...]:
        nonlocal begun
        begun = True
        try:
            return _open_all(memory, owned)
        finally:
            for fd in fds:
                os.close(fd)

    try:
        opened = call_with_deadline(
            open_all, timeout_s=timeout_s, what="open", undo=lambda all_: _close(memory, all_), around=driving
        )
    except ResourceExhausted:
        if not begun:  # no thread: nobody else closes them
            for fd in fds:
                os.close(fd)
        raise
    if any(one.nbytes != extent.nbytes for one, extent in zip(opened, extents, strict=True)):
        _close(memory, opened)
        raise DriverError("the driver mapped another length than was shared", code="short_mapping")
    return opened


def _open_all(memory: DeviceMemoryIPC, extents: Sequence[ExportedExtent]) -> tuple[OpenedExtent, ...]:
    if len({extent.kind for extent in extents}) == 1 < len(extents) and isinstance(memory, SideBySide):
        with contextlib.suppress(CapabilityError):  # a kind that the driver places itself: one by one
            return memory.open_side_by_side(extents)
    opened: list[OpenedExtent] = []
    try:
        for extent in extents:
            opened.append(memory.open(extent))
    except BaseException:
        with contextlib.suppress(DevIPCError):  # what the open met is the cause
            _close(memory, opened)
        raise
    return tuple(opened)


def _close(memory: DeviceMemoryIPC, opened: Sequence[OpenedExtent]) -> None:
    """Close all; every one is tried, and the first refusal is raised."""
    failures: list[DevIPCError] = []
    for one in opened:
        try:
            memory.close(one)
        except DevIPCError as error:
            failures.append(error)
    if failures:
        raise failures[0]
