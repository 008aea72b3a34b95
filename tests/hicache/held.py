"""What a process holds, in several senses, and whether that stays flat over a long run.

Resident memory alone says little: it has steps of a megabyte where an allocator takes another arena, and hides what
leaks into memory that was free before. So what is allocated is counted, too. Knows no cache and no driver.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from array import array
from dataclasses import asdict, astuple, dataclass, fields
from functools import cache
from typing import Any

from tests.hicache.resident import resident_nbytes


class _Mallinfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``, malloc.h; since 2.33."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")),
        *((name, ctypes.c_size_t) for name in ("fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


@cache
def _mallinfo2() -> Any:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo2
    return function


def _given_out_nbytes() -> int:
    info = _mallinfo2()
    if info is None:
        return 0
    found = info()
    return int(found.uordblks + found.hblkhd)


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds.

    Parameters
    ----------
    resident_nbytes : int
        In memory now, of whatever kind.
    blocks : int
        Of Python: nearly every object has one, and larger ones another elsewhere.
    malloc_nbytes : int
        What malloc has given out and not got back: large objects, arrays, whatever C allocates. 0 where the C library
        does not say.
    descriptors, threads : int
        How many.
    """

    resident_nbytes: int
    blocks: int
    malloc_nbytes: int
    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> Held:
        """Look at this process, when its garbage is gone."""
        gc.collect()
        return cls(
            resident_nbytes=resident_nbytes(),
            blocks=sys.getallocatedblocks(),
            malloc_nbytes=_given_out_nbytes(),
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
        )

    def __sub__(self, other: Held) -> Held:
        return Held(*(mine - others for mine, others in zip(astuple(self), astuple(other), strict=True)))

    def within(self, bounds: Held) -> bool:
        """Return True when nothing is more than ``bounds`` say."""
        return all(mine <= bound for mine, bound in zip(astuple(self), astuple(bounds), strict=True))

    @classmethod
    def most(cls, several: list[Held]) -> Held:
        """Return the most of each sense."""
        return cls(*map(max, zip(*map(astuple, several), strict=True)))

    @classmethod
    def least(cls, several: list[Held]) -> Held:
        """Return the least of each sense: what leaks is in all of them, what is on its way out in some."""
        return cls(*map(min, zip(*map(astuple, several), strict=True)))


WARM_UP = 50_000
"""Operations that count for nothing: until then caches fill, of the interpreter, Hypothesis and the allocators. Of a
run that has few in a process, a third."""

BOUNDS = Held(resident_nbytes=2 * 2**20, blocks=1500, malloc_nbytes=640 * 2**10, descriptors=0, threads=0)
"""How much more the last quarter of a run may hold at least than the first one behind the warm-up, for it to be flat.

A client that stays is thousands of blocks, and one comes every hundred operations; an object that stays of each
operation is a block of each. Whatever leaks passes these bounds by far. They have room for

- one table of Hypothesis that fills the slower the longer: probabilities that it has drawn, some 255, five blocks each;
  up to 600 of all blocks behind the warm-up;
- the interpreter's table of interned strings, which strings that come and go (parts of paths, by ``pathlib``) make
  double once, from 415,088 to 961,216 bytes;
- two arenas of the interpreter, of a megabyte each.
"""
ENOUGH_LOOKS = 12
LOOKS_TOLD = 10


class Watch:
    """What one process held in the course of a run; takes no block of Python for a look."""

    def __init__(self, *, warm_up: int = WARM_UP, bounds: Held = BOUNDS) -> None:
        self._warm_up = warm_up
        self._bounds = bounds
        self._numbers = array("q")

    def look(self, operations: int, held: Held) -> None:
        """Note what was held after so many operations."""
        self._numbers.extend((operations, *astuple(held)))

    def _looks(self) -> list[tuple[int, Held]]:
        width = 1 + len(fields(Held))
        rows = [self._numbers[at : at + width] for at in range(0, len(self._numbers), width)]
        return [(row[0], Held(*row[1:])) for row in rows]

    def account(self) -> dict[str, Any]:
        """Return what was held early and late, how much that grew, and whether it is flat; None: too short to tell."""
        all_looks = self._looks()
        counted = [held for operations, held in all_looks if operations >= self._warm_up]
        step = -(-len(all_looks) // LOOKS_TOLD) or 1
        looks = [{"operations": done, **asdict(held)} for done, held in all_looks[step - 1 :: step]]
        if len(counted) < ENOUGH_LOOKS:
            return {"flat": None, "warm_up_operations": self._warm_up, "looks": looks}
        quarter = len(counted) // 4
        early, late = Held.least(counted[:quarter]), Held.least(counted[-quarter:])
        grew = late - early
        said = {"flat": grew.within(self._bounds), "warm_up_operations": self._warm_up, "grew": asdict(grew)}
        return {**said, "early": asdict(early), "late": asdict(late), "looks": looks}
