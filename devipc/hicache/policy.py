"""When a page is written to the host tier: decided by the client that owns the page, from what it sees.

Owns three policies and the count of hits that one of them needs. It moves nothing, and knows neither pools nor pages:
keys go in, the keys of pages to back up come out.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable

from devipc.errors import CapabilityError, UsageError

__all__ = ["WritePolicy", "Writer", "policy_named"]


class WritePolicy(enum.StrEnum):
    """When a page is backed up."""

    WRITE_THROUGH = "write_through"
    """As soon as it was computed."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """Once it was hit often enough: what nobody asks for again costs no transfer."""
    WRITE_BACK = "write_back"
    """Before its place on the device is given to another page, which waits for the copy."""

    @classmethod
    def _missing_(cls, value: object) -> WritePolicy | None:
        """Say why there is no ``buffer_only``, which other caches have."""
        if value == "buffer_only":
            raise CapabilityError(
                "buffer_only: host memory that holds pages only on their way to a storage tier, and there is none",
                code="no_storage",
                remedy="let pages stay in host memory, which may be small (tier_nbytes): write_through,"
                " write_through_selective or write_back",
            )
        return None


def policy_named(name: str) -> WritePolicy:
    """Return the policy that a daemon tells its clients; the first for one that is not known here."""
    return next((policy for policy in WritePolicy if policy.value == name), next(iter(WritePolicy)))


class Writer:
    """Decides for one pool. One thread; costs a dictionary look-up a key.

    Keys are 16 bytes. A key is named once for each time that its page became worth a backup: a page that was backed up
    is not named again until :meth:`lost` says that the host tier does not hold it any more.

    Parameters
    ----------
    policy : WritePolicy
        What to do.
    after_hits : int
        Hits before a page is backed up selectively; at least 1.
    remember : int
        Keys whose hits and backups are remembered; the least recently seen are forgotten, and count from zero again.
    """

    def __init__(self, policy: WritePolicy, *, after_hits: int = 2, remember: int = 2**20) -> None:
        if after_hits < 1 or remember < 1:
            raise UsageError(f"{after_hits} hits, {remember} keys", code="policy", remedy="pass positive integers")
        self.policy = WritePolicy(policy)
        self._after_hits = after_hits
        self._remember = remember
        self._seen: OrderedDict[bytes, int] = OrderedDict()  # hits; -1 once it was named

    def computed(self, keys: Iterable[bytes]) -> list[bytes]:
        """Note pages that hold their content now; return those to back up."""
        return self._chosen(keys, worth=self.policy is WritePolicy.WRITE_THROUGH, hits=0)

    def hit(self, keys: Iterable[bytes]) -> list[bytes]:
        """Note pages on the device that a request used again; return those to back up."""
        return self._chosen(keys, worth=self.policy is WritePolicy.WRITE_THROUGH, hits=1)

    def evicting(self, keys: Iterable[bytes]) -> list[bytes]:
        """Note pages whose place is about to be used again; return those to back up before it is."""
        return self._chosen(keys, worth=self.policy is WritePolicy.WRITE_BACK, hits=0)

    def lost(self, keys: Iterable[bytes]) -> None:
        """Note pages that the host tier does not hold: a backup that failed, or a miss. They count from zero again."""
        for key in keys:
            self._seen.pop(key, None)

    def _chosen(self, keys: Iterable[bytes], *, worth: bool, hits: int) -> list[bytes]:
        selective = self.policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        chosen = []
        for key in keys:
            count = self._seen.pop(key, 0)
            if count >= 0:
                count += hits
                if worth or (selective and count >= self._after_hits):
                    chosen.append(key)
                    count = -1
            self._seen[key] = count
            if len(self._seen) > self._remember:
                self._seen.popitem(last=False)
        return chosen
