"""Backends that lie once about the shape of memory: kinds, sizes, chunks and descriptors."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from devipc.errors import HandleError, UsageError
from devipc.spi import Allocation, AllocationInfo, Backend, ExportedExtent, HandleKind, MemoryKind
from tests.suite.lying import LIARS, Disguise, LyingBackend, caught_by

__all__ = ["LIARS"]

PAGE = 4096


@caught_by("MEM-027")
def exports_another_kind() -> Backend:
    class Memory(Disguise):
        """Calls its exports by another kind."""

        def export(self, ptr: int, nbytes: int, **options: Any) -> Any:
            extent = self.inner.export(ptr, nbytes, **options)
            return ExportedExtent(HandleKind.VMM_FD, extent.chunks, extent.fds)

        def open(self, extent: ExportedExtent) -> Any:
            if extent.kind is not HandleKind.VMM_FD:
                raise HandleError("another kind", remedy="export again")
            return self.inner.open(ExportedExtent(HandleKind.MEMFD, extent.chunks, extent.fds))

    return LyingBackend(memory=Memory)


@caught_by("MEM-029")
def chunks_out_of_order() -> Backend:
    class Memory(Disguise):
        """Maps the chunks of a grown range in another order."""

        def open(self, extent: ExportedExtent) -> Any:
            return self.inner.open(ExportedExtent(extent.kind, extent.chunks[::-1], extent.fds[::-1]))

    return LyingBackend(memory=Memory)


@caught_by("OFF-202")
def grown_ranges_are_exported_whole() -> Backend:
    class Memory(Disguise):
        """Exports all blocks of a range for a part of it, and opens the first bytes."""

        def export(self, ptr: int, nbytes: int, **options: Any) -> Any:
            info = self.inner.describe(ptr)
            return self.inner.export(info.base, info.nbytes, **options)

    return LyingBackend(memory=Memory)


@caught_by("OFF-043", options=("--devipc-large",))
def offsets_of_32_bits() -> Backend:
    class Memory(Disguise):
        """Keeps 32 bits of an offset."""

        def open(self, extent: ExportedExtent) -> Any:
            chunks = tuple(dataclasses.replace(chunk, offset=chunk.offset & 0xFFFFFFFF) for chunk in extent.chunks)
            return self.inner.open(ExportedExtent(extent.kind, chunks, extent.fds))

    return LyingBackend(memory=Memory)


@caught_by("OFF-045")
def packs_allocations() -> Backend:
    class Memory(Disguise):
        """Hands out a page of a larger block, and exports the block."""

        def allocate(self, nbytes: int, **options: Any) -> Any:
            made = self.inner.allocate(max(nbytes, 1) + 2 * PAGE if nbytes > 0 else nbytes, **options)
            return Allocation(made.ptr, made.nbytes - 2 * PAGE, made.kind, made.token)

    return LyingBackend(memory=Memory)


@caught_by("OFF-201")
def one_mapping_for_a_whole_block() -> Backend:
    class Memory(Disguise):
        """Maps the beginning of a block, wherever the shared range lies in it."""

        def open(self, extent: ExportedExtent) -> Any:
            chunks = (dataclasses.replace(extent.chunks[0], offset=0), *extent.chunks[1:])
            return self.inner.open(ExportedExtent(extent.kind, chunks, extent.fds))

    return LyingBackend(memory=Memory)


@caught_by("MEM-204")
def allocates_nothing() -> Backend:
    class Memory(Disguise):
        """Rounds an allocation of nothing up to a page."""

        def allocate(self, nbytes: int, **options: Any) -> Any:
            return self.inner.allocate(max(nbytes, 1), **options)

    return LyingBackend(memory=Memory)


@caught_by("MEM-206")
def passes_over_descriptors() -> Backend:
    class Memory(Disguise):
        """Takes the descriptors that it needs and passes over the others."""

        def open(self, extent: ExportedExtent) -> Any:
            return self.inner.open(ExportedExtent(extent.kind, extent.chunks, extent.fds[: len(extent.chunks)]))

    return LyingBackend(memory=Memory)


@caught_by("MEM-100")
def descriptors_survive_exec() -> Backend:
    class Memory(Disguise):
        """Lets children inherit the descriptors of its exports."""

        def export(self, ptr: int, nbytes: int, **options: Any) -> Any:
            extent = self.inner.export(ptr, nbytes, **options)
            for fd in extent.fds:
                os.set_inheritable(fd, True)
            return extent

    return LyingBackend(memory=Memory)


@caught_by("MEM-101", "MEM-013")
def exports_share_descriptors() -> Backend:
    class Memory(Disguise):
        """Returns the first export of a range again."""

        def export(self, ptr: int, nbytes: int, **options: Any) -> Any:
            known = self.__dict__.setdefault("known", {})
            if (ptr, nbytes) not in known:
                known[ptr, nbytes] = self.inner.export(ptr, nbytes, **options)
            return known[ptr, nbytes]

        def release(self, extent: ExportedExtent) -> None:
            known = self.__dict__.setdefault("known", {})
            for key, value in list(known.items()):
                if value is extent:
                    del known[key]
            self.inner.release(extent)

    return LyingBackend(memory=Memory)


@caught_by("MEM-210")
def promises_more_than_there_is() -> Backend:
    class Memory(Disguise):
        """Allocates a little where much was asked for."""

        def allocate(self, nbytes: int, **options: Any) -> Any:
            made = self.inner.allocate(min(nbytes, 1 << 30), **options)
            return Allocation(made.ptr, max(nbytes, made.nbytes), made.kind, made.token)

    return LyingBackend(memory=Memory)


@caught_by("MEM-211")
def gives_memory_twice() -> Backend:
    class Memory(Disguise):
        """Hands out the same small block until it is freed."""

        def allocate(self, nbytes: int, **options: Any) -> Any:
            known = self.__dict__.setdefault("known", [])
            if 0 < nbytes <= PAGE and known:
                self.__dict__["users"] = self.__dict__.get("users", 0) + 1
                return known[0]
            made = self.inner.allocate(nbytes, **options)
            if 0 < nbytes <= PAGE:
                known.append(made)
            return made

        def free(self, allocation: Allocation) -> None:
            known = self.__dict__.setdefault("known", [])
            if allocation in known and self.__dict__.get("users", 0):
                self.__dict__["users"] -= 1
                return
            if allocation in known:
                known.remove(allocation)
            self.inner.free(allocation)

    return LyingBackend(memory=Memory)


@caught_by("MEM-212")
def calls_mappings_its_own() -> Backend:
    class Memory(Disguise):
        """Describes an imported mapping as memory of this process."""

        def describe(self, ptr: int) -> AllocationInfo:
            info: AllocationInfo = self.inner.describe(ptr)
            if info.kind is MemoryKind.IMPORTED:
                return dataclasses.replace(info, kind=MemoryKind.DEVICE, exportable=(HandleKind.MEMFD,), reason="")
            return info

    return LyingBackend(memory=Memory)


@caught_by("MEM-213")
def best_kind_is_another() -> Backend:
    class Memory(Disguise):
        """Says another kind than it allocates when none was asked for."""

        def allocate(self, nbytes: int, *, kind: HandleKind | None = None, zero: bool = False) -> Any:
            made = self.inner.allocate(nbytes, kind=kind, zero=zero)
            return made if kind else dataclasses.replace(made, kind=HandleKind.DMABUF)

    return LyingBackend(memory=Memory)


@caught_by("MEM-018")
def calls_host_memory_its_own() -> Backend:
    class Memory(Disguise):
        """Exports a copy of registered host memory."""

        def export(self, ptr: int, nbytes: int, **options: Any) -> Any:
            if self.inner.describe(ptr).kind is not MemoryKind.HOST:
                return self.inner.export(ptr, nbytes, **options)
            spare = self.inner.allocate(nbytes)
            return self.inner.export(spare.ptr, nbytes)

    return LyingBackend(memory=Memory)


@caught_by("OFF-039")
def last_byte_is_not_exported() -> Backend:
    class Memory(Disguise):
        """Refuses a range that ends with its allocation and is smaller than a page."""

        def export(self, ptr: int, nbytes: int, **options: Any) -> Any:
            info = self.inner.describe(ptr)
            if info.nbytes and nbytes == 1 and ptr == info.base + info.nbytes - 1:
                raise UsageError("the end of an allocation", remedy="share whole pages")
            return self.inner.export(ptr, nbytes, **options)

    return LyingBackend(memory=Memory)
