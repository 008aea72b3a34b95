"""The one page of shared memory that a fence is.

Owns the layout of the page and the order in which its words are stored and loaded. It knows no device, no strategy
and no socket: who writes a word by which means is decided elsewhere.

Line 0 is the fence, every further line belongs to one consumer, the tail is a ring of values for the producer::

    0     value u64   status u64   issued u64   -   kick u32  magic u32  version u32  -
          final u64   count u64
    64*i  ack u64     state u64    start u64    ticket u64        consumer i, 1 .. 32
    3072  128 values u64

``value`` has one device writer. Everything else is written by host code only. Aligned 64-bit stores of one word do not
tear on x86-64 and become visible in program order; for other machines see :mod:`devipc.completion.offers`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from enum import IntEnum

from devipc.errors import ClosedError, HandleError, StaleError, UsageError
from devipc.futex import futex_wait, futex_wake
from devipc.memfd import SharedMap, create_memfd, validate_memfd
from devipc.types import MAX_FENCE_VALUE, POISON_BASE, PoisonReason

__all__ = ["MAX_CONSUMERS", "PAGE_FENCE_NBYTES", "RING_SLOTS", "FencePage", "LineState", "check_value", "poison_page"]

PAGE_FENCE_NBYTES = 4096
"""Size of the memory file of a fence."""
MAX_CONSUMERS = 32
"""Consumers that one fence can have at a time."""
RING_SLOTS = 128
"""Values that fit into the ring at the page's tail."""
RING_OFFSET = 3072
VALUE_OFFSET = 0

_VALUE, _STATUS, _ISSUED, _FINAL, _COUNT = 0, 1, 2, 6, 7
_KICK_32, _MAGIC_32, _VERSION_32 = 8, 9, 10
_WORDS_PER_LINE = 8
_ACK, _STATE, _START, _TICKET = 0, 1, 2, 3
_RING = RING_OFFSET // 8
_MAGIC = 0x43464564
_VERSION = 1
_SPINS = 20
_FIRST_PAUSE_S = 20e-6
_REPEAT_S = 1e-3


class LineState(IntEnum):
    """What a consumer's line stands for."""

    FREE = 0
    GIVEN = 1
    OPEN = 2
    CLOSED = 3
    DROPPED = 4


def check_value(n: object) -> None:
    """Refuse a number that no fence can reach.

    Raises
    ------
    UsageError
        When ``n`` is no integer of 1 .. 2**62-1.
    """
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_FENCE_VALUE:
        raise UsageError(f"fence value {n!r}", remedy=f"use whole numbers from 1 to {MAX_FENCE_VALUE}")


class FencePage:
    """A mapped fence page; loads and stores of single words.

    Safe from any thread: each access is one aligned load or store. After :meth:`close` every access raises
    :class:`~devipc.errors.ClosedError`, also when it races with the closing thread.
    """

    __slots__ = ("_halves", "_map", "_words")

    def __init__(self, fd: int) -> None:
        self._map = SharedMap(fd, PAGE_FENCE_NBYTES)
        self._words = self._map.view.cast("Q")
        self._halves = self._map.view.cast("I")

    @classmethod
    def create(cls, *, fd: int | None = None) -> tuple[FencePage, int]:
        """Make a page; return it with its descriptor, which the caller owns.

        ``fd`` is a zero-filled sealed memory file that was made elsewhere and is used instead; it stays its owner's.
        """
        fd = create_memfd("devipc-fence", PAGE_FENCE_NBYTES) if fd is None else os.dup(fd)
        try:
            page = cls(fd)
        except BaseException:
            os.close(fd)
            raise
        page._halves[_VERSION_32] = _VERSION
        page._halves[_MAGIC_32] = _MAGIC
        return page, fd

    @classmethod
    def open(cls, fd: int, *, line: int, ticket: int) -> FencePage:
        """Map a received page and take ``line``; ``fd`` stays the caller's.

        Raises
        ------
        HandleError
            When the file is unsealed, too small or no fence page.
        StaleError
            When the line was taken or withdrawn already.
        """
        validate_memfd(fd, min_nbytes=PAGE_FENCE_NBYTES)
        page = cls(fd)
        try:
            page._check_kind()
            if page.line_state(line) is not LineState.GIVEN or page._line(line, _TICKET) != ticket:
                raise StaleError(
                    f"the handle's line {line} of the fence is {page.line_state(line).name.lower()}",
                    remedy="a handle opens one consumer once; export again",
                )
        except BaseException:
            page.close()
            raise
        page.set_line_state(line, LineState.OPEN)
        return page

    def _check_kind(self) -> None:
        if self._halves[_MAGIC_32] != _MAGIC or self._halves[_VERSION_32] != _VERSION:
            raise HandleError("the memory file is no fence of this version", remedy="run the same devipc everywhere")

    # --- words -------------------------------------------------------------------------------------------------------

    @property
    def address(self) -> int:
        """Host address of the page."""
        return self._map.address

    @property
    def value(self) -> int:
        """The raw word: 0, a reached value, or a poison value."""
        return self._load(_VALUE)

    @value.setter
    def value(self, n: int) -> None:
        self._store(_VALUE, n)

    @property
    def issued(self) -> int:
        """Largest value whose signal was submitted."""
        return self._load(_ISSUED)

    @issued.setter
    def issued(self, n: int) -> None:
        self._store(_ISSUED, n)

    @property
    def final(self) -> int:
        """Largest value that was reached when the producer closed; 0 before, and after every other poison."""
        return self._load(_FINAL)

    @final.setter
    def final(self, n: int) -> None:
        self._store(_FINAL, n)

    @property
    def count(self) -> int:
        """Number of signals so far (event strategy only)."""
        return self._load(_COUNT)

    @count.setter
    def count(self, n: int) -> None:
        self._store(_COUNT, n)

    def ring(self, index: int) -> int:
        """Load slot ``index`` of the value ring."""
        return self._load(_RING + index)

    def set_ring(self, index: int, n: int) -> None:
        """Store slot ``index`` of the value ring."""
        self._store(_RING + index, n)

    # --- poison ------------------------------------------------------------------------------------------------------

    @property
    def status(self) -> PoisonReason | None:
        """Why the fence is poisoned, or None. Load :attr:`value` first: status wins."""
        status = self._load(_STATUS)
        if status == 0:
            return None
        try:
            return PoisonReason(status)
        except ValueError:
            return PoisonReason.PROTOCOL

    def poison(self, reason: PoisonReason) -> None:
        """Store the status (the first cause stays), then the value, and wake everybody.

        Of two processes that do this at the same instant either may be the first.
        """
        if self._load(_STATUS) == 0:
            self._store(_STATUS, int(reason))
        self.poison_again()
        self.kick()

    def poison_again(self) -> None:
        """Store the poison value once more where a late store of the writer has replaced it."""
        if self._load(_VALUE) < POISON_BASE:
            self._store(_VALUE, POISON_BASE + self._load(_STATUS))

    # --- lines -------------------------------------------------------------------------------------------------------

    def line_state(self, line: int) -> LineState:
        """Return what ``line`` (1 .. 32) stands for; nonsense from a peer counts as closed."""
        state = self._line(line, _STATE)
        return LineState(state) if state <= LineState.DROPPED else LineState.CLOSED

    def set_line_state(self, line: int, state: LineState) -> None:
        """Store the state of ``line``."""
        self._store(line * _WORDS_PER_LINE + _STATE, int(state))

    def give_line(self, line: int, *, ticket: int, ack: int, start: int) -> None:
        """Reserve ``line`` for a handle, whose consumer begins after ``ack`` signals, at value ``start``."""
        for word, content in ((_ACK, ack), (_START, start), (_TICKET, ticket)):
            self._store(line * _WORDS_PER_LINE + word, content)
        self.set_line_state(line, LineState.GIVEN)

    def ack(self, line: int) -> int:
        """Number of signals that the consumer of ``line`` has seen done."""
        return self._line(line, _ACK)

    def set_ack(self, line: int, count: int) -> None:
        """Store what :meth:`ack` returns."""
        self._store(line * _WORDS_PER_LINE + _ACK, count)

    def start(self, line: int) -> int:
        """Value that was reached when ``line`` was given."""
        return self._line(line, _START)

    # --- waking and waiting ------------------------------------------------------------------------------------------

    def kick(self) -> None:
        """Wake all host waiters of the page, in all processes."""
        try:
            # Two writers may store the same number. The wake-up is still sent, and every wait is short.
            self._halves[_KICK_32] = (self._halves[_KICK_32] + 1) & 0xFFFFFFFF
            futex_wake(self._map.address + 4 * _KICK_32)
        except (ValueError, UsageError):
            return  # closed by another thread: nobody is left to be woken here

    def wait_until(self, condition: Callable[[], bool], *, timeout_s: float, pause_s: float) -> bool:
        """Block until ``condition()`` is true, at most ``timeout_s``; return whether it became true.

        It is asked again after every kick, and at growing intervals up to ``pause_s`` because devices do not kick.
        What it raises reaches the caller. The GIL is free while this sleeps.
        """
        deadline = time.monotonic() + timeout_s
        pause, spins = _FIRST_PAUSE_S, 0
        while True:
            kick = self._kick_word()
            if condition():
                return True
            left = deadline - time.monotonic()
            if not left > 0:  # also no number
                return False
            if spins < _SPINS:
                spins += 1
                time.sleep(0)
                continue
            try:
                futex_wait(self._map.address + 4 * _KICK_32, kick, timeout_s=min(pause, left))
            except UsageError:  # unmapped by another thread since the word was read
                raise _closed() from None
            pause = min(2 * pause, pause_s)

    @property
    def closed(self) -> bool:
        """True once the page was unmapped here."""
        return self._map.closed

    def close(self) -> None:
        """Unmap. Only once no device can reach the page through this process. Calling it again does nothing."""
        self._words.release()
        self._halves.release()
        self._map.close()

    def _kick_word(self) -> int:
        try:
            return self._halves[_KICK_32]
        except ValueError:
            raise _closed() from None

    def _line(self, line: int, word: int) -> int:
        return self._load(line * _WORDS_PER_LINE + word)

    def _load(self, index: int) -> int:
        try:
            return self._words[index]
        except ValueError:
            raise _closed() from None

    def _store(self, index: int, value: int) -> None:
        try:
            self._words[index] = value
        except ValueError:
            raise _closed() from None


def poison_page(fd: int, reason: PoisonReason, *, until: Callable[[], bool]) -> None:
    """Release all waiters of a fence as failed, from a process that has neither the fence nor a device.

    For whoever watches over the fence's producer and kept the descriptor of its page. Stores the status (the first
    cause stays) and the poison value, and the value again every millisecond until ``until()`` is true, because stores
    that a dead producer had queued can still land. Blocks until then; any thread.

    Parameters
    ----------
    fd : int
        The fence's page, as in :attr:`devipc.completion.FenceHandle.fds`; it stays the caller's.
    reason : PoisonReason
        What waiters are told.
    until : callable
        Returns True once nothing of the producer can store any more: for a dead one when its pidfd is readable. What
        it raises reaches the caller.

    Raises
    ------
    HandleError
        When the file is unsealed, too small or no fence page; nothing was stored then.
    """
    validate_memfd(fd, min_nbytes=PAGE_FENCE_NBYTES)
    page = FencePage(fd)
    try:
        page._check_kind()
        page.poison(reason)
        while not until():
            time.sleep(_REPEAT_S)
            page.poison_again()
        page.poison_again()  # what landed before the last answer
    finally:
        page.close()


def _closed() -> ClosedError:
    return ClosedError("the fence is closed", remedy="keep it open while it is used")
