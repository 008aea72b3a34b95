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
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devipc.spi import CapabilityError, Descriptor, HandleError, explain_missing_fd, file_of
from devipc_levelzero.abi import HANDLE_NBYTES, IpcHandle

__all__ = [
    "check_place",
    "duplicate",
    "fd_of_process",
    "number_in",
    "patched",
    "process_start",
    "to_handle",
]

_NUMBER = struct.Struct("<Q")
_PIDFD_GETFD = 438  # the same on every architecture of Linux
_NUMBERS_AT = (0, 8, 22)  # the number, its copy in handles of pools, its copy in handles of memory
_OFFSET_AT = 8


def to_handle(raw: bytes) -> IpcHandle:
    """Return the structure that travels by value."""
    return IpcHandle.from_buffer_copy(raw)


def number_in(raw: bytes) -> int:
    """Return the descriptor's number in the exporting process."""
    (number,) = _NUMBER.unpack_from(raw)
    return int(number)


def duplicate(fd: int) -> int:
    """Return a descriptor of our own for ``fd``: the driver's own belong to its cache and are never closed by others.

    Raises
    ------
    ResourceExhausted
        When no descriptor is left.
    HandleError
        When ``fd`` is none.
    """
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    except (OSError, ValueError, OverflowError) as failed:
        error = HandleError(
            f"the handle names no open descriptor ({failed})",
            code="no_descriptor",
            remedy="export again; the memory may have been freed",
            backend="levelzero",
        )
        raise explain_missing_fd(error, backend="levelzero") from failed


@contextmanager
def patched(raw: bytes, fd: int) -> Iterator[IpcHandle]:
    """Yield the handle as this process may open it, with a duplicate of ``fd`` that is gone afterwards.

    Its number is none that the handle holds: equal ones would send the driver to the process that the handle names.
    """
    own = Descriptor(fd, backend="levelzero", avoid={_NUMBER.unpack_from(raw, at)[0] for at in _NUMBERS_AT})
    try:
        yield to_handle(_NUMBER.pack(own.number) + raw[_NUMBER.size : HANDLE_NBYTES])
    finally:
        own.close()


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
    if file_of(fd) == expected:
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
