"""Which pages are in host memory, as a table that every client reads by itself: ``match`` without a call.

Owns the layout of the index memory, its one writer, and readers that search it without a lock. What a reader finds is
a hint: it was true a moment ago. It knows neither where pages come from nor who takes them.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from devipc.errors import ClosedError, HandleError, UsageError
from devipc.hicache.keys import KEY_NBYTES
from devipc.hicache.tier import indexwords as layout
from devipc.hicache.tier.indexwords import BUCKET_WORDS, HEADER_WORDS, MARK, SECOND, VALUE, WAYS, checksum, checksums
from devipc.memfd import SharedMap, create_published_memfd, validate_memfd

__all__ = ["Found", "IndexReader", "IndexWriter"]

MAX_ENTRIES = 2**28
ATTEMPTS = 3

_MASK = 2**64 - 1

U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
Keys = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_TWO = np.uint64(2)
_NO_MARK = np.uint64(0)
_FEW = 24  # entries that are not worth an array
_BITS = np.array([number.bit_count() for number in range(2**WAYS)], np.uint8)
_LOWEST = np.array([(number & -number).bit_length() - 1 for number in range(2**WAYS)], np.int64)  # -1 for none


class IndexWriter:
    """The one writer of an index, for one life: its epoch is never used again. Thread-safe.

    Owns the memory and its descriptor. Nobody else can write: the memory is sealed against it.

    Parameters
    ----------
    max_entries : int
        Pages that may be published at once; the table has at least twice as many places.
    """

    def __init__(self, *, max_entries: int) -> None:
        layout.check_machine()
        if not 1 <= max_entries <= MAX_ENTRIES:
            raise UsageError(f"index of {max_entries} entries", remedy=f"ask for 1 .. {MAX_ENTRIES}")
        self.max_entries = max_entries
        self.epoch = secrets.randbits(63) | 1
        buckets = 1 << max(1, (-(-2 * max_entries // WAYS) - 1).bit_length())
        nbytes = 8 * (HEADER_WORDS + buckets * BUCKET_WORDS)
        self._fd, self._map = create_published_memfd("devipc-index", nbytes)
        self._words = self._map.view.cast("Q")
        self._array: U64 = np.frombuffer(self._words, np.uint64)  # the same, to store many at once
        self._bucket_mask = buckets - 1
        self._places: dict[bytes, int] = {}
        self._drafted = 0
        self._free = bytearray([2**WAYS - 1]) * buckets  # a bit a way
        self._free_array = np.frombuffer(self._free, np.uint8)
        self._turn = np.empty(buckets, np.int32)
        self._version = 0
        self._lock = threading.Lock()
        words = self._words
        words[layout.MAGIC_AT], words[layout.VERSION_AT], words[layout.BUCKETS_AT] = (
            layout.MAGIC,
            layout.INDEX_VERSION,
            buckets,
        )
        words[layout.EPOCH_AT] = self.epoch

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._places)

    def fileno(self) -> int:
        """Return the descriptor to send to readers; it stays the writer's."""
        self._check_open()
        return self._fd

    def publish(self, key: bytes, value: int) -> bool:
        """Let readers find ``key``, with 64 bits of the caller's; to be called after the page's last byte is in place.

        False when there is no room: the page is there, but only a lookup by message finds it.
        """
        return self.publish_all((key,), value) == 1

    def publish_all(self, keys: Sequence[bytes], value: int, *, step: int = 1) -> int:
        """Do as :meth:`publish` for several keys, each value ``step`` more than the last; return how many had room."""
        if not 0 <= value <= _MASK - step * max(0, len(keys) - 1):
            raise UsageError(f"value {value} is no unsigned 64-bit number", remedy="pass 0 .. 2**64 - 1")
        if set(map(len, keys)) - {KEY_NBYTES}:
            raise UsageError("a key of another length", code="key", remedy=f"pass {KEY_NBYTES} bytes each")
        with self._lock:
            self._check_open()
            if len(keys) < _FEW or len(set(keys)) < len(keys):
                return sum(self._publish_one(key, value + step * number) for number, key in enumerate(keys))
            halves = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)
            places = np.fromiter(map(self._places.get, keys, repeat(-1)), np.int64, len(keys))
            new = np.flatnonzero(places < 0)
            taken = places[new] = self._take(halves[new])
            found = zip(new.tolist(), taken.tolist(), strict=True)
            self._places.update((keys[at], place) for at, place in found if place >= 0)
            placed = np.flatnonzero(places >= 0)
            self._write(places[placed], halves[placed], placed.astype(np.uint64) * np.uint64(step) + np.uint64(value))
        return len(placed)

    def _publish_one(self, key: bytes, value: int) -> bool:
        first, second = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
        place = self._places.get(key, -1)
        if place < 0 and len(self._places) + self._drafted < self.max_entries:
            place = self._way(first, second)
        if place < 0:
            return False
        self._places[key] = place
        self._version = version = self._version % 0xFFFFFFFF + 1
        words = self._words
        words[place + MARK] = 0
        words[place] = first
        words[place + SECOND] = second
        words[place + VALUE] = value
        words[place + MARK] = checksum(first, second, value, version, self.epoch) << 32 | version
        return True

    def _write(self, places: I64, halves: U64, values: U64) -> None:
        """Write entries, each so that a reader sees all of it or nothing: one numpy call follows the other, in order.

        A store of a whole array stores each aligned word at once.
        """
        marks = self._marks(halves, values)
        words = self._array
        words[places + MARK] = 0
        words[places] = halves[:, 0]
        words[places + SECOND] = halves[:, 1]
        words[places + VALUE] = values
        words[places + MARK] = marks

    def _marks(self, halves: U64, values: U64) -> U64:
        """Return a new mark for each entry."""
        # Never used twice while a reader looks: it would have to sleep over 2**32 publications in one search.
        versions = (np.arange(len(values), dtype=np.uint64) + np.uint64(self._version)) % np.uint64(0xFFFFFFFF)
        versions += np.uint64(1)
        self._version = (self._version + len(values) - 1) % 0xFFFFFFFF + 1 if len(values) else self._version
        return checksums(halves[:, 0], halves[:, 1], values, versions, np.uint64(self.epoch)) << _32 | versions

    def draft(self, keys: Sequence[bytes], value: int) -> layout.Draft:
        """Do what can be done before the pages are there: entries that nobody finds until :meth:`publish_draft`.

        The keys are distinct, and not published; all have one value. Keys for which there is no room have no entry. A
        draft is published or dropped, once.
        """
        with self._lock:
            self._check_open()
            halves = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)
            places = self._take(halves)
            values = np.full(len(keys), value, np.uint64)
            if (places < 0).any():
                placed = np.flatnonzero(places >= 0)
                keys, halves = [keys[at] for at in placed.tolist()], halves[placed]
                places, values = places[placed], values[placed]
            marks = self._marks(halves, values)
            self._array[places + SECOND] = halves[:, 1]
            self._array[places + VALUE] = values
            self._drafted += len(places)
        return layout.Draft(dict(zip(keys, places.tolist(), strict=True)), places, halves[:, 0].copy(), marks)

    def publish_draft(self, draft: layout.Draft) -> None:
        """Let readers find a draft, whose keys nobody published meanwhile. :meth:`keep_draft` follows it."""
        with self._lock:
            self._check_open()
            self._array[draft.places] = draft.first
            self._array[draft.places + MARK] = draft.marks

    def keep_draft(self, draft: layout.Draft) -> None:
        """Enter what was published as a draft: what can wait until nobody does."""
        with self._lock:
            self._places.update(draft.entries)
            self._drafted -= len(draft.places)

    def drop_draft(self, draft: layout.Draft) -> None:
        """Give the room of a draft back."""
        with self._lock:
            self._drafted -= len(draft.places)
            self._give_back(draft.places)

    def evict(self, key: bytes) -> bool:
        """Let no search that begins after the return find ``key``; to be called before the page's memory is reused.

        False when the key was not published.
        """
        return self.evict_all((key,)) == 1

    def evict_all(self, keys: Sequence[bytes]) -> int:
        """Do as :meth:`evict` for several keys; return how many were published."""
        with self._lock:
            self._check_open()
            if len(keys) < _FEW:
                return sum(map(self._evict_one, keys))
            places = np.fromiter(map(self._places.pop, keys, repeat(-1)), np.int64, len(keys))
            places = places[places >= 0]
            self._array[places + MARK] = 0
            self._array[places] = 0
            self._give_back(places)
        return len(places)

    def _give_back(self, places: I64) -> None:
        buckets, ways = np.divmod(places - HEADER_WORDS, BUCKET_WORDS)
        np.bitwise_or.at(self._free_array, buckets, (1 << ways).astype(np.uint8))

    def _evict_one(self, key: bytes) -> bool:
        place = self._places.pop(key, None)
        if place is None:
            return False
        self._words[place + MARK] = 0
        self._words[place] = 0
        bucket, way = divmod(place - HEADER_WORDS, BUCKET_WORDS)
        self._free[bucket] |= 1 << way
        return True

    def close(self) -> None:
        """Let all readers miss from now on, and give the memory back. Calling it again does nothing."""
        with self._lock:
            if self._map.closed:
                return
            self._words[layout.EPOCH_AT] = 0
            self._array = np.empty(0, np.uint64)
            self._words.release()
            self._map.close()
            os.close(self._fd)

    def _check_open(self) -> None:
        if self._map.closed:
            raise ClosedError("the index is closed", remedy="make a new one; readers get its epoch and descriptor")

    def _way(self, first: int, second: int) -> int:
        """Reserve a way in the emptier of a key's two buckets; -1 where both are full."""
        bucket, other = first & self._bucket_mask, second & self._bucket_mask
        if self._free[other].bit_count() > self._free[bucket].bit_count():
            bucket = other
        free = self._free[bucket]
        if not free:
            return -1
        self._free[bucket] = free & (free - 1)
        return HEADER_WORDS + bucket * BUCKET_WORDS + (free & -free).bit_length() - 1

    def _take(self, halves: U64) -> I64:
        """Reserve a way for each of many keys, as far as the index has room; -1 where there is none."""
        taken = np.full(len(halves), -1, np.int64)
        both = (halves & np.uint64(self._bucket_mask)).astype(np.int64)
        left = np.arange(min(len(halves), self.max_entries - len(self._places) - self._drafted))
        while len(left) > _FEW:
            free = self._free_array[both[left]]
            other = _BITS[free[:, 1]] > _BITS[free[:, 0]]
            bucket = np.where(other, both[left, 1], both[left, 0])
            ways = np.where(other, free[:, 1], free[:, 0])
            self._turn[bucket] = left
            turn = self._turn[bucket] == left  # one way a bucket at a time
            taken[left[turn]] = HEADER_WORDS + bucket[turn] * BUCKET_WORDS + _LOWEST[ways[turn]]
            self._free_array[bucket[turn]] = ways[turn] & (ways[turn] - 1)
            left = left[~turn & (ways != 0)]
        for at, (first, second) in zip(left.tolist(), halves[left].tolist(), strict=True):
            taken[at] = self._way(first, second)
        taken[taken < HEADER_WORDS] = -1  # where there was no way
        return taken


class Found(NamedTuple):
    """Result of a search: which keys were found (bool), and their values (uint64, 0 where not), ``(n,)`` each."""

    hit: Mask
    value: U64


class IndexReader:
    """Searches an index that another process writes. Never blocks it, and never waits for it.

    Parameters
    ----------
    fd : int
        Descriptor of the index; it stays the caller's and may be closed afterwards.
    epoch : int
        The writer's, as told when the descriptor came. An index of another epoch is all misses.

    Raises
    ------
    HandleError
        When the memory is not sealed against a change of its size, or is no index of this version.
    CapabilityError
        On a machine whose memory order does not allow it.
    """

    def __init__(self, fd: int, *, epoch: int) -> None:
        layout.check_machine()
        nbytes = validate_memfd(fd, min_nbytes=8 * (HEADER_WORDS + BUCKET_WORDS))
        self._map = SharedMap(fd, nbytes, writable=False)
        words = np.frombuffer(self._map.view, np.uint64, nbytes // 8)
        magic, version, _, buckets = words[:4].tolist()
        whole = nbytes == 8 * (HEADER_WORDS + buckets * BUCKET_WORDS)
        if magic != layout.MAGIC or version != layout.INDEX_VERSION or buckets & (buckets - 1) or not whole:
            self._map.close()
            raise HandleError(
                f"memory of {nbytes} bytes is no index of version {layout.INDEX_VERSION}",
                code="index",
                remedy="run the same devipc version on both sides",
            )
        self._words: U64 | None = words
        self._lines = words[HEADER_WORDS:].reshape(buckets * 4, WAYS)
        self._bucket_mask = np.uint64(buckets - 1)
        self._epoch = np.uint64(epoch)
        self._expired = not epoch

    def __enter__(self) -> IndexReader:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def expire(self) -> None:
        """Miss everything from now on: the writer is dying or was replaced. Any thread may call it."""
        self._expired = True

    def close(self) -> None:
        """Unmap. Not to be called while another thread searches; calling it again does nothing."""
        self._expired = True
        self._words = None
        self._lines = np.empty((0, WAYS), np.uint64)
        self._map.close()

    def find(self, keys: Keys) -> Found:
        """Search for all ``keys`` at once.

        A hit is an entry that was whole and published at one instant during the call. An entry that changes under
        every attempt is a miss.

        Parameters
        ----------
        keys : numpy.ndarray
            uint8 ``(n, 16)``.
        """
        if keys.ndim != 2 or keys.shape[1] != KEY_NBYTES or keys.dtype != np.uint8:
            raise UsageError(f"keys {keys.dtype} of shape {keys.shape}", code="key", remedy="pass uint8 (n, 16)")
        found = Found(np.zeros(len(keys), np.bool_), np.zeros(len(keys), np.uint64))
        words = self._words
        if self._expired or words is None or words[layout.EPOCH_AT] != self._epoch:
            return found
        halves = np.ascontiguousarray(keys).view(np.uint64)
        unsettled = self._search(words, halves, None, found)
        for _ in range(ATTEMPTS - 1):
            if not len(unsettled):
                break
            unsettled = self._search(words, halves[unsettled], unsettled, found)
        return found

    def match(self, keys: Keys) -> int:
        """Return how many of ``keys``, from the first on without a gap, are there."""
        missing = np.flatnonzero(~self.find(keys).hit)
        return int(missing[0]) if len(missing) else len(keys)

    def _search(
        self, words: U64, halves: U64, numbers: npt.NDArray[np.int64] | None, found: Found
    ) -> npt.NDArray[np.int64]:
        """Look once at every key of ``halves``; enter hits, and return the numbers of those to look at again."""
        lines = (halves & self._bucket_mask) << _TWO  # the two buckets' lines of first halves
        equal = (self._lines.take(lines, axis=0) == halves[:, :1, None]).reshape(len(halves), 2 * WAYS)
        at = equal.argmax(axis=1)
        number = np.flatnonzero(equal[np.arange(len(halves)), at])
        if not len(number):
            return number
        at = at[number]
        place = lines[number, at // WAYS].astype(np.int64) * WAYS + at % WAYS + HEADER_WORDS
        # In this order: a mark that is the same before and after stands for what was read in between.
        mark = words.take(place + MARK)
        first, second, value = words.take(place), words.take(place + SECOND), words.take(place + VALUE)
        stable = (words.take(place + MARK) == mark) & (mark != _NO_MARK)
        stable &= checksums(first, second, value, mark & _LOW, self._epoch) == mark >> _32
        stable &= first == halves[number, 0]
        number, hit = number if numbers is None else numbers[number], stable & (second == halves[number, 1])
        found.hit[number[hit]] = True
        found.value[number[hit]] = value[hit]
        again: npt.NDArray[np.int64] = number[~stable]
        return again
