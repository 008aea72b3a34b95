"""Backends that lie once about opening, closing and freeing memory."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

from devipc.errors import BoundsError, ForkError, HandleError, UsageError
from devipc.host.maps import move
from devipc.spi import (
    Allocation,
    Backend,
    ExportedExtent,
    HandleKind,
    OpenedExtent,
)
from tests.suite.lying import LIARS, Disguise, LyingBackend, caught_by

__all__ = ["LIARS"]


# --- opening --------------------------------------------------------------------------------------------------------


class Replaced(Disguise):
    """Maps memory of its own instead of the peer's."""

    def open(self, extent: ExportedExtent) -> OpenedExtent:
        opened = self.inner.open(extent)
        own = self.inner.allocate(extent.nbytes)
        self.prepare(own, opened)
        return OpenedExtent(own.ptr, extent.nbytes, (own, opened))

    def prepare(self, own: Allocation, opened: OpenedExtent) -> None:
        pass

    def close(self, opened: OpenedExtent) -> None:
        if not isinstance(opened.token, tuple):
            raise UsageError("no mapping")
        own, real = opened.token
        self.inner.close(real)
        self.inner.free(own)


@caught_by("MEM-011", "MEM-035", "STATE-201")
def zero_maps() -> Backend:
    return LyingBackend(memory=Replaced)


@caught_by("MEM-202", "MEM-012", "MEM-024", "MEM-025", "ORD-085", "ORD-086")
def copies_instead_of_sharing() -> Backend:
    class Memory(Replaced):
        """Maps a copy of what the peer's memory holds at that moment."""

        def prepare(self, own: Allocation, opened: OpenedExtent) -> None:
            move(own.ptr, opened.ptr, opened.nbytes)

    return LyingBackend(memory=Memory)


@caught_by("MEM-011")
def short_mapping() -> Backend:
    class Memory(Disguise):
        """Maps a page less than it says."""

        def open(self, extent: ExportedExtent) -> OpenedExtent:
            last = extent.chunks[-1]
            if last.nbytes > 4096:
                chunks = (*extent.chunks[:-1], dataclasses.replace(last, nbytes=last.nbytes - 4096))
                opened = self.inner.open(ExportedExtent(extent.kind, chunks, extent.fds))
                return OpenedExtent(opened.ptr, extent.nbytes, opened.token)
            opened = self.inner.open(extent)
            assert isinstance(opened, OpenedExtent)
            return opened

    return LyingBackend(memory=Memory)


@caught_by("MEM-011")
def leaks_a_descriptor() -> Backend:
    class Memory(Disguise):
        """Keeps a duplicate of every descriptor that it opens."""

        def open(self, extent: ExportedExtent) -> Any:
            for fd in extent.fds:
                os.dup(fd)
            return self.inner.open(extent)

    return LyingBackend(memory=Memory)


@caught_by("MEM-014")
def stale_cache() -> Backend:
    class Memory(Disguise):
        """Remembers mappings by size, and hands out the first one for every later extent of that size."""

        def open(self, extent: ExportedExtent) -> Any:
            known = self.__dict__.setdefault("known", {})
            if extent.nbytes not in known:
                known[extent.nbytes] = self.inner.open(extent)
            return known[extent.nbytes]

        def close(self, opened: OpenedExtent) -> None:
            if self.__dict__.get("known", {}).pop(opened.nbytes, None) is not None:
                self.inner.close(opened)

    return LyingBackend(memory=Memory)


@caught_by("OFF-041")
def chunk_bounds_unchecked() -> Backend:
    class Memory(Disguise):
        """Opens what fits of a chunk that leaves its allocation."""

        def open(self, extent: ExportedExtent) -> Any:
            try:
                return self.inner.open(extent)
            except BoundsError:
                whole = [dataclasses.replace(chunk, offset=0, nbytes=4096) for chunk in extent.chunks]
                opened = self.inner.open(ExportedExtent(extent.kind, tuple(whole), extent.fds))
                return OpenedExtent(opened.ptr, extent.nbytes, opened.token)

    return LyingBackend(memory=Memory)


@caught_by("OFF-042")
def believes_the_exporter() -> Backend:
    class Memory(Disguise):
        """Takes the announced size for the driver's, and maps the last page for what lies behind the end."""

        def open(self, extent: ExportedExtent) -> Any:
            try:
                return self.inner.open(extent)
            except BoundsError:
                size = os.fstat(extent.fds[0]).st_size
                if extent.chunks[0].allocation_nbytes <= size:
                    raise
                fitting = dataclasses.replace(extent.chunks[0], allocation_nbytes=size, offset=size - 4096, nbytes=4096)
                opened = self.inner.open(ExportedExtent(extent.kind, (fitting,), extent.fds))
                return OpenedExtent(opened.ptr, extent.nbytes, opened.token)

    return LyingBackend(memory=Memory)


@caught_by("MEM-021")
def crashes_on_nonsense() -> Backend:
    class Memory(Disguise):
        """Ends the process for a payload that it does not know."""

        def open(self, extent: ExportedExtent) -> Any:
            try:
                return self.inner.open(extent)
            except HandleError:
                os.abort()

    return LyingBackend(memory=Memory)


@caught_by("MEM-020")
def asks_the_driver_first() -> Backend:
    class Memory(Disguise):
        """Calls the driver before it looks at the payload."""

        def open(self, extent: ExportedExtent) -> Any:
            self.inner.describe(4096)
            return self.inner.open(extent)

    return LyingBackend(memory=Memory)


@caught_by("MEM-022")
def refuses_without_a_type() -> Backend:
    class Memory(Disguise):
        """Raises ValueError for a kind that it does not know."""

        def open(self, extent: ExportedExtent) -> Any:
            if extent.kind is not HandleKind.MEMFD:
                raise ValueError(extent.kind)
            return self.inner.open(extent)

    return LyingBackend(memory=Memory)


@caught_by("CRASH-106")
def open_hangs() -> Backend:
    class Memory(Disguise):
        """Needs a running exporter to open a handle: hangs while it is stopped."""

        def open(self, extent: ExportedExtent) -> Any:
            if "T" in [_state_of(pid) for pid in _siblings()]:
                time.sleep(600)
            return self.inner.open(extent)

    return LyingBackend(memory=Memory)


def _siblings() -> list[str]:
    parent = os.getppid()
    with open(f"/proc/{parent}/task/{parent}/children") as children:
        return children.read().split()


def _state_of(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(") ")[2][0]
    except (OSError, IndexError):
        return ""


@caught_by("MEM-207")
def closes_my_descriptors() -> Backend:
    class Memory(Disguise):
        """Closes the caller's descriptors after opening."""

        def open(self, extent: ExportedExtent) -> Any:
            opened = self.inner.open(extent)
            for fd in extent.fds:
                os.close(fd)
            return opened

    return LyingBackend(memory=Memory)


# --- closing and freeing --------------------------------------------------------------------------------------------


@caught_by("LIFE-046")
def close_does_nothing() -> Backend:
    class Memory(Disguise):
        """Keeps every mapping."""

        def close(self, opened: OpenedExtent) -> None:
            pass

    return LyingBackend(memory=Memory)


@caught_by("LIFE-046")
def double_close_hits_another() -> Backend:
    class Memory(Disguise):
        """Counts badly: a second close of one mapping unmaps another."""

        def open(self, extent: ExportedExtent) -> Any:
            opened = self.inner.open(extent)
            self.__dict__.setdefault("live", []).append(opened)
            return opened

        def close(self, opened: OpenedExtent) -> None:
            live = self.__dict__.setdefault("live", [])
            victim = opened if opened in live else live[-1]
            live.remove(victim)
            self.inner.close(victim)

    return LyingBackend(memory=Memory)


@caught_by("LIFE-047")
def first_close_unmaps_all() -> Backend:
    class Memory(Disguise):
        """Gives one mapping to all opens of a file, and unmaps it at the first close."""

        def open(self, extent: ExportedExtent) -> Any:
            known = self.__dict__.setdefault("known", {})
            inode = os.fstat(extent.fds[0]).st_ino
            if inode not in known:
                known[inode] = self.inner.open(extent)
            return known[inode]

        def close(self, opened: OpenedExtent) -> None:
            known = self.__dict__.setdefault("known", {})
            for inode, mapping in list(known.items()):
                if mapping is opened:
                    del known[inode]
                    self.inner.close(opened)

    return LyingBackend(memory=Memory)


@caught_by("MEM-205")
def double_free_accepted() -> Backend:
    class Memory(Disguise):
        """Says nothing when memory is freed again."""

        def free(self, allocation: Allocation) -> None:
            try:
                self.inner.free(allocation)
            except UsageError:
                pass

    return LyingBackend(memory=Memory)


@caught_by("LIFE-113")
def fork_allowed() -> Backend:
    class Memory(Disguise):
        """Pretends to allocate in a forked child."""

        def allocate(self, nbytes: int, **options: Any) -> Any:
            try:
                return self.inner.allocate(nbytes, **options)
            except ForkError:
                return Allocation(4096, nbytes, HandleKind.MEMFD, None)

    return LyingBackend(memory=Memory)


@caught_by("LIFE-055")
def forgets_memory() -> Backend:
    class Memory(Disguise):
        """Frees nothing at every second time."""

        def free(self, allocation: Allocation) -> None:
            count = self.__dict__["count"] = self.__dict__.get("count", 0) + 1
            if count % 2:
                self.inner.free(allocation)

    return LyingBackend(memory=Memory)
