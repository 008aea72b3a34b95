"""The supervisor's ends of a client's slots: a completion fence, and a cancel word.

Owns nothing but the names of two words; a client that is gone makes them do nothing.
"""

from __future__ import annotations

import contextlib

from devipc.errors import ClosedError
from devipc.hicache.wire.slots import Slots
from devipc.types import PoisonReason

__all__ = ["SlotCancel", "SlotFence"]


class SlotFence:
    """A completion fence whose end goes into a slot. Fulfils :class:`~devipc.hicache.requests.CompletionFence`."""

    __slots__ = ("_slots", "op", "slot")

    def __init__(self, slots: Slots, slot: int, op: int) -> None:
        self._slots = slots
        self.slot = slots.check(slot)
        self.op = op

    def settle(self) -> None:
        """See :class:`~devipc.hicache.requests.CompletionFence`."""
        with contextlib.suppress(ClosedError):  # nobody waits any more
            self._slots.settle(self.slot)

    def poison(self, reason: PoisonReason) -> None:
        """See :class:`~devipc.hicache.requests.CompletionFence`."""
        with contextlib.suppress(ClosedError):
            self._slots.poison(self.slot, reason)


class SlotCancel:
    """A cancel word in a slot. Fulfils :class:`~devipc.hicache.requests.CancelWord`."""

    __slots__ = ("_slot", "_slots")

    def __init__(self, slots: Slots, slot: int) -> None:
        self._slots = slots
        self._slot = slots.check(slot)

    def is_set(self) -> bool:
        """See :class:`~devipc.hicache.requests.CancelWord`."""
        try:
            return self._slots.cancelled(self._slot)
        except ClosedError:  # the client is gone: nothing more is published
            return True
