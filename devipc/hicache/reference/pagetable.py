"""A runtime's pages: which are free, which a request or an extent uses, and where each logical page lies.

Owns allocation and reference counts. Logical numbers only grow and are never used again, so that a stale extent is
found out; physical numbers stay inside of the runtime, and their order has no meaning.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from devipc.errors import ResourceExhausted, StaleError
from devipc.hicache.reference.handles import CacheExtentRef, RequestRuntimeHandle

__all__ = ["PageTable", "Slot", "SlotBook"]

_PLACES_A_REQUEST = 4


class SlotBook:
    """Which places for requests are taken, and how often each was: the part of a runtime that gives out handles.

    Parameters
    ----------
    runtime_id : str
        Of the runtime.
    max_requests : int
        Requests that compute at a time. There are more places than that: one is taken until the batch that closes its
        request was executed, and those behind it are announced by then.
    """

    def __init__(self, runtime_id: str, max_requests: int) -> None:
        self.runtime_id = runtime_id
        count = _PLACES_A_REQUEST * max_requests
        self._free = list(range(count - 1, -1, -1))
        self._generation = [0] * count
        self._taken: set[RequestRuntimeHandle] = set()

    def take(self) -> RequestRuntimeHandle:
        """Return a handle of a free place; raises ResourceExhausted when there is none."""
        if not self._free:
            raise ResourceExhausted(
                f"all {len(self._generation)} requests of the runtime are open", code="busy", remedy="close one first"
            )
        slot = self._free.pop()
        self._generation[slot] += 1
        handle = RequestRuntimeHandle(self.runtime_id, slot, self._generation[slot])
        self._taken.add(handle)
        return handle

    def give_back(self, handle: RequestRuntimeHandle) -> None:
        """Free the place; one that was taken from another book is none of this one's business."""
        if handle in self._taken:
            self._taken.discard(handle)
            self._free.append(handle.slot_id)


@dataclass(slots=True)
class Slot:
    """What a runtime knows of one request: its pages in order, how many tokens they hold, and the last one sampled."""

    pages: list[int] = field(default_factory=list)
    length: int = 0
    last_token: int = -1


class PageTable:
    """See the module. One thread.

    Parameters
    ----------
    runtime_id : str
        Of the runtime.
    page_count : int
        Physical pages; number 0 is never given out, it takes what padding writes.
    seed : int or None
        Shuffles the physical pages; their order must not matter to anybody.
    """

    def __init__(self, runtime_id: str, page_count: int, *, seed: int | None = None) -> None:
        self.runtime_id = runtime_id
        self.generation = 1
        self._free = list(range(page_count - 1, 0, -1))
        if seed is not None:
            random.Random(seed).shuffle(self._free)
        self._next = 1
        self._physical: dict[int, int] = {}
        self._uses: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Physical pages that nobody uses."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Return so many new logical pages, used once each; all or none.

        Raises
        ------
        ResourceExhausted
            When there are not so many: control counts pages, so this is a defect of control, or a leak here.
        """
        if count > len(self._free):
            raise ResourceExhausted(
                f"{count} pages wanted, {len(self._free)} are free", code="pages", remedy="release extents first"
            )
        made = []
        for _ in range(count):
            self._physical[self._next] = self._free.pop()
            self._uses[self._next] = 1
            made.append(self._next)
            self._next += 1
        return made

    def physical(self, pages: Sequence[int]) -> list[int]:
        """Return where pages lie."""
        return [self._physical[page] for page in pages]

    def use(self, pages: Iterable[int]) -> None:
        """Count one more use of each page."""
        for page in pages:
            if page not in self._uses:
                raise StaleError(f"page {page} was released", remedy="control holds an extent that it gave back")
            self._uses[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Undo one use of each page; what nobody uses is free again."""
        for page in pages:
            self._uses[page] -= 1
            if not self._uses[page]:
                del self._uses[page]
                self._free.append(self._physical.pop(page))

    def extent(self, pages: Sequence[int]) -> CacheExtentRef:
        """Return an extent of these pages, which are used once more until it is released."""
        self.use(pages)
        return CacheExtentRef.of(self.runtime_id, self.generation, pages)

    def pages_of(self, extent: CacheExtentRef) -> list[int]:
        """Return the pages of an extent; raises StaleError when it is not of this life and generation."""
        if (extent.runtime_id, extent.generation) != (self.runtime_id, self.generation):
            raise StaleError(f"{extent} is of another life of the runtime", remedy="forget it")
        return extent.pages
