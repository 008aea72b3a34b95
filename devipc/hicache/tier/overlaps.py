"""What an owner holds more than once: bytes that the sum of its holds has too often.

Owns that account. Few are asked for it, those whose sum is too much; so it begins when it is asked for, and is kept up
until the owner holds nothing any more. Then a hold costs the same however many there are. Not thread-safe: the tier's
lock is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from devipc.hicache.few import distinct
from devipc.hicache.tier.blocks import Slots
from devipc.hicache.tier.records import Hold

__all__ = ["Overlaps"]

I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Account:
    """``counts``: how many of ``holds`` have each extent, by its head; None before anybody asked."""

    holds: set[Hold] = field(default_factory=set)
    counts: I64 | None = None
    nbytes: int = 0


class Overlaps:
    """See the module.

    Parameters
    ----------
    slots : Slots
        Where extents are looked up. The size of one does not change while it is held.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._accounts: dict[bytes, _Account] = {}

    def add(self, owner: bytes, hold: Hold) -> None:
        """Count a hold in."""
        account = self._accounts.get(owner)
        if account is None:
            account = self._accounts[owner] = _Account()
        account.holds.add(hold)
        if account.counts is not None:
            counts = self._long_enough(account, account.counts)
            account.nbytes += self._held(counts, hold.extents)
            counts[hold.extents] += 1

    def remove(self, owner: bytes, hold: Hold) -> None:
        """Count a hold out that was counted in."""
        account = self._accounts[owner]
        account.holds.remove(hold)
        if not account.holds:
            del self._accounts[owner]
        elif account.counts is not None:
            account.counts[hold.extents] -= 1
            account.nbytes -= self._held(account.counts, hold.extents)

    def nbytes(self, owner: bytes, more: I64 | None = None) -> int:
        """Return how many bytes the sum over the owner's holds has too often.

        Parameters
        ----------
        more : numpy.ndarray or None
            Extents, each once, that are in the sum as well.
        """
        account = self._accounts.get(owner)
        if account is None:
            return 0
        counts = self._begun(account) if account.counts is None else self._long_enough(account, account.counts)
        return account.nbytes + (0 if more is None else self._held(counts, more))

    def _held(self, counts: I64, extents: I64) -> int:
        return self._slots.nbytes_of(extents[counts[extents] > 0])

    def _begun(self, account: _Account) -> I64:
        extents = np.concatenate([hold.extents for hold in account.holds])
        counts = account.counts = np.zeros(len(self._slots.span), np.int64)
        np.add.at(counts, extents, 1)
        account.nbytes = self._slots.nbytes_of(extents) - self._slots.nbytes_of(distinct(extents))
        return counts

    def _long_enough(self, account: _Account, counts: I64) -> I64:
        missing = len(self._slots.span) - len(counts)
        if missing:  # there are more slots than there were
            counts = account.counts = np.concatenate((counts, np.zeros(missing, np.int64)))
        return counts
