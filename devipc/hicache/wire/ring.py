"""A ring of small entries in shared memory, from one process to another: the fast path beside messages.

Owns the layout of the memory, who writes which word, and the refusal of whatever a peer may have put there. It knows
neither what an entry means nor how descriptors travel. Two rings, one each way, make a connection.

Page 0 holds one word in each of its first 64-byte lines, then come the slots::

    0 magic, version, slots, slot bytes  written once      1 tail    entries published    producer
    2 head    entries taken              consumer          3 nap     0, or a sleep        consumer
    4 nap     0, or a sleep              producer          5 closed                       producer
    6 closed                             consumer
    slot: crc32 u32 | nbytes u32  sequence u64  place u64 | payload, or nothing where the arena holds it

Each side counts for itself, and never computes an address from a word of the other's. The consumer copies a slot, then
checks the copy. A slot is free again as soon as it was copied, whatever becomes of the copy.

Order: stores of x86-64 become visible in program order, and aligned 64-bit words of CPython's do not tear there, so
whoever sees the tail sees the slot. One store that must not be passed by a later load (a nap, then the tail; the tail,
then a nap) has a lock's atomic instruction behind it. Other machines are refused. A kick that gets lost all the same
costs the interval of a re-check, never more.
"""

from __future__ import annotations

import os
import platform
import socket
import struct
import time
import zlib
from collections import deque
from collections.abc import Sequence

from devipc.channel.arena import Arena, ArenaReader
from devipc.deadline import deadline_after
from devipc.errors import (
    CapabilityError,
    CompletionTimeout,
    HandleError,
    PeerGone,
    ResourceExhausted,
    UsageError,
)
from devipc.hicache.wire.ringend import RECHECK_S, RingEnd, adopt_bell, make_bells
from devipc.memfd import PAGE_NBYTES, SharedMap, create_memfd, validate_memfd

__all__ = ["DEFAULT_SPIN_S", "RECHECK_S", "RING_FDS", "RING_VERSION", "Consumer", "Producer", "check_machine"]

RING_VERSION = 1
"""Version of the memory layout; a consumer takes no other."""
RING_FDS = 3
"""Descriptors of a ring, in order: slots, arena, and the consumer's end of the sockets by which both kick."""

DEFAULT_SPIN_S = 50e-6
"""How long a consumer looks before it sleeps. Waking the other of two idle cores cost about 20 us each way (virtual
machine, 2026-11-29), a round trip that nobody slept in about 10 us."""

MAX_SLOTS = 64 * 1024
MAX_SLOT_NBYTES = 64 * 1024
MAX_ARENA_NBYTES = 2**32

_MAGIC = int.from_bytes(b"dIPCring", "little")
_WORDS_PER_LINE = 8
_TAIL, _HEAD, _CONSUMER_NAP, _PRODUCER_NAP, _PRODUCER_CLOSED, _CONSUMER_CLOSED = range(
    _WORDS_PER_LINE, 7 * _WORDS_PER_LINE, _WORDS_PER_LINE
)
_CRC = struct.Struct("<I")
_REST = struct.Struct("<IQQ")  # what the checksum begins with
_SLOT_HEAD = struct.Struct("<IIQQ")
_SLOT_HEAD_NBYTES = _SLOT_HEAD.size
_INLINE = 2**64 - 1
_NEAR_NBYTES = 256  # what is copied of a slot at once: mostly all that is in it


def check_machine() -> None:
    """Raise CapabilityError on a machine whose memory order does not allow words shared like these."""
    if platform.machine() != "x86_64":
        raise CapabilityError(
            f"shared words need x86-64's memory order, this is {platform.machine()}",
            code="memory_order",
            remedy="send messages instead",
        )


class Producer(RingEnd):
    """The writing end; makes the ring, whose descriptors :meth:`fds` are sent to the consumer. Any thread.

    Parameters
    ----------
    slots : int
        Entries that fit, a power of two.
    slot_nbytes : int
        Size of a slot, a multiple of 64; a payload that leaves no room for the slot's head of 24 bytes goes through the
        arena, which costs both sides a system call. A backup of 256 pages has 6 KiB.
    arena_nbytes : int
        Room for large payloads.

    Raises
    ------
    CapabilityError
        On a machine whose memory order does not allow it.
    ResourceExhausted
        When memory or descriptors ran out.
    """

    def __init__(self, *, slots: int = 128, slot_nbytes: int = 8192, arena_nbytes: int = 8 * 1024 * 1024) -> None:
        check_machine()
        if not _is_shape(slots, slot_nbytes) or not 0 < arena_nbytes < MAX_ARENA_NBYTES:
            raise UsageError(
                f"ring of {slots} slots of {slot_nbytes} bytes, arena of {arena_nbytes}",
                remedy=f"ask for a power of two up to {MAX_SLOTS}, and a multiple of 64 bytes up to {MAX_SLOT_NBYTES}",
            )
        self._mask, self._slot_nbytes = slots - 1, slot_nbytes
        self._tail = self._head = 0
        self._lent: deque[tuple[int, int]] = deque()  # sequence and offset of payloads in the arena
        self._arena = Arena(arena_nbytes)
        owned: list[int] = []
        ring: SharedMap | None = None
        bells: tuple[socket.socket, ...] = ()
        try:
            nbytes = PAGE_NBYTES + slots * slot_nbytes
            owned.append(create_memfd("devipc-ring", nbytes))
            ring = SharedMap(owned[0], nbytes)
            ring.view.cast("Q")[:4] = memoryview(struct.pack("<4Q", _MAGIC, RING_VERSION, slots, slot_nbytes)).cast("Q")
            bells = make_bells()
            mine, theirs = bells
            self._theirs = theirs
            super().__init__(ring, mine, owned, my_nap=_PRODUCER_NAP, their_nap=_CONSUMER_NAP)
        except BaseException:
            _give_back(ring, owned, self._arena, bells)
            raise

    def fds(self) -> tuple[int, int, int]:
        """Return the descriptors for the consumer; they stay the producer's."""
        self._check()
        return self._fds[0], self._arena.fd, self._theirs.fileno()

    def close_in_child(self) -> None:
        """Close this process's descriptors."""
        self._theirs.close()
        super().close_in_child()

    def push(self, payload: bytes, /, *, timeout_s: float) -> None:
        """Publish one entry, and wake the consumer if it sleeps. Blocks while the ring is full.

        Raises
        ------
        ResourceExhausted
            With code ``busy`` when there was no room for ``timeout_s`` seconds; nothing was published.
        CompletionTimeout
            When another thread used this end for all of that time; nothing was published.
        UsageError
            When it never fits the arena.
        ProtocolError
            When the consumer's words are nonsense; the ring has ended.
        PeerGone, ClosedError
            When the consumer closed its end, this end was closed, or what :meth:`end` was told.
        """
        deadline = deadline_after(timeout_s)
        mine: list[bool] = []
        try:
            self._enter(deadline, mine)
            while True:
                if self._words[_CONSUMER_CLOSED]:
                    raise _gone("consumer")
                if self._has_room() and self._put(payload):
                    return
                if not self._sleep(deadline):
                    raise ResourceExhausted(
                        f"the ring's {self._mask + 1} slots or its arena stayed full for {timeout_s:g} s",
                        code="busy",
                        remedy="submit less at once; the peer does not keep up, or stands still",
                    )
                self._check()
        finally:
            if mine and mine[0]:
                self._turn.release()

    def _has_room(self) -> bool:
        head = self._words[_HEAD]
        if not self._head <= head <= self._tail:
            self._refuse(f"{head} entries taken, of {self._tail} that were published, after {self._head}")
        self._head = head
        while self._lent and self._lent[0][0] <= head:
            self._arena.release(self._lent.popleft()[1])
        return self._tail - head <= self._mask

    def _awaited(self) -> bool:
        return self._words[_HEAD] != self._head or self._words[_CONSUMER_CLOSED] != 0

    def _put(self, payload: bytes) -> bool:
        """Write an entry; False when the arena has no room now."""
        sequence, place, inline = self._tail + 1, _INLINE, payload
        if len(payload) > self._slot_nbytes - _SLOT_HEAD_NBYTES:
            try:
                place, _ = self._arena.write(payload)
            except ResourceExhausted:
                return False
            # Noted before it is published: a call that breaks off gives the room back once the slot is used again.
            self._lent.append((sequence, place))
            inline = b""
        rest = _REST.pack(len(payload), sequence, place) + inline
        crc = zlib.crc32(rest) if inline is payload else zlib.crc32(payload, zlib.crc32(rest))
        at = PAGE_NBYTES + (self._tail & self._mask) * self._slot_nbytes
        self._bytes[at : at + _CRC.size + len(rest)] = _CRC.pack(crc) + rest
        self._tail = sequence
        self._words[_TAIL] = sequence
        self._kick()
        return True

    def close(self) -> None:
        """Tell the consumer that nothing more comes, and give everything back. Again does nothing."""
        if self._close(_PRODUCER_CLOSED):
            self._arena.close()


class Consumer(RingEnd):
    """The reading end. Any thread.

    Parameters
    ----------
    fds : sequence of int
        The descriptors of :meth:`Producer.fds`; owned, also when this raises.
    limit_nbytes : int
        Size of the largest payload that makes sense; bounds what a peer can make this side allocate.
    spin_s : float
        How long a call looks for an entry before it sleeps: waking an idle core costs more than this. 0 never spins.

    Raises
    ------
    HandleError
        When they are no ring of this version.
    CapabilityError
        On a machine whose memory order does not allow it.
    """

    def __init__(self, fds: Sequence[int], *, limit_nbytes: int, spin_s: float = DEFAULT_SPIN_S) -> None:
        owned = list(fds)
        ring: SharedMap | None = None
        arena: ArenaReader | None = None
        bell: socket.socket | None = None
        try:
            check_machine()
            if len(owned) != RING_FDS:
                raise HandleError(f"{len(owned)} descriptors for a ring of {RING_FDS}", code="fd_count")
            ring, slots, self._slot_nbytes = _open(owned[0])
            self._mask, self._limit_nbytes = slots - 1, limit_nbytes
            self._head = self._seen = 0
            self._spin_s = spin_s
            bell = adopt_bell(owned.pop())
            arena = ArenaReader(owned.pop())
            super().__init__(ring, bell, (), my_nap=_CONSUMER_NAP, their_nap=_PRODUCER_NAP)
        except BaseException:
            _give_back(ring, owned, arena, () if bell is None else (bell,))
            raise
        self._arena = arena
        os.close(owned[0])

    def take(self, *, timeout_s: float, spin: bool = True) -> bytes:
        """Return the payload of the next entry, a private copy. Blocks until there is one.

        Without ``spin`` it sleeps at once: nobody waits for the entry as such, and spinning keeps the interpreter.

        Raises
        ------
        CompletionTimeout
            When none came in time, or another thread used this end for all of it.
        ProtocolError
            When the producer's words or the entry are nonsense; the ring has ended.
        PeerGone, ClosedError
            When the producer closed its end and all was taken, this end was closed, or what :meth:`end` was told.
        """
        deadline, spun = deadline_after(timeout_s), not (spin and self._spin_s)
        mine: list[bool] = []
        try:
            self._enter(deadline, mine)
            while True:
                closed = self._words[_PRODUCER_CLOSED]  # before the tail: nothing comes after it
                if self._published():
                    return self._read()
                if closed:
                    raise _gone("producer")
                if not spun:
                    spun = True
                    self._spin(deadline)
                elif not self._sleep(deadline):
                    raise CompletionTimeout(f"no entry came for {timeout_s:g} s")
                self._check()
        finally:
            if mine and mine[0]:
                self._turn.release()

    @property
    def taken(self) -> int:
        """Entries that were taken so far."""
        return self._head

    def _published(self) -> bool:
        tail = self._words[_TAIL]
        if not self._seen <= tail <= self._head + self._mask + 1:
            self._refuse(f"{tail} entries published, {self._seen} were before, and {self._head} are taken")
        self._seen = tail
        return tail != self._head

    def _spin(self, deadline: float) -> None:
        """Look for a moment before sleeping, without letting go of the interpreter."""
        words, head, until = self._words, self._head, min(time.monotonic() + self._spin_s, deadline)
        while words[_TAIL] == head and time.monotonic() < until:
            os.sched_yield()  # to the peer, where both share a core

    def _awaited(self) -> bool:
        return self._words[_TAIL] != self._head or self._words[_PRODUCER_CLOSED] != 0

    def _read(self) -> bytes:
        at = PAGE_NBYTES + (self._head & self._mask) * self._slot_nbytes
        slot = bytes(self._bytes[at : at + min(self._slot_nbytes, _NEAR_NBYTES)])  # checked in this copy alone
        try:
            return self._checked(slot, at)
        finally:
            self._head += 1
            self._words[_HEAD] = self._head
            self._kick()

    def _checked(self, slot: bytes, at: int) -> bytes:
        crc, nbytes, sequence, place = _SLOT_HEAD.unpack_from(slot)
        if sequence != self._head + 1:
            self._refuse(f"entry {sequence} where {self._head + 1} belongs")
        if nbytes > self._limit_nbytes:
            self._refuse(f"an entry of {nbytes} bytes, at most {self._limit_nbytes} make sense")
        if place == _INLINE:
            end = _SLOT_HEAD_NBYTES + nbytes
            if end > self._slot_nbytes:
                self._refuse(f"{nbytes} bytes in a slot of {self._slot_nbytes}")
            if end <= len(slot):
                payload, computed = slot[_SLOT_HEAD_NBYTES:end], zlib.crc32(memoryview(slot)[_CRC.size : end])
            else:
                payload = bytes(self._bytes[at + _SLOT_HEAD_NBYTES : at + end])  # and in this
                computed = zlib.crc32(payload, zlib.crc32(slot[_CRC.size : _SLOT_HEAD_NBYTES]))
        else:
            try:
                payload = self._arena.snapshot(place, nbytes, limit_nbytes=self._limit_nbytes)
            except HandleError as error:
                self._refuse(error.message)
            computed = zlib.crc32(payload, zlib.crc32(slot[_CRC.size : _SLOT_HEAD_NBYTES]))
        if computed != crc:
            self._refuse(f"entry {sequence} is torn or was changed")
        return payload

    def close(self) -> None:
        """Tell the producer that nothing more is taken, and give everything back. Again does nothing."""
        if self._close(_CONSUMER_CLOSED):
            self._arena.close()


def _is_shape(slots: int, slot_nbytes: int) -> bool:
    fits = 2 <= slots <= MAX_SLOTS and 64 <= slot_nbytes <= MAX_SLOT_NBYTES
    return fits and not slots & (slots - 1) and not slot_nbytes % 64


def _open(fd: int) -> tuple[SharedMap, int, int]:
    """Map a received ring; return it with its number of slots and their size."""
    nbytes = validate_memfd(fd, min_nbytes=PAGE_NBYTES)
    most = PAGE_NBYTES + MAX_SLOTS * MAX_SLOT_NBYTES
    ring = SharedMap(fd, min(nbytes, most))
    magic, version, slots, slot_nbytes = struct.unpack_from("<4Q", ring.view)
    shaped = _is_shape(slots, slot_nbytes) and nbytes == PAGE_NBYTES + slots * slot_nbytes
    if magic != _MAGIC or version != RING_VERSION or not shaped:
        ring.close()
        raise HandleError(
            f"memory of {nbytes} bytes is no ring of version {RING_VERSION}",
            code="ring",
            remedy="run the same devipc version on both sides",
        )
    return ring, slots, slot_nbytes


def _give_back(
    ring: SharedMap | None, fds: Sequence[int], arena: Arena | ArenaReader | None, bells: Sequence[socket.socket]
) -> None:
    if ring is not None:
        ring.close()
    for fd in fds:
        os.close(fd)
    for bell in bells:
        bell.close()
    if arena is not None:
        arena.close()


def _gone(who: str) -> PeerGone:
    return PeerGone(f"the ring's {who} closed its end", code="ring_closed", remedy="connect again when it is back")
