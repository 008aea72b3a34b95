"""How much of the host tier each client may keep from being evicted, so that no client takes it from the others.

Owns that account, by owner, and the rule: a part of the tier is kept, in equal shares, for those who are attached and
one who may come. What a client has pinned beyond its own share must leave the others theirs. It pins nothing itself.
The account is under the tier's lock; clients come and go without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from devipc.errors import ResourceExhausted

__all__ = ["Shares"]


class Shares:
    """See the module.

    Parameters
    ----------
    nbytes : int
        Size of the tier.

    Attributes
    ----------
    kept_percent : int
        How much of it is kept; 0: whoever comes first may take all.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.kept_percent = 0
        self._attached: set[bytes] = set()
        self._pinned: Counter[bytes] = Counter()

    def join(self, owner: bytes) -> None:
        """Count a client in."""
        self._attached.add(owner)

    def leave(self, owner: bytes) -> None:
        """Count a client out; what it still has pinned counts until it is given back."""
        self._attached.discard(owner)

    @property
    def kept_nbytes(self) -> int:
        """What is kept for each client, and for one that may come."""
        return self._nbytes * self.kept_percent // 100 // (len(self._attached) + 1)

    def ceiling(self, owner: bytes) -> int:
        """Return how much ``owner`` may pin when nobody else has pinned anything: more is never had."""
        others = len(self._attached - {owner}) + 1
        return self._nbytes - others * self.kept_nbytes

    def most(self, owner: bytes) -> int:
        """Return how much ``owner`` may have pinned now."""
        kept = self.kept_nbytes
        others = (self._attached | self._pinned.keys()) - {owner}
        return max(kept, self._nbytes - kept - sum(max(self._pinned[one], kept) for one in others))

    def check(self, owner: bytes, nbytes: int, twice: Callable[[], int]) -> None:
        """Raise ResourceExhausted when ``owner`` may not pin ``nbytes`` more; whatever it has pinned twice.

        Nothing more is always allowed. It is not retryable when so many would be too many alone.

        Parameters
        ----------
        twice : callable
            Returns how much of the sum it would have pinned more than once then; asked when the sum is too much.
        """
        if not (self.kept_percent and nbytes):
            return
        beyond = self._pinned[owner] + nbytes - (most := self.most(owner))
        if beyond <= 0 or beyond <= twice():
            return
        raise ResourceExhausted(
            f"{nbytes} bytes more of the host tier would be kept for this client, {most} may be in all:"
            f" {self.kept_nbytes} are for each of {len(self._attached)} clients, and for one that may come",
            code="share",
            retryable=nbytes <= self.ceiling(owner),
            remedy="release leases and wait for transfers of this client, or ask for fewer pages; or let less be kept"
            " (kept_percent)",
        )

    def take(self, owner: bytes, nbytes: int) -> None:
        """Count bytes that are pinned from now on."""
        self._pinned[owner] += nbytes

    def give_back(self, owner: bytes, nbytes: int) -> None:
        """Count bytes that are not any more."""
        self._pinned[owner] -= nbytes
        if not self._pinned[owner]:
            del self._pinned[owner]

    def pinned(self) -> dict[str, int]:
        """Return what each has pinned, by its id; what it has pinned twice is counted twice."""
        return {owner.hex(): nbytes for owner, nbytes in self._pinned.items()}
