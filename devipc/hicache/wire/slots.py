"""Words that a client, its supervisor and its engine share: one slot for each operation that is under way.

Owns the layout of the memory and who writes which word. It knows neither how the memory travels nor what an operation
is. The client makes the memory, and chooses a free slot for each operation; the others name it by its number.

Page 0 says magic, version and number of slots, written once. Then come slots of one 64-byte line, of aligned 64-bit
words, each with one writer at a time::

    0 op      client      the operation that uses the slot; 0: none
    1 cancel  client      1: given up. Read behind the last copy, before anything is published
    2 ready   client      0 not yet, 1 reached, 2 never: for a ready point that is no shared fence
    3 base    engine      0 not submitted; else layer group k (from 0) is value base + k of the client's timeline
    4 end     supervisor  0 open, 1 settled, 2 + PoisonReason poisoned. Written last: nobody but the client touches the
                          slot after it, so that the client may clear it for another operation

A peer's word is checked against what it can mean, and never used as an address. Order: as
:mod:`~devipc.hicache.wire.ring` says, which other machines than x86-64 do not promise.
"""

from __future__ import annotations

import enum
import os
import struct

from devipc.errors import BoundsError, ClosedError, HandleError, ProtocolError, UsageError
from devipc.hicache.wire.ring import check_machine
from devipc.memfd import PAGE_NBYTES, SharedMap, create_memfd, round_up, validate_memfd
from devipc.types import PoisonReason

__all__ = ["MAX_SLOTS", "SLOTS_VERSION", "Readiness", "Slots"]

SLOTS_VERSION = 1
"""Version of the memory layout; no other is taken."""
MAX_SLOTS = 64 * 1024
"""Most slots of one client."""

_MAGIC = int.from_bytes(b"dIPCslot", "little")
_HEAD = struct.Struct("<3Q")
_SLOT_WORDS = 8
_FIRST = PAGE_NBYTES // 8
_OP, _CANCEL, _READY, _BASE, _END = range(5)
_SETTLED, _POISONED = 1, 2
_LAST_VALUE = 2**62 - 1


class Readiness(enum.IntEnum):
    """What a client says of a ready point that only it can look at."""

    NOT_YET = 0
    REACHED = 1
    NEVER = 2


class Slots:
    """The words, mapped here. Any thread; nothing blocks. After :meth:`close` everything raises ClosedError.

    Made by :meth:`create` in the client, and by :meth:`open` elsewhere.
    """

    def __init__(self, mapping: SharedMap, count: int, fd: int | None) -> None:
        self.count = count
        self._map = mapping
        self._fd = fd
        self._words = mapping.view.cast("Q")

    @classmethod
    def create(cls, count: int) -> Slots:
        """Make the memory for ``count`` operations at a time.

        Raises
        ------
        CapabilityError
            On a machine whose memory order does not allow it.
        ResourceExhausted
            When memory or descriptors ran out.
        """
        check_machine()
        if not 0 < count <= MAX_SLOTS:
            raise UsageError(f"{count} slots", remedy=f"ask for 1 to {MAX_SLOTS}")
        nbytes = _nbytes(count)
        fd = create_memfd("devipc-slots", nbytes)
        try:
            mapping = SharedMap(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        mapping.view[: _HEAD.size] = _HEAD.pack(_MAGIC, SLOTS_VERSION, count)
        return cls(mapping, count, fd)

    @classmethod
    def open(cls, fd: int) -> Slots:
        """Map what a client made. The descriptor is owned, also when this raises, and closed.

        Raises
        ------
        HandleError
            When it is not such memory: not sealed, another version, or a size that does not fit its number of slots.
        CapabilityError
            On a machine whose memory order does not allow it.
        """
        try:
            check_machine()
            nbytes = validate_memfd(fd, min_nbytes=PAGE_NBYTES)
            mapping = SharedMap(fd, min(nbytes, _nbytes(MAX_SLOTS)))
        finally:
            os.close(fd)
        magic, version, count = _HEAD.unpack_from(mapping.view)
        if (magic, version) != (_MAGIC, SLOTS_VERSION) or not 0 < count <= MAX_SLOTS or nbytes != _nbytes(count):
            mapping.close()
            raise HandleError(
                f"memory of {nbytes} bytes is no set of slots of version {SLOTS_VERSION}",
                code="slots",
                remedy="run the same devipc version on both sides",
            )
        return cls(mapping, count, None)

    def fileno(self) -> int:
        """Return the descriptor to send; it stays this object's. Only where it was made."""
        if self._fd is None:
            raise ClosedError("the slots are closed, or were not made here", remedy="send those that the client made")
        return self._fd

    def check(self, slot: int) -> int:
        """Return ``slot`` when there is one of that number, else raise BoundsError."""
        if not 0 <= slot < self.count:
            raise BoundsError(f"slot {slot} of {self.count}", code="slot", remedy="name a slot that the client shares")
        return slot

    # --- the client's words ---

    def begin(self, slot: int, op: int) -> None:
        """Clear a slot for operation ``op``. Client; only when the slot is new, or its last operation has an end."""
        for word in (_CANCEL, _READY, _BASE, _END):
            self._store(slot, word, 0)
        self._store(slot, _OP, op)

    def op(self, slot: int) -> int:
        """Return the operation that uses a slot; 0: none."""
        return self._load(slot, _OP)

    def cancel(self, slot: int) -> None:
        """Give the operation up. Client; before it uses the pages again."""
        self._store(slot, _CANCEL, 1)

    def cancelled(self, slot: int) -> bool:
        """Return True once the client gave up."""
        return self._load(slot, _CANCEL) != 0

    def say_ready(self, slot: int, readiness: Readiness) -> None:
        """Say what became of the ready point. Client."""
        self._store(slot, _READY, readiness)

    def readiness(self, slot: int) -> Readiness:
        """Return what the client says of the ready point; nonsense is ``NEVER``."""
        word = self._load(slot, _READY)
        return Readiness(word) if word <= Readiness.NEVER else Readiness.NEVER

    # --- the engine's word ---

    def submit(self, slot: int, base: int) -> None:
        """Say that the copies are on the stream, and which value is reached behind the first group. Engine."""
        self._store(slot, _BASE, base)

    def base(self, slot: int) -> int:
        """Return the value behind the first layer group; 0 while nothing was submitted.

        Raises
        ------
        ProtocolError
            When it is no value of a fence.
        """
        word = self._load(slot, _BASE)
        if word > _LAST_VALUE:
            raise ProtocolError(f"slot {slot}: value {word}", code="slot", remedy="close the connection")
        return word

    # --- the supervisor's word ---

    def settle(self, slot: int) -> None:
        """End it: every copy was seen complete. Supervisor; the last thing it does with the slot."""
        self._store(slot, _END, _SETTLED)

    def poison(self, slot: int, reason: PoisonReason) -> None:
        """End it: its copies are not, or not all, done. Supervisor; the last thing it does with the slot."""
        self._store(slot, _END, _POISONED + reason)

    def ended(self, slot: int) -> bool:
        """Return True once the supervisor will not touch the slot any more."""
        return self._load(slot, _END) != 0

    def poisoned(self, slot: int) -> PoisonReason | None:
        """Return why it was poisoned; None while it is open, and when it was settled. Nonsense is ``PROTOCOL``."""
        word = self._load(slot, _END)
        if word in (0, _SETTLED):
            return None
        try:
            return PoisonReason(word - _POISONED)
        except ValueError:
            return PoisonReason.PROTOCOL

    def _load(self, slot: int, word: int) -> int:
        try:
            return self._words[_FIRST + self.check(slot) * _SLOT_WORDS + word]
        except ValueError as error:  # released
            raise _closed() from error

    def _store(self, slot: int, word: int, value: int) -> None:
        try:
            self._words[_FIRST + self.check(slot) * _SLOT_WORDS + word] = value
        except ValueError as error:
            raise _closed() from error

    def close(self) -> None:
        """Unmap. Calling it again does nothing."""
        if self._map.closed:
            return
        self._words.release()  # whoever comes from now on gets an error, and touches nothing
        self._map.close()
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def _nbytes(count: int) -> int:
    return PAGE_NBYTES + round_up(count * _SLOT_WORDS * 8, PAGE_NBYTES)


def _closed() -> ClosedError:
    return ClosedError("the slots are closed", remedy="attach again")
