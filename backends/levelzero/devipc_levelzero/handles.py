"""Handles that hold a descriptor's number, and the descriptors behind them.

Owns how a handle is made fit for another process: its number is replaced by that of a descriptor which the reader has.
Knows no driver call and no kind of object.

Sources: the first eight bytes of a handle are the number of a descriptor that the driver keeps, in the older form and
in the opaque one (compute-runtime 26.3, IpcMemoryData and IpcOpaqueMemoryData). The opaque form holds the number twice;
as long as both are equal the driver goes to the exporting process for it, which may be gone, or may not be ours to look
into. So the number that is put in must differ from the exporter's.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devipc.spi import CapabilityError, HandleError, ResourceExhausted
from devipc_levelzero.abi import HANDLE_NBYTES, IpcHandle

__all__ = [
    "check_place",
    "duplicate",
    "fd_of_process",
    "fd_status",
    "number_in",
    "patched",
    "process_start",
    "to_handle",
]

_NUMBER = struct.Struct("<Q")
_PIDFD_GETFD = 438  # the same on every architecture of Linux
_LOWEST_HIGH = 64
_NUMBERS_AT = (0, 8, 22)  # the number, its copy in handles of pools, its copy in handles of memory
_OFFSET_AT = 8
_patching = threading.Lock()


def to_handle(raw: bytes) -> IpcHandle:
    """Return the structure that travels by value."""
    return IpcHandle.from_buffer_copy(raw)


def number_in(raw: bytes) -> int:
    """Return the descriptor's number in the exporting process."""
    (number,) = _NUMBER.unpack_from(raw)
    return int(number)


def duplicate(fd: int, *, lowest: int = 3) -> int:
    """Return a descriptor of our own for ``fd``: the driver's own belong to its cache and are never closed by others.

    Raises
    ------
    ResourceExhausted
        When no descriptor is left.
    HandleError
        When ``fd`` is none.
    """
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    except (OSError, OverflowError) as error:
        code = getattr(error, "errno", errno.EBADF)
        if code in (errno.EMFILE, errno.EINVAL):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise ResourceExhausted(
                f"no file descriptor left: limit {soft}, at most {hard}",
                code="fds",
                remedy="raise `ulimit -n`, or release exports and mappings that are no longer used",
                backend="levelzero",
            ) from error
        raise HandleError(
            f"the handle names no open descriptor ({error})",
            code="no_descriptor",
            remedy="export again; the memory may have been freed",
            backend="levelzero",
        ) from error


def fd_status(fd: int) -> tuple[int, int] | None:
    """Return what tells one open file from all others, or None for a descriptor that is not open."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def patched(raw: bytes, fd: int) -> Iterator[IpcHandle]:
    """Yield the handle as this process may open it, with a duplicate of ``fd`` that is gone afterwards.

    It gets a number that is not the exporter's, and a high one: some drivers close what they were given, others do not,
    so it is closed here only if it is still the same file, and nobody else is handed such a number in the meantime.
    """
    # Where a handle holds numbers again: equal ones would send the driver to the process that the handle names.
    taken = {_NUMBER.unpack_from(raw, at)[0] for at in _NUMBERS_AT}
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    lowest = max(_LOWEST_HIGH, min(soft, 1 << 16) // 2)
    before = fd_status(fd)
    with _patching:
        number = duplicate(fd, lowest=lowest)
        while number in taken:
            try:
                other = duplicate(fd, lowest=number + 1)
            finally:
                os.close(number)
            number = other
    try:
        yield to_handle(_NUMBER.pack(number) + raw[_NUMBER.size : HANDLE_NBYTES])
    finally:
        with _patching:
            if before is not None and fd_status(number) == before:
                os.close(number)


def check_place(raw: bytes, fd: int) -> None:
    """Check that the place in the driver's pool, which a handle of memory holds, lies in the file of ``fd``.

    Raises
    ------
    HandleError
        When it does not: a driver may take it as it is.
    """
    (offset,) = _NUMBER.unpack_from(raw, _OFFSET_AT)
    try:
        size = os.lseek(fd, 0, os.SEEK_END)
    except OSError:  # a kernel whose buffers do not tell their size
        return
    if offset >= size:
        raise HandleError(
            f"the handle names a place {offset} bytes into a buffer of {size}",
            code="malformed",
            remedy="export again; the handle was changed on the way",
            backend="levelzero",
        )


# --- descriptors of events, for which the contract has no way to send them --------------------------------------------


def process_start(pid: int | str = "self") -> int:
    """Return when a process began, in clock ticks since boot: with its number it names one process for ever."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return int(text.rpartition(")")[2].split()[19])


def fd_of_process(pid: int, start: int, number: int, expected: tuple[int, int]) -> int:
    """Return a duplicate of descriptor ``number`` of the process ``pid`` that began at ``start``.

    Raises
    ------
    HandleError
        When that process is gone or the descriptor is not the ``expected`` file any more.
    CapabilityError
        When this process may not look into that one (ptrace rights).
    """
    if pid == os.getpid():
        return _checked(duplicate(number), expected)
    try:
        process = os.pidfd_open(pid)
    except OSError as error:
        raise _gone(f"process {pid} is gone ({error})") from error
    try:
        if process_start(pid) != start:
            raise _gone(f"process {pid} is another one by now")
        libc = ctypes.CDLL(None, use_errno=True)
        fd = int(libc.syscall(_PIDFD_GETFD, process, number, 0))
        code = ctypes.get_errno()
    except (OSError, ValueError, IndexError) as error:
        raise _gone(f"process {pid} is gone ({error})") from error
    finally:
        os.close(process)
    if fd < 0:
        if code in (errno.EPERM, errno.EACCES):
            raise CapabilityError(
                f"process {pid} may not be asked for its descriptor: pidfd_getfd needs the right to trace it",
                code="ptrace",
                remedy="allow it (kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE), or use polling",
                backend="levelzero",
            )
        raise _gone(f"process {pid} does not give its descriptor {number} ({os.strerror(code)})")
    return _checked(fd, expected)


def _checked(fd: int, expected: tuple[int, int]) -> int:
    if fd_status(fd) == expected:
        return fd
    os.close(fd)
    raise _gone("the descriptor of the events is used for something else by now")


def _gone(text: str) -> HandleError:
    return HandleError(
        f"the exporter's events are gone: {text}",
        code="events_gone",
        remedy="get a new fence from a living producer",
        backend="levelzero",
    )
