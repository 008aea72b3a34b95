"""The C calls of the host backend: mappings side by side, views of addresses, and byte moves.

Owns addresses and nothing about who may use them: every address that arrives here was checked by
:mod:`devipc.host.ranges` before.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devipc.host.meminfo import open_proc
from devipc.spi import PAGE_NBYTES, ResourceExhausted, round_up

__all__ = ["Mapping", "Part", "map_side_by_side", "move", "unmap", "view_at", "writable_until"]

_MAPS = Path("/proc/self/maps")
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PYBUF_WRITE = 0x200
_HELD_NBYTES = 32 << 10
"""Below this a move is over before another thread could use the interpreter, and getting it back could take 5 ms."""

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
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


@dataclass(frozen=True, slots=True)
class Mapping:
    """An address range that is ours, guards included: ``nbytes`` from ``base``. The first shared byte is at ``ptr``."""

    base: int
    nbytes: int
    ptr: int


def map_side_by_side(parts: Sequence[Part]) -> Mapping:
    """Map ``parts`` one behind the other without a gap, all or none.

    Inner borders must lie on pages: the caller checked that. The range is reserved first, so that no other mapping
    of the process can come between. A page that nobody may touch lies on either side, so that an address that is off
    by a little never lies in a neighbour.

    Raises
    ------
    ResourceExhausted
        When address space, memory or mappings ran out.
    """
    lead = parts[0].offset % PAGE_NBYTES
    nbytes = round_up(lead + sum(part.nbytes for part in parts), PAGE_NBYTES) + 2 * PAGE_NBYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    base = _checked_mmap(None, nbytes, _PROT_NONE, flags, -1, 0)
    at = base + PAGE_NBYTES
    try:
        for part in parts:
            below = part.offset % PAGE_NBYTES
            length = round_up(below + part.nbytes, PAGE_NBYTES)
            flags = mmap.MAP_SHARED | _MAP_FIXED
            _checked_mmap(at, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, part.fd, part.offset - below)
            at += length
    except ResourceExhausted:
        _munmap(base, nbytes)
        raise
    return Mapping(base, nbytes, base + PAGE_NBYTES + lead)


def _checked_mmap(at: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    address = _mmap(at, nbytes, protection, flags, fd, offset)
    if address is None or address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise ResourceExhausted(
            f"mmap of {nbytes} bytes failed ({os.strerror(code)})",
            code="mmap",
            remedy="check `ulimit -v`, vm.max_map_count and the container's memory limit",
        )
    return int(address)


def unmap(mapping: Mapping) -> None:
    """Give the range back."""
    _munmap(mapping.base, mapping.nbytes)


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
