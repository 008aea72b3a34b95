"""Large arrays beside the messages: a sealed memory file per client, written by one side and copied by the other.

Owns where an array lies, and the rule that a reader works on its own copy: what is checked cannot be changed after the
check. It maps nothing, so that no peer can make a read end in a signal; how offsets travel is decided above.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from devipc.channel.datagram import close_all
from devipc.channel.identity import close_in_child
from devipc.errors import BoundsError, ClosedError, ForkError, HandleError, ResourceExhausted, UsageError
from devipc.memfd import create_memfd, round_up, validate_memfd

__all__ = ["Arena", "ArenaReader"]

_ALIGNMENT = 64
MAX_ARENA_NBYTES = 2**40


class Arena:
    """The writer's side: puts arrays into its memory file and takes the room back. Any thread.

    Room is given out as in a ring, so that what is released in about the order of writing never splinters. Room is
    released once the peer has answered; after a call that timed out, keep it until the link is closed, since the peer
    may still read it.

    Parameters
    ----------
    nbytes : int
        Size of the file; the pages are reserved at once.
    """

    def __init__(self, nbytes: int) -> None:
        self._fd = create_memfd("devipc-arena", nbytes)
        self._nbytes = nbytes
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._used: dict[int, int] = {}  # in order of writing: offset to end
        self._next = 0
        close_in_child(self)

    @property
    def fd(self) -> int:
        """The file to send to the reader; stays the arena's."""
        self._check()
        return self._fd

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self._nbytes

    def write(self, data: bytes | bytearray | memoryview) -> tuple[int, int]:
        """Copy ``data`` (any contiguous buffer) into free room and return its offset and length in bytes.

        Raises
        ------
        ResourceExhausted
            When no room is free (retryable once something was released).
        UsageError
            For an empty array, or one that never fits.
        """
        self._check()
        view = memoryview(data).cast("B")
        if not 0 < view.nbytes <= self._nbytes:
            raise UsageError(
                f"array of {view.nbytes} bytes for an arena of {self._nbytes}",
                remedy="make the arena larger, or send parts",
            )
        with self._lock:
            offset = self._find_room(view.nbytes)
            self._used[offset] = offset + view.nbytes
            self._next = round_up(offset + view.nbytes, _ALIGNMENT)
        done = 0
        while done < view.nbytes:
            done += os.pwrite(self._fd, view[done:], offset + done)
        return offset, view.nbytes

    def _find_room(self, nbytes: int) -> int:
        ranges = sorted(self._used.items())
        for start in (self._next, 0):
            for low, high in ranges:
                if high <= start:
                    continue
                if start + nbytes <= low:
                    break
                start = round_up(high, _ALIGNMENT)
            if start + nbytes <= self._nbytes:
                return start
        raise ResourceExhausted(
            f"no room for {nbytes} bytes in an arena of {self._nbytes}: {len(ranges)} arrays are not released",
            code="arena",
            remedy="wait for answers, or make the arena larger",
        )

    def release(self, offset: int) -> None:
        """Take back the room of the array that was written at ``offset``."""
        with self._lock:
            if self._used.pop(offset, None) is None:
                raise UsageError(f"nothing is lent at offset {offset}")

    @contextmanager
    def lend(self, data: bytes | bytearray | memoryview) -> Iterator[tuple[int, int]]:
        """Write ``data`` for the time of a block that ends without an error; after an error the room stays taken."""
        offset, nbytes = self.write(data)
        yield offset, nbytes
        self.release(offset)

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ForkError("this arena belongs to the process that forked")
        if self._fd < 0:
            raise ClosedError("the arena is closed")

    def close(self) -> None:
        """Close the file; a reader's copy lives on. Not while a write is running. Again does nothing."""
        if os.getpid() == self._pid:
            self.close_in_child()

    def close_in_child(self) -> None:
        """Close this process's descriptor."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_all([fd])

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ArenaReader:
    """The reader's side of a peer's arena. Any thread.

    Parameters
    ----------
    fd : int
        A received descriptor; owned, also when this raises.

    Raises
    ------
    HandleError
        When it is no memfd, can change its size, or is absurdly large.
    """

    def __init__(self, fd: int) -> None:
        try:
            self._nbytes = validate_memfd(fd, min_nbytes=1)
            if self._nbytes > MAX_ARENA_NBYTES:
                raise HandleError(f"arena of {self._nbytes} bytes", code="too_large")
        except BaseException:
            close_all([fd])
            raise
        self._fd = fd
        close_in_child(self)

    @property
    def nbytes(self) -> int:
        """Size of the peer's file."""
        return self._nbytes

    def snapshot(self, offset: int, nbytes: int, *, limit_nbytes: int) -> bytes:
        """Return a private copy of an array; check its contents only in this copy.

        Parameters
        ----------
        offset, nbytes : int
            What the peer said, unchecked.
        limit_nbytes : int
            The most that makes sense to the caller; bounds what a peer can make us allocate.

        Raises
        ------
        BoundsError
            When the range is empty, too long or leaves the arena.
        """
        if self._fd < 0:
            raise ClosedError("the arena is closed")
        if nbytes <= 0 or nbytes > limit_nbytes or offset < 0 or offset + nbytes > self._nbytes:
            raise BoundsError(
                f"range of {nbytes} bytes at {offset} in an arena of {self._nbytes}, at most {limit_nbytes} expected",
                remedy="the peer announced a range that it does not share",
            )
        parts = []
        while nbytes:
            part = os.pread(self._fd, nbytes, offset)
            if not part:
                raise BoundsError("the arena ends inside the range", code="truncated")
            parts.append(part)
            offset += len(part)
            nbytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Close the file. Not while a snapshot is being taken. Again does nothing."""
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close this process's descriptor."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_all([fd])

    def __enter__(self) -> ArenaReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
