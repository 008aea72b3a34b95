"""Structures that are passed to the runtime, as bytes laid out here.

Owns the layouts of ROCm 6 and newer. As bytes, since one of the binding's structures has no field for the handle types,
and making a binding object costs more. Makes no call.
"""

from __future__ import annotations

import ctypes
import struct

__all__ = ["access_desc", "allocation_prop", "external_fd", "external_part", "location", "pool_props"]

Bytes = ctypes.Array[ctypes.c_char]
"""What the bindings take where a structure is expected."""

_PINNED, _FD, _DEVICE, _READ_WRITE, _OPAQUE_FD = 1, 1, 1, 3, 1
_ALLOCATION = struct.Struct("=iiiiQQ")  # type, handle types, location, then what is not used here
_POOL = struct.Struct("=iiiiQQ56x")  # the same, largest size
_ACCESS = struct.Struct("=iii")
_LOCATION = struct.Struct("=ii")
_EXTERNAL = struct.Struct("=i4xi12xQI64x4x")  # type, descriptor in a union of 16 bytes, size, flags
_PART = struct.Struct("=QQI64x4x")  # offset, size, flags


def allocation_prop(ordinal: int) -> Bytes:
    """Return properties of physical memory on device ``ordinal`` that can be exported as a file descriptor."""
    return ctypes.create_string_buffer(_ALLOCATION.pack(_PINNED, _FD, _DEVICE, ordinal, 0, 0), _ALLOCATION.size)


def pool_props(ordinal: int) -> Bytes:
    """Return properties of a pool on device ``ordinal`` that can be exported as a file descriptor."""
    return ctypes.create_string_buffer(_POOL.pack(_PINNED, _FD, _DEVICE, ordinal, 0, 0), _POOL.size)


def location(ordinal: int) -> Bytes:
    """Return the place that is device ``ordinal``."""
    return ctypes.create_string_buffer(_LOCATION.pack(_DEVICE, ordinal), _LOCATION.size)


def access_desc(ordinal: int) -> Bytes:
    """Return the permission to read and write for device ``ordinal``."""
    return ctypes.create_string_buffer(_ACCESS.pack(_DEVICE, ordinal, _READ_WRITE), _ACCESS.size)


def external_fd(fd: int, nbytes: int) -> Bytes:
    """Return the description of memory behind a descriptor."""
    return ctypes.create_string_buffer(_EXTERNAL.pack(_OPAQUE_FD, fd, nbytes, 0), _EXTERNAL.size)


def external_part(nbytes: int) -> Bytes:
    """Return the description of the first ``nbytes`` of external memory."""
    return ctypes.create_string_buffer(_PART.pack(0, nbytes, 0), _PART.size)
