"""The pools that a client has, so that an engine which follows another can be told of them.

Owns the record of each pool, from before it is registered until its memory is the client's own again.
"""

from __future__ import annotations

import threading

from devipc.hicache.client.links import PoolMemory
from devipc.hicache.requests import RegisterPool

__all__ = ["PoolBook"]


class PoolBook:
    """See the module. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[int, PoolMemory] = {}
        self._ops: dict[int, int] = {}  # pool to the operation that registered it, while it is registered

    def add(self, pool: PoolMemory) -> None:
        """Note a pool that is about to be registered."""
        with self._lock:
            self._pools[pool.number] = pool

    def numbered(self, request: RegisterPool) -> PoolMemory:
        """Note the operation that registers a pool, and return the pool."""
        with self._lock:
            self._ops[request.pool] = request.op
            return self._pools[request.pool]

    def leave(self, number: int) -> PoolMemory | None:
        """Note that a pool is not to be registered again; return it while its memory is lent."""
        with self._lock:
            self._ops.pop(number, None)
            return self._pools.get(number)

    def remove(self, number: int) -> None:
        """Forget a pool."""
        with self._lock:
            self._ops.pop(number, None)
            self._pools.pop(number, None)

    def registered(self) -> list[tuple[int, PoolMemory]]:
        """Return the operation of each registered pool with the pool, in the order of the operations."""
        with self._lock:
            return sorted(((op, self._pools[number]) for number, op in self._ops.items()), key=lambda pair: pair[0])
