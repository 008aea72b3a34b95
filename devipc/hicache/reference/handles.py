"""What control may hold of a runtime: identifiers, and nothing that could be followed to a byte.

Owns the three kinds of identifier. Page numbers are the runtime's own logical ones: where a page lies, and when it
moved, is not control's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from devipc.errors import UsageError

__all__ = ["CacheExtentRef", "PageRun", "RequestRuntimeHandle"]


@dataclass(frozen=True, slots=True)
class RequestRuntimeHandle:
    """A request in a runtime.

    Parameters
    ----------
    runtime_id : str
        The runtime; one life of it.
    slot_id : int
        The runtime's place for the request.
    generation : int
        How often that place was given out before: a handle of an earlier request is stale.
    """

    runtime_id: str
    slot_id: int
    generation: int


@dataclass(frozen=True, slots=True)
class PageRun:
    """Neighbouring pages of a runtime, by its logical numbers."""

    first_page: int
    page_count: int


@dataclass(frozen=True, slots=True)
class CacheExtentRef:
    """Pages that a runtime keeps for control until they are released.

    Parameters
    ----------
    runtime_id : str
        The runtime; one life of it.
    generation : int
        Of the runtime's cache; an extent of an earlier one is stale.
    page_runs : tuple of PageRun
        In the order of their tokens.
    """

    runtime_id: str
    generation: int
    page_runs: tuple[PageRun, ...]

    @property
    def page_count(self) -> int:
        """Pages in all runs."""
        return sum(run.page_count for run in self.page_runs)

    @property
    def pages(self) -> list[int]:
        """Logical number of each page, in order."""
        return [run.first_page + index for run in self.page_runs for index in range(run.page_count)]

    @classmethod
    def of(cls, runtime_id: str, generation: int, pages: Iterable[int]) -> CacheExtentRef:
        """Make an extent of these pages, in the longest runs."""
        runs: list[list[int]] = []
        for page in pages:
            if runs and runs[-1][0] + runs[-1][1] == page:
                runs[-1][1] += 1
            else:
                runs.append([page, 1])
        return cls(runtime_id, generation, tuple(PageRun(first, count) for first, count in runs))

    def split(self, page_count: int) -> tuple[CacheExtentRef, CacheExtentRef]:
        """Return the first ``page_count`` pages, and the rest; neither may be empty."""
        if not 0 < page_count < self.page_count:
            raise UsageError(f"an extent of {self.page_count} pages does not split at {page_count}")
        pages = self.pages
        head = CacheExtentRef.of(self.runtime_id, self.generation, pages[:page_count])
        return head, CacheExtentRef.of(self.runtime_id, self.generation, pages[page_count:])
