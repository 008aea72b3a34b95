"""Leases: what must stay alive until a peer is done with it, counted per holder.

Owns the counting and the waiting, nothing else. It knows no memory, no driver and no connection: items and holders
are opaque keys. Counters never go below zero: a release without a lease is reported, not absorbed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from devipc.deadline import bounded
from devipc.errors import StaleError, UsageError

__all__ = ["LeaseTable"]


class LeaseTable:
    """Counts leases per item and holder. All methods may be called from any thread; only waits block."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._leases: dict[Hashable, Counter[Hashable]] = {}
        self._retired: set[Hashable] = set()

    def add(self, item: Hashable) -> None:
        """Start to keep count of ``item``, which must be new."""
        with self._changed:
            if item in self._leases:
                raise UsageError("this item is leased out already", code="duplicate")
            self._leases[item] = Counter()

    def grant(self, item: Hashable, holder: Hashable) -> None:
        """Give ``holder`` one more lease.

        Raises
        ------
        StaleError
            When the item was retired or never existed.
        """
        with self._changed:
            if item not in self._leases or item in self._retired:
                raise StaleError(
                    "what was asked for is no longer shared",
                    code="revoked",
                    remedy="ask the exporter for its current names and open again",
                )
            self._leases[item][holder] += 1

    def release(self, item: Hashable, holder: Hashable) -> bool:
        """Take one lease back. Return False, and change nothing, when ``holder`` had none."""
        with self._changed:
            counts = self._leases.get(item)
            if not counts or counts[holder] <= 0:
                return False
            counts[holder] -= 1
            if counts[holder] == 0:
                del counts[holder]
            self._changed.notify_all()
            return True

    def drop_holder(self, holder: Hashable) -> list[Hashable]:
        """Take back everything that ``holder`` had (it is gone); return the items that are free now."""
        freed = []
        with self._changed:
            for item, counts in self._leases.items():
                if counts.pop(holder, 0) and not counts:
                    freed.append(item)
            self._changed.notify_all()
        return freed

    def retire(self, item: Hashable) -> None:
        """Refuse new leases of ``item`` from now on."""
        with self._changed:
            self._retired.add(item)

    def holders(self, item: Hashable) -> frozenset[Hashable]:
        """Return who still has a lease of ``item``."""
        with self._changed:
            return frozenset(self._leases.get(item, ()))

    def wait_free(self, item: Hashable, *, timeout_s: float) -> bool:
        """Block until nobody has a lease of ``item``; False when the time is up."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._leases.get(item), bounded(timeout_s))

    def remove(self, item: Hashable) -> None:
        """Forget ``item``; it must be free."""
        with self._changed:
            if self._leases.get(item):
                raise UsageError("the item is still leased out", code="leased", remedy="wait_free() first")
            self._leases.pop(item, None)
            self._retired.discard(item)

    @contextmanager
    def held(self, item: Hashable, holder: Hashable) -> Iterator[None]:
        """Hold one lease for the length of a block."""
        self.grant(item, holder)
        try:
            yield
        finally:
            self.release(item, holder)
