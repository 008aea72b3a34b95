"""The layout of the index memory: which words an entry has, and the mark that makes one of them.

Owns the layout and its version, and the refusal of machines whose memory order does not allow it. It stores nothing.

A bucket is four lines of eight 64-bit words: first halves of keys, second halves, values, and *marks*. A mark is the
entry's version and a checksum of everything else with the writer's epoch; 0 means that there is no entry. A writer
takes the mark away, writes the rest, then writes the mark; of many entries at once, all marks are taken away first.
A key may stand in either of two buckets.
"""

from __future__ import annotations

import platform
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from devipc.errors import CapabilityError

__all__ = [
    "BUCKETS_AT",
    "BUCKET_WORDS",
    "EPOCH_AT",
    "HEADER_WORDS",
    "INDEX_VERSION",
    "MAGIC",
    "MAGIC_AT",
    "MARK",
    "SECOND",
    "VALUE",
    "VERSION_AT",
    "WAYS",
    "Draft",
    "check_machine",
    "checksum",
    "checksums",
]

INDEX_VERSION = 2
"""Version of the memory layout, and of what values mean: the bytes of a page. A reader takes no other."""
MAGIC = int.from_bytes(b"dIPCindx", "little")
"""First word of the memory."""
HEADER_WORDS = 512
"""Words before the first bucket: one page, so that buckets are aligned to cache lines."""
MAGIC_AT, VERSION_AT, EPOCH_AT, BUCKETS_AT = range(4)
"""Words of the header."""
WAYS = 8
"""Entries of a bucket."""
BUCKET_WORDS = 4 * WAYS
"""Words of a bucket."""
SECOND, VALUE, MARK = WAYS, 2 * WAYS, 3 * WAYS
"""Words of an entry, from its first half on."""

U64 = npt.NDArray[np.uint64]
_MASK = 2**64 - 1
_MIX = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_U_MIX = tuple(np.uint64(value) for value in _MIX)
_32 = np.uint64(32)


class Draft(NamedTuple):
    """Entries that are written but for the two words that let readers find them.

    ``entries`` is where each key is; ``places``, ``first`` and ``marks`` are what is still to be stored, ``(n,)``.
    """

    entries: dict[bytes, int]
    places: npt.NDArray[np.int64]
    first: U64
    marks: U64


def checksums(first: U64, second: U64, value: U64, version: U64, epoch: np.uint64) -> U64:
    """32 bits over each entry."""
    mixed = (first ^ epoch) * _U_MIX[0]
    mixed = (mixed ^ (mixed >> _32) ^ second) * _U_MIX[1]
    mixed = (mixed ^ (mixed >> _32) ^ value) * _U_MIX[2]
    mixed = (mixed ^ (mixed >> _32) ^ version) * _U_MIX[3]
    return mixed >> _32


def checksum(first: int, second: int, value: int, version: int, epoch: int) -> int:
    """The same for one entry: numbers of Python are quicker than arrays of one."""
    mixed = (first ^ epoch) * _MIX[0] & _MASK
    mixed = (mixed ^ mixed >> 32 ^ second) * _MIX[1] & _MASK
    mixed = (mixed ^ mixed >> 32 ^ value) * _MIX[2] & _MASK
    return ((mixed ^ mixed >> 32 ^ version) * _MIX[3] & _MASK) >> 32


def check_machine() -> None:
    """Raise CapabilityError where neither loads nor stores stay in order."""
    # Aligned 64-bit stores of CPython did not tear on x86-64, whose stores and loads also stay in order; elsewhere
    # neither is known.
    if platform.machine() != "x86_64":
        raise CapabilityError(
            f"the shared index needs x86-64's memory order, this is {platform.machine()}",
            code="memory_order",
            remedy="look pages up by message",
        )
