"""Which addresses device work may touch: the live ranges of one device, and how much queued work uses each.

Owns the rule that keeps the process alive: no address reaches a byte move unless it lies inside one live range, and
no range is unmapped while queued work uses it. Knows no stream and no wire form.
"""

from __future__ import annotations

import itertools
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from devipc.spi import ClosedError, MemoryKind, UsageError, try_each

__all__ = ["Range", "Ranges", "Rows", "loaded_numpy", "next_identity"]

_identities = itertools.count(1)
_VECTOR_MIN = 64

Rows = tuple[int, int, int]
"""Of a copy: pitch, width and height."""
_LOOK_AGAIN_S = 0.05


def next_identity() -> int:
    """Return a number that this process never used before, for allocations and mappings."""
    return next(_identities)


def loaded_numpy() -> Any:
    """Return numpy when this process has loaded it, else None.

    Never imports it: callers that have arrays have numpy, and for all others plain loops are enough.
    """
    module = sys.modules.get("numpy")
    # A module that another thread is importing right now lacks half of its names.
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


@dataclass(slots=True, eq=False)
class Range:
    """Addresses ``[start, end)`` that device work may touch.

    Parameters
    ----------
    start, end : int
        Exact bounds of what may be touched.
    kind : MemoryKind
        What :meth:`HostMemory.describe` answers.
    identity : int
        Never used twice in this process.
    owner : object
        What the part of the backend that added the range keeps for it.
    dispose : callable
        Called once, with no lock held, when the range was retired and no queued work uses it any more.
    region : int
        Ranges of one region other than 0 lie side by side, so that the rows of one copy may be in several.
    """

    start: int
    end: int
    kind: MemoryKind
    identity: int
    owner: Any = None
    dispose: Callable[[], None] = field(default=lambda: None)
    region: int = 0
    pending: int = 0
    live: bool = True

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.end - self.start


class Ranges:
    """All live ranges of one device, sorted and disjoint. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drained = threading.Condition(self._lock)
        self._ranges: list[Range] = []
        self._starts: list[int] = []
        self._vectors: tuple[Any, Any] | None = None
        self._shut = False

    def add(self, new: Range) -> None:
        """Make a range usable. Raises UsageError when it overlaps a live one, ClosedError after :meth:`shut`."""
        with self._lock:
            if self._shut:
                raise ClosedError("the device is closed", remedy="open it again")
            at = bisect_right(self._starts, new.start)
            for other in self._ranges[max(at - 1, 0) : at + 1]:
                if other.start < new.end and new.start < other.end:
                    raise UsageError(
                        f"[{new.start:#x}, {new.end:#x}) overlaps the live {other.kind} range"
                        f" [{other.start:#x}, {other.end:#x})",
                        code="overlap",
                        remedy="register each piece of host memory once, and no memory that a device allocated",
                    )
            self._ranges.insert(at, new)
            self._starts.insert(at, new.start)
            self._vectors = None

    def find(self, ptr: int) -> Range | None:
        """Return the live range that ``ptr`` points into."""
        with self._lock:
            return self._find(ptr, 1)

    def shut(self) -> list[Range]:
        """Let nothing be added any more, and return what is live."""
        with self._lock:
            self._shut = True
            return list(self._ranges)

    def _find(self, ptr: int, nbytes: int) -> Range | None:
        at = bisect_right(self._starts, ptr) - 1
        if at >= 0 and ptr + nbytes <= self._ranges[at].end:
            return self._ranges[at]
        return None

    def hold(self, ptr: int, nbytes: int, *, what: str, kind: MemoryKind | None = None) -> Range:
        """Return the range around ``[ptr, ptr + nbytes)`` and count one more piece of queued work on it.

        Raises
        ------
        UsageError
            When no live range (of ``kind``, where given) contains all of it.
        """
        with self._lock:
            found = self._find(ptr, nbytes)
            if found is None or (kind is not None and found.kind is not kind):
                raise _outside(what, ptr, nbytes)
            found.pending += 1
            return found

    def hold_many(
        self, addresses: Sequence[int], nbytes: Sequence[int], *, what: str, rows: Callable[[int], Rows] | None = None
    ) -> list[Range]:
        """Hold the range around each ``[addresses[i], addresses[i] + nbytes[i])`` of non-zero length, once per range.

        Both are lists of int, or uint64 arrays of shape ``(n,)``. Where ``rows`` is given, ``rows(i)`` are what is
        touched of it, and they may lie in several ranges of one region, each row inside of one.

        Raises
        ------
        UsageError
            When one of them is not inside a live range; names the first. Nothing is held then.
        """
        with self._lock:
            wrong: list[int] = []
            if len(addresses) >= _VECTOR_MIN and loaded_numpy() is not None:
                held = self._find_vector(addresses, nbytes, wrong)
            else:
                held = self._find_each(addresses, nbytes, wrong)
            for index in wrong:
                if rows is None or not self._find_rows(int(addresses[index]), rows(index), held):
                    raise _outside(f"{what}[{index}]", int(addresses[index]), int(nbytes[index]))
            for found in held.values():
                found.pending += 1
            return list(held.values())

    def _find_each(self, addresses: Sequence[int], nbytes: Sequence[int], wrong: list[int]) -> dict[int, Range]:
        held: dict[int, Range] = {}
        found: Range | None = None
        for index, (ptr, length) in enumerate(zip(addresses, nbytes, strict=True)):
            if not length:
                continue
            if found is None or not found.start <= ptr <= found.end - length:  # mostly the same as before
                found = self._find(int(ptr), int(length))
            if found is None:
                wrong.append(index)
            else:
                held[id(found)] = found
        return held

    def _find_vector(self, addresses: Sequence[int], nbytes: Sequence[int], wrong: list[int]) -> dict[int, Range]:
        np = loaded_numpy()
        if self._vectors is None:
            ends = [known.end for known in self._ranges]
            self._vectors = np.array(self._starts, np.uint64), np.array(ends, np.uint64)
        starts, ends = self._vectors
        ptrs, lengths = np.asarray(addresses, np.uint64), np.asarray(nbytes, np.uint64)
        at = np.searchsorted(starts, ptrs, side="right") - 1
        outside = at < 0
        if len(starts):
            end = ends[at]
            # Never ptr + length: that could wrap around.
            outside |= (ptrs >= end) | (lengths > end - np.minimum(ptrs, end))
        used = lengths > 0
        wrong += np.flatnonzero(outside & used).tolist()
        chosen = [self._ranges[index] for index in np.unique(at[used & ~outside]).tolist()]
        return {id(one): one for one in chosen}

    def _find_rows(self, start: int, rows: Rows, held: dict[int, Range]) -> bool:
        """Add the ranges that hold ``rows`` to ``held``; False when a row is in none, or in one of another region."""
        pitch, width, height = rows
        region, row = 0, 0
        while row < height:
            at = start + row * pitch
            one = self._find(at, width)
            if one is None or not one.region or one.region != (region or one.region):
                return False
            region, held[id(one)] = one.region, one
            row += (one.end - width - at) // pitch + 1  # all rows that end inside of it
        return True

    def drop(self, held: Iterable[Range]) -> None:
        """Count one piece of work less on each; the last one of a retired range disposes of it, or raises why not."""
        finished = []
        with self._lock:
            for one in held:
                one.pending -= 1
                if one.pending == 0 and not one.live:
                    finished.append(one)
            self._drained.notify_all()
        if finished:
            try_each([one.dispose for one in finished])

    def retire(self, old: Range) -> bool:
        """Take a range out: no new work may use it, and it is disposed of when the queued work has run.

        Returns False when it is none of these ranges, or was retired before.
        """
        with self._lock:
            at = bisect_right(self._starts, old.start) - 1
            if at < 0 or self._ranges[at] is not old:
                return False
            old.live = False
            del self._ranges[at], self._starts[at]
            self._vectors = None
            idle = old.pending == 0
        if idle:
            old.dispose()
        return True

    def wait_until_idle(self, old: Range, *, used: Callable[[Range], bool]) -> None:
        """Block until no queued work uses ``old``, which was retired.

        An interrupt between a hold and its work leaves a count that nobody takes back, so that ``used``, which looks
        at the queues themselves, is asked as well.
        """
        while True:
            with self._drained:
                if self._drained.wait_for(lambda: old.pending == 0, _LOOK_AGAIN_S):
                    return
            if not used(old):
                return


def _outside(what: str, ptr: int, nbytes: int) -> UsageError:
    return UsageError(
        f"{what}: [{ptr:#x}, {ptr + nbytes:#x}) does not lie inside one live range of this device",
        code="address",
        remedy="use memory that this device allocated, opened or registered, and that is not yet given back",
    )
