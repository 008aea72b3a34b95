"""A client's use of its slots: which operation has which, and what its fence and its cancel word say meanwhile.

Owns the rule that a slot is used again only when the supervisor has ended it and the client's operation has a status,
and what a fence says for ever after. It knows neither how requests travel nor who reads the words.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping

from devipc.completion import Fence
from devipc.deadline import deadline_after, pause_after, remaining
from devipc.errors import CompletionTimeout, FencePoisoned, ResourceExhausted
from devipc.hicache.operations import Kind
from devipc.hicache.wire.slots import Slots
from devipc.interfaces.transfer import Stream
from devipc.types import PoisonReason

__all__ = ["SlotFence", "SlotTable", "SlotWord"]

_LONGEST_PAUSE_S = 1e-3


class SlotWord:
    """The cancel word of an operation. Fulfils both ends; it may be set before the operation has a slot."""

    __slots__ = ("_lock", "_set", "_slot", "_slots")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._set = False
        self._slots: Slots | None = None
        self._slot = 0

    def set(self) -> None:
        """Give up. Never undone."""
        with self._lock:  # the slot must not become another operation's meanwhile
            self._set = True
            if self._slots is not None:
                self._slots.cancel(self._slot)

    def is_set(self) -> bool:
        """Return True once it was set."""
        return self._set

    def bind(self, slots: Slots | None, slot: int = 0) -> None:
        """Use a slot; None: use none any more."""
        with self._lock:
            self._slots, self._slot = slots, slot
            if self._set and slots is not None:
                slots.cancel(slot)


class SlotFence:
    """Completion of one operation: values of a timeline from wherever its copies begin there. Fulfils both ends.

    What :meth:`settle` or :meth:`poison` says first, stays.
    """

    __slots__ = ("_final", "_slot", "_slots", "_timeline", "word")

    def __init__(self, word: SlotWord) -> None:
        self.word = word
        self._slots: Slots | None = None
        self._timeline: Fence | None = None
        self._slot = 0
        self._final: PoisonReason | bool | None = None

    @property
    def slot(self) -> int:
        """The slot in use."""
        return self._slot

    def bind(self, slots: Slots, slot: int, timeline: Fence) -> None:
        """Use a slot, and the timeline that its first value is one of."""
        self._slot, self._timeline = slot, timeline
        self._slots = slots  # last: whoever sees it sees the others

    def settle(self) -> None:
        """All values are reached."""
        if self._final is None:
            self._final = True

    def poison(self, reason: PoisonReason) -> None:
        """Let all who wait be told that it failed."""
        if self._final is None:
            self._final = reason

    def query(self, n: int) -> bool:
        """See :class:`~devipc.hicache.client.ticket.WaitFence`."""
        if self._final is None:
            try:
                reached = self._look(n)
            except Exception:
                if self._final is None:
                    raise
            else:
                if self._final is None:  # else the slot may have been another operation's
                    return reached
        return self._said()

    def _said(self) -> bool:
        if isinstance(self._final, PoisonReason):
            raise _failed(self._final)
        return self._final is True

    def _look(self, n: int) -> bool:
        if (base := self._base()) is None:
            return True
        assert self._timeline is not None or not base
        return bool(base) and self._timeline is not None and self._timeline.query(base + n - 1)

    def _base(self) -> int | None:
        """Return the value behind the first group, 0 while there is none; None when all are reached."""
        if self._slots is None:
            return 0
        if self._slots.ended(self._slot):
            if (reason := self._slots.poisoned(self._slot)) is not None:
                raise _failed(reason)
            return None
        return self._slots.base(self._slot)

    def synchronize(self, n: int, timeout_s: float) -> None:
        """See :class:`~devipc.hicache.client.ticket.WaitFence`."""
        began, deadline = time.monotonic(), deadline_after(timeout_s)
        while not self.query(n):
            if not remaining(deadline):
                raise CompletionTimeout(
                    f"the copies are not done after {timeout_s:g} s", remedy="wait again, or cancel the operation"
                )
            pause = pause_after(time.monotonic() - began, _LONGEST_PAUSE_S)
            time.sleep(min(pause, remaining(deadline)))

    def wait(self, stream: Stream, n: int, *, timeout_s: float = 0.0) -> None:
        """See :class:`~devipc.hicache.client.ticket.WaitFence`."""
        began, deadline = time.monotonic(), deadline_after(timeout_s)
        while not self.query(n):
            try:
                base, timeline = self._base(), self._timeline
                if base is None or self._final is not None:
                    continue  # ended meanwhile: the question above says how
                if base and timeline is not None:
                    timeline.wait(stream, base + n - 1, timeout_s=max(remaining(deadline), _LONGEST_PAUSE_S))
                    return
            except FencePoisoned:
                continue
            if not remaining(deadline):
                raise CompletionTimeout(
                    f"the copies were not submitted within {timeout_s:g} s",
                    remedy="the operation still waits for its ready point, for room, or for those before it",
                )
            pause = pause_after(time.monotonic() - began, _LONGEST_PAUSE_S)
            time.sleep(min(pause, remaining(deadline)))


def _failed(reason: PoisonReason) -> FencePoisoned:
    return FencePoisoned(
        f"the operation ended without its copies: {reason.name.lower()}",
        code=reason.name.lower(),
        remedy="discard what waited for it; the ticket says why",
    )


class SlotTable:
    """The slots of one attachment. Any thread.

    Parameters
    ----------
    slots : Slots
        Made by this client; stays the caller's.
    timelines : mapping of Kind to Fence
        The engine's, of backups and of restores.
    """

    def __init__(self, slots: Slots, timelines: Mapping[Kind, Fence]) -> None:
        self._slots = slots
        self._timelines = timelines
        self._lock = threading.Lock()
        self._free = deque(range(slots.count))
        self._used: dict[int, SlotFence] = {}
        self._left: deque[int] = deque()  # the client's operation has ended, the supervisor has not said so
        self._over: PoisonReason | None = None

    def begin(self, op: int, kind: Kind, fence: SlotFence) -> int:
        """Give operation ``op`` a slot, and let its fence and its word use it.

        Whoever is interrupted here calls :meth:`unused`: nobody else knows whether there is one.

        Raises
        ------
        ResourceExhausted
            With code ``busy`` when all are in use.
        FencePoisoned
            When the attachment is over.
        """
        with self._lock:
            if self._over is not None:
                raise _failed(self._over)
            if not self._free:
                self._recycle()
            if not self._free:
                raise ResourceExhausted(
                    f"{self._slots.count} operations of this client have not ended",
                    code="busy",
                    remedy="wait for one of them",
                )
            slot = self._free[0]
            del self._free[0]  # no call, hence no interrupt, comes between these, here and below
            self._used[slot] = fence
            self._slots.begin(slot, op)
            fence.bind(self._slots, slot, self._timelines[kind])
            fence.word.bind(self._slots, slot)
            return slot

    def leave(self, slot: int) -> None:
        """Note that the client's operation has its status."""
        with self._lock:
            if slot in self._used:
                if self._slots.ended(slot):
                    self._freeze(self._used[slot], slot, PoisonReason.PROTOCOL)
                    del self._used[slot]
                    self._free += (slot,)
                else:
                    self._left.append(slot)

    def unused(self, fence: SlotFence) -> None:
        """Take back the slot of a fence, of which nobody was told; nothing where it has none."""
        with self._lock:
            for slot in [slot for slot, one in self._used.items() if one is fence]:
                fence.word.bind(None)
                fence.poison(PoisonReason.CANCELLED)
                del self._used[slot]
                self._free += (slot,)

    def _recycle(self) -> None:
        """Free those slots of which the client has a status, and that the supervisor has ended."""
        for _ in range(len(self._left)):
            slot = self._left[0]
            fence = self._used.get(slot)
            if fence is None:
                del self._left[0]
            elif self._slots.ended(slot):
                self._freeze(fence, slot, PoisonReason.PROTOCOL)
                del self._left[0], self._used[slot]
                self._free += (slot,)
            else:
                self._left.rotate(-1)

    def _freeze(self, fence: SlotFence, slot: int, otherwise: PoisonReason) -> None:
        """Let a fence say for ever what its slot says now."""
        fence.word.bind(None)
        reason = self._slots.poisoned(slot) if self._slots.ended(slot) else otherwise
        if reason is None:
            fence.settle()
        else:
            fence.poison(reason)

    def end(self, reason: PoisonReason) -> None:
        """The supervisor or the engine is dying: fences that have no end get this one. Never blocks. Again: nothing.

        Every operation is given up first: whoever seems to die may have lost a connection only, and would publish
        pages that are the client's again by then.
        """
        with self._lock:
            if self._over is not None:
                return
            self._over = reason
            used, self._used = self._used, {}
            for slot, fence in used.items():
                self._slots.cancel(slot)
                self._freeze(fence, slot, reason)
