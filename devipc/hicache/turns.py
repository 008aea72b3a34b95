"""Whose operation is looked at next: nobody is behind all that another client has brought.

Owns that order only; it knows neither lanes nor what an operation waits for.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

__all__ = ["in_turn"]


class _Owned(Protocol):
    @property
    def owner(self) -> bytes: ...


W = TypeVar("W", bound=_Owned)


def in_turn(works: Iterable[W], flying: Mapping[bytes, int]) -> Iterator[W]:
    """Yield operations: each client's own in their order, and always of the client that has least in flight.

    Parameters
    ----------
    works : iterable
        In the order in which they came.
    flying : mapping of bytes to int
        Bytes in flight by owner; looked at anew behind each operation for its owner, so that whoever took off comes
        later next time.
    """
    queues: dict[bytes, deque[W]] = {}
    for work in works:
        queues.setdefault(work.owner, deque()).append(work)
    turns = [(flying.get(owner, 0), place, owner) for place, owner in enumerate(queues)]
    heapq.heapify(turns)
    while turns:
        _, place, owner = turns[0]
        yield queues[owner].popleft()
        if queues[owner]:
            heapq.heapreplace(turns, (flying.get(owner, 0), place, owner))
        else:
            heapq.heappop(turns)
