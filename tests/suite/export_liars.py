"""Backends that lie once about exports, descriptions, identity or answers."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from devipc.errors import CapabilityError
from devipc.host.backend import HostDevice
from devipc.spi import (
    AllocationInfo,
    Backend,
    Capability,
    DeviceInfo,
    ExportedExtent,
    HandleKind,
    Verdict,
)
from tests.suite.lying import LIARS, Disguise, LyingBackend, caught_by

__all__ = ["LIARS"]


# --- exporting and describing ---------------------------------------------------------------------------------------


@caught_by("OFF-038")
def wrong_offset() -> Backend:
    class Memory(Disguise):
        """Ships the base of the allocation for an address inside of it."""

        def export(self, ptr: int, nbytes: int, **options: Any) -> ExportedExtent:
            extent = self.inner.export(ptr, nbytes, **options)
            chunks = (dataclasses.replace(extent.chunks[0], offset=0), *extent.chunks[1:])
            return ExportedExtent(extent.kind, chunks, extent.fds)

    return LyingBackend(memory=Memory)


@caught_by("MEM-016")
def exports_freed_memory() -> Backend:
    class Memory(Disguise):
        """Exports something for a pointer that it does not know."""

        def export(self, ptr: int, nbytes: int, **options: Any) -> Any:
            try:
                return self.inner.export(ptr, nbytes, **options)
            except CapabilityError:
                spare = self.inner.allocate(nbytes)
                try:
                    return self.inner.export(spare.ptr, nbytes)
                finally:
                    self.inner.free(spare)

    return LyingBackend(memory=Memory)


@caught_by("MEM-017")
def export_bounds_unchecked() -> Backend:
    class Memory(Disguise):
        """Exports what there is of a range that leaves its allocation."""

        def export(self, ptr: int, nbytes: int, **options: Any) -> Any:
            info = self.inner.describe(ptr)
            return self.inner.export(
                ptr, min(nbytes, info.base + info.nbytes - ptr) if info.nbytes else nbytes, **options
            )

    return LyingBackend(memory=Memory)


@caught_by("MEM-019")
def exports_imported_memory() -> Backend:
    class Memory(Disguise):
        """Exports a copy of an imported mapping."""

        def export(self, ptr: int, nbytes: int, **options: Any) -> Any:
            try:
                return self.inner.export(ptr, nbytes, **options)
            except CapabilityError:
                spare = self.inner.allocate(nbytes)
                return self.inner.export(spare.ptr, nbytes)

    return LyingBackend(memory=Memory)


@caught_by("MEM-030")
def ignores_the_kind() -> Backend:
    class Memory(Disguise):
        """Exports as its own kind, whatever was asked for."""

        def export(self, ptr: int, nbytes: int, **options: Any) -> Any:
            return self.inner.export(ptr, nbytes)

    return LyingBackend(memory=Memory)


@caught_by("MEM-203")
def describe_lies() -> Backend:
    class Memory(Disguise):
        """Describes allocations as a page larger than they are."""

        def describe(self, ptr: int) -> AllocationInfo:
            info: AllocationInfo = self.inner.describe(ptr)
            return dataclasses.replace(info, nbytes=info.nbytes + 4096) if info.nbytes else info

    return LyingBackend(memory=Memory)


@caught_by("MEM-015")
def ids_are_used_again() -> Backend:
    class Memory(Disguise):
        """Gives every allocation the same id."""

        def describe(self, ptr: int) -> AllocationInfo:
            info: AllocationInfo = self.inner.describe(ptr)
            return dataclasses.replace(info, allocation_id=1)

    return LyingBackend(memory=Memory)


@caught_by("MEM-209")
def zero_is_ignored() -> Backend:
    class Memory(Disguise):
        """Leaves an earlier owner's bytes where zeros were asked for."""

        def allocate(self, nbytes: int, **options: Any) -> Any:
            allocation = self.inner.allocate(nbytes, **options)
            ctypes.memmove(allocation.ptr, b"secret!!" * (allocation.nbytes // 8), allocation.nbytes)
            return allocation

    return LyingBackend(memory=Memory)


@caught_by("MEM-011")
def promises_a_kind() -> Backend:
    class Memory(Disguise):
        """Says yes to a kind that it cannot allocate."""

        def kinds(self) -> Mapping[HandleKind, Capability]:
            return {**self.inner.kinds(), HandleKind.LEGACY: Capability.yes("of course")}

    return LyingBackend(memory=Memory)


# --- identity and answers -------------------------------------------------------------------------------------------


@caught_by("DISC-004")
def identity_of_its_own() -> Backend:
    own = f"host-{uuid.uuid4().hex}"

    class Renaming(LyingBackend):
        """Names the device anew in every process."""

        def devices(self) -> Sequence[DeviceInfo]:
            return [dataclasses.replace(info, uuid=own) for info in super().devices()]

        def open_device(self, uuid: str | None = None) -> HostDevice:
            return super().open_device(None)

    return Renaming()


@caught_by("DISC-007")
def no_without_a_reason() -> Backend:
    class Memory(Disguise):
        """Says no to a kind and does not say why."""

        def kinds(self) -> Mapping[HandleKind, Capability]:
            return {**self.inner.kinds(), HandleKind.FABRIC: Capability(Verdict.NO)}

    return LyingBackend(memory=Memory)


@caught_by("DISC-008")
def listing_leaks() -> Backend:
    class Leaking(LyingBackend):
        """Keeps a descriptor for each listing."""

        def devices(self) -> Sequence[DeviceInfo]:
            os.dup(2)
            return super().devices()

    return Leaking()
