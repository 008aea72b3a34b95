"""The C calls of the host backend: mappings side by side, views of addresses, and byte moves.

Owns addresses and nothing about who may use them: every address that arrives here was checked by
:mod:`devipc.host.ranges` before.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devipc.host.meminfo import open_proc
from devipc.spi import PAGE_NBYTES, HandleError, ResourceExhausted, round_up, undo

__all__ = ["Part", "Reservation", "map_now", "map_side_by_side", "move", "view_at", "writable_until"]

_MAPS = Path("/proc/self/maps")
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_UNUSED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_PYBUF_WRITE = 0x200
_HELD_NBYTES = 32 << 10
"""Below this a move is over before another thread could use the interpreter, and getting it back could take 5 ms."""

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_POPULATE_WRITE = 23  # linux/mman.h, since 5.14
_MAP_FAILED = 2 ** (8 * ctypes.sizeof(ctypes.c_void_p)) - 1

_move_held = ctypes.PyDLL(None).memmove
_move_held.restype = None
_move_held.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_from_memory: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.restype = ctypes.py_object
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Part:
    """``nbytes`` of the file behind ``fd``, from ``offset``; neither needs to be a multiple of the page size."""

    fd: int
    offset: int
    nbytes: int


class Reservation:
    """An address range that is ours, guards included, and what is mapped into it.

    The range goes back when all that was mapped is unmapped; until then nothing else of the process comes between. A
    page that nobody may touch lies on either side, so that an address that is off by a little never lies in a
    neighbour. Any thread.

    Parameters
    ----------
    nbytes : int
        What will be mapped; a multiple of the page size.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes + 2 * PAGE_NBYTES
        self._base = _checked_mmap(None, self._nbytes, _PROT_NONE, _UNUSED, -1, 0)
        self._lock = threading.Lock()
        self._used = nbytes
        self.start = self._base + PAGE_NBYTES

    def unmap(self, at: int, nbytes: int) -> None:
        """Unmap a part, which becomes a hole; the last one gives the whole range back.

        Raises
        ------
        ResourceExhausted
            When the kernel keeps it, which needs a mapping more while it makes a hole. Never retryable: the part counts
            as unmapped, and what stays goes with the whole range.
        """
        with self._lock:  # until the hole is made: behind that of the last part the range may be somebody else's
            self._used -= nbytes
            if self._used > 0:
                done = _mmap(at, nbytes, _PROT_NONE, _UNUSED | _MAP_FIXED, -1, 0) not in (None, _MAP_FAILED)
                call = "mmap of a hole"
            else:
                done = _munmap(self._base, self._nbytes) == 0
                nbytes, call = self._nbytes, "munmap"
        if not done:
            raise _refused(call, nbytes, retryable=False)


def map_side_by_side(extents: Sequence[Sequence[Part]]) -> tuple[Reservation, list[tuple[int, int, int]]]:
    """Map extents, and the parts of each, one behind the other without a gap, all or none.

    Inner borders of an extent must lie on pages: the caller checked that.

    Returns
    -------
    tuple of Reservation and list of (int, int, int)
        For each extent its first page, the length in whole pages, and the address of its first byte.

    Raises
    ------
    HandleError
        When a file does not allow to be mapped for writing.
    ResourceExhausted
        When address space, memory or mappings ran out.
    """
    leads = [parts[0].offset % PAGE_NBYTES for parts in extents]
    sizes = [
        round_up(lead + sum(part.nbytes for part in parts), PAGE_NBYTES)
        for lead, parts in zip(leads, extents, strict=True)
    ]
    reservation = Reservation(sum(sizes))
    at, places = reservation.start, []
    try:
        for lead, size, parts in zip(leads, sizes, extents, strict=True):
            places.append((at, size, at + lead))
            for part in parts:
                below = part.offset % PAGE_NBYTES
                length = round_up(below + part.nbytes, PAGE_NBYTES)
                flags = mmap.MAP_SHARED | _MAP_FIXED
                _checked_mmap(at, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, part.fd, part.offset - below)
                at += length
    except BaseException:
        undo(reservation.unmap, reservation.start, sum(sizes))
        raise
    return reservation, places


def _checked_mmap(at: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    address = _mmap(at, nbytes, protection, flags, fd, offset)
    if address is None or address == _MAP_FAILED:
        if ctypes.get_errno() in (errno.EPERM, errno.EACCES):
            raise HandleError(
                f"memory file does not allow to be mapped for writing ({os.strerror(ctypes.get_errno())})",
                code="mmap",
                remedy="the exporter must neither seal it against writing nor open it for reading only",
            )
        raise _refused("mmap", nbytes, retryable=True)
    return int(address)


def _refused(call: str, nbytes: int, *, retryable: bool) -> ResourceExhausted:
    return ResourceExhausted(
        f"{call} of {nbytes} bytes failed ({os.strerror(ctypes.get_errno())})",
        code="mmap",
        retryable=retryable,
        remedy="check `ulimit -v`, vm.max_map_count and the container's memory limit",
    )


def map_now(address: int, nbytes: int) -> None:
    """Let the pages of mapped memory be entered now, not one by one when they are used, where the kernel can."""
    _madvise(address, nbytes, _POPULATE_WRITE)  # an older kernel refuses, and what is missing is entered at its use


def view_at(address: int, nbytes: int) -> memoryview:
    """Return a writable view of bytes that stay mapped while it is used."""
    view: memoryview = _from_memory(address, nbytes, _PYBUF_WRITE)
    return view


def move(dst: int, src: int, nbytes: int) -> None:
    """Move bytes; overlapping ranges are fine. Long moves release the GIL."""
    if nbytes < _HELD_NBYTES:
        _move_held(dst, src, nbytes)
    else:
        ctypes.memmove(dst, src, nbytes)


def writable_until(address: int) -> int:
    """Return the end of the readable and writable memory that starts at ``address``, or ``address`` if there is none.

    Reads ``/proc/self/maps``: asking is the only way to refuse memory whose use would end the process.
    """
    end = address
    with open_proc(_MAPS) as maps:
        for line in maps:
            borders, permissions = line.split(maxsplit=2)[:2]
            low, high = (int(border, 16) for border in borders.split("-"))
            if high <= end:
                continue
            if low > end or not permissions.startswith("rw"):
                break
            end = high
    return end
