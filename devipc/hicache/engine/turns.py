"""Whose operation is looked at next: nobody is behind all that another client has brought.

Owns that order only; it knows neither lanes nor what an operation waits for.
"""

from __future__ import annotations

import heapq
import itertools
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
    places = itertools.count()
    turns = [(flying.get(owner, 0), next(places), owner) for owner in queues]
    heapq.heapify(turns)
    while turns:
        owner = turns[0][2]
        yield queues[owner].popleft()
        if queues[owner]:
            # Behind those that have as much: what was begun may be over already, and count for nothing.
            heapq.heapreplace(turns, (flying.get(owner, 0), next(places), owner))
        else:
            heapq.heappop(turns)
