"""Descriptors that a driver is given for one import: whatever it does with them, each is closed once, by its owner.

Owns the duplicate, its number, and the check that tells a full descriptor table from a driver's own troubles. Knows no
driver call and no kind of handle.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import threading
from collections.abc import Container, Iterable

from devipc.errors import DevIPCError, HandleError, ResourceExhausted
from devipc.undoing import note_left, what_is_left

__all__ = ["Descriptor", "close_fds", "explain_missing_fd", "file_of"]

_HIGH = 4096
_lock = threading.Lock()
_numbers: set[int] = set()
"""Numbers of all that are not closed, whether a driver closed them or not."""


class Descriptor:
    """A duplicate of a borrowed descriptor, for one import.

    Drivers close what they are given, keep a duplicate, or read it when the memory is mapped: so it is closed behind
    the mapping, and only if it is still the same file. A number that a driver closed is free for anybody in this
    process, for the same file too: so no two of these have one number, and all are above those that the kernel gives to
    others. May be used from any thread.

    Parameters
    ----------
    fd : int
        Stays the caller's; may be closed once this is made.
    backend : str
        Named in errors.
    avoid : container of int
        Numbers that the duplicate must not get.

    Raises
    ------
    ResourceExhausted
        When no descriptor is left.
    HandleError
        When ``fd`` is no open descriptor.
    """

    def __init__(self, fd: int, *, backend: str, avoid: Container[int] = ()) -> None:
        try:
            self.number = _duplicate(fd, avoid)
        except (OSError, ValueError, OverflowError) as failed:
            error = HandleError(
                f"the descriptor cannot be used: {getattr(failed, 'strerror', failed)}",
                code="no_descriptor",
                remedy="keep the descriptors of an extent open until it is opened; receive it again",
                backend=backend,
            )
            raise explain_missing_fd(error, backend=backend) from failed
        self._file = file_of(self.number)
        self._closed = False

    def close(self, *, after: DevIPCError | None = None) -> None:
        """Close it once, unless the driver did, or may still read it ``after`` its call was given up."""
        if self._closed:
            return
        self._closed = True
        if after is not None and after.code == "driver_blocked":
            return  # the number is never used again: the call may still close it
        with _lock:
            if file_of(self.number) == self._file:
                os.close(self.number)
            _numbers.discard(self.number)


def file_of(fd: int) -> tuple[int, int] | None:
    """Return what tells open files apart, None for a number that is not open."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _duplicate(fd: int, avoid: Container[int]) -> int:
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
                if number not in _numbers and number not in avoid:
                    _numbers.add(number)
                    return number
                taken.append(number)
        finally:
            for number in taken:
                os.close(number)


def close_fds(fds: Iterable[int]) -> None:
    """Close descriptors that an :class:`ExportedExtent` owns; one that is closed already is passed over."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            continue


def explain_missing_fd(error: DevIPCError, *, backend: str) -> DevIPCError:
    """Return ``error``, or the :class:`ResourceExhausted` behind it when no descriptor is left.

    Drivers report a full descriptor table as anything but that.
    """
    try:
        os.close(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as failed:
        if failed.errno in (errno.EMFILE, errno.ENFILE):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            explained = ResourceExhausted(
                f"no file descriptor left: limit {soft}, at most {hard}; every physical block costs one",
                code="fds",
                remedy="raise `ulimit -n`, or release exports and mappings that are no longer used",
                backend=backend,
                status=error.status,
            )
            for one in what_is_left(error):
                note_left(explained, one)
            return explained
    return error
