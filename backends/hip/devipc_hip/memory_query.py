"""What a pointer points into: the runtime is asked, never a framework's setting.

Owns classification, the extent of grown ranges, and the words of refusals. Makes and opens nothing. All functions
expect the device to be current.

Sources: the runtime answers some attributes of a pointer and calls others not supported, which ones depends on its
version (ROCm clr, hipPointerGetAttribute), so that an answer that is missing is no answer "no"; a classic handle of
mapped physical memory is made without complaint and breaks the peer's kernel driver (ROCm/clr 265), so that memory is
looked at before it is exported.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from devipc.spi import AllocationInfo, HandleKind, MemoryKind
from devipc_hip import driver, retaining

__all__ = ["REASONS", "Mapping", "inspect", "mapping_at", "mappings_from"]

FD_TYPE = 1
"""hipMemHandleTypePosixFileDescriptor."""

_HOST, _DEVICE, _MANAGED = 1, 2, 3  # hipMemoryType
_fresh_ids = itertools.count(2**63)

_USE_ALLOCATE = "allocate it through devipc (`memory.allocate`)"
REASONS = {
    "unknown": "the runtime does not know this address, which was never allocated or was freed: export live memory",
    "host": f"host memory is not exported by this backend: share a memfd, or {_USE_ALLOCATE}",
    "managed": f"managed memory (hipMallocManaged) has no handles for other processes: {_USE_ALLOCATE}",
    "imported": "the memory belongs to another process and is only mapped here: its owner must export it",
    "vmm": (
        "the mapped memory was created without the file-descriptor handle type: for torch's expandable segments set"
        f" PYTORCH_HIP_ALLOC_CONF=expandable_segments:False; else {_USE_ALLOCATE}"
    ),
    "pool": (
        "the stream-ordered pool was created without the file-descriptor handle type, as the default pool is: for torch"
        f" set PYTORCH_HIP_ALLOC_CONF=backend:native; else {_USE_ALLOCATE}"
    ),
    "device": (
        "the runtime gives no handle for this memory: it is mapped from another process by another library, or the"
        f" platform has no memory IPC; {_USE_ALLOCATE}"
    ),
}
"""Why memory of a kind cannot be exported, and what to change."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """One driver mapping: for grown ranges one of many, side by side."""

    base: int
    nbytes: int

    @property
    def end(self) -> int:
        """First address behind it."""
        return self.base + self.nbytes


def inspect(ptr: int, *, ordinal: int, plain: tuple[HandleKind, ...]) -> AllocationInfo:
    """Return what the runtime says about ``ptr``; unknown pointers are an answer, not an error.

    ``plain`` are the kinds as which memory of ``hipMalloc`` can be exported here.
    """
    memory_type = driver.pointer_attribute("MEMORY_TYPE", ptr) if 0 < ptr < 2**64 else None
    if memory_type is None:
        return AllocationInfo(ptr, 0, MemoryKind.UNKNOWN, 0, (), REASONS["unknown"])
    if memory_type == _MANAGED or driver.pointer_attribute("IS_MANAGED", ptr):
        return _plain(ptr, MemoryKind.MANAGED, "managed")
    if memory_type == _HOST:
        return _plain(ptr, MemoryKind.HOST, "host")
    if memory_type != _DEVICE:
        return AllocationInfo(ptr, 0, MemoryKind.UNKNOWN, 0, (), f"memory of the runtime's type {memory_type}")
    found = _inspect_device(ptr, plain, ordinal=ordinal)
    owner = driver.pointer_attribute("DEVICE_ORDINAL", ptr)
    if owner not in (None, ordinal):
        reason = f"the memory is on device {owner} of this process, not on device {ordinal}: open that device"
        return AllocationInfo(found.base, found.nbytes, found.kind, found.allocation_id, (), reason)
    return found


def _inspect_device(ptr: int, plain: tuple[HandleKind, ...], *, ordinal: int) -> AllocationInfo:
    allowed = driver.pointer_attribute("ALLOWED_HANDLE_TYPES", ptr)
    by_fd = allowed is None or bool(allowed & FD_TYPE)
    if driver.pointer_attribute("MEMPOOL_HANDLE", ptr):
        return _plain(ptr, MemoryKind.POOL, "pool", (HandleKind.POOL,) if by_fd else ())
    if retaining.is_mapped(ptr, ordinal=ordinal):
        return _inspect_vmm(ptr, exportable=(HandleKind.VMM_FD,) if by_fd else ())
    capable = driver.pointer_attribute("IS_LEGACY_HIP_IPC_CAPABLE", ptr)
    return _plain(ptr, MemoryKind.DEVICE, "device", () if capable == 0 else plain)


def _plain(ptr: int, kind: MemoryKind, reason: str, exportable: tuple[HandleKind, ...] = ()) -> AllocationInfo:
    found = mapping_at(ptr) or Mapping(ptr, 0)
    return AllocationInfo(
        found.base, found.nbytes, kind, allocation_id(found.base), exportable, "" if exportable else REASONS[reason]
    )


def allocation_id(ptr: int) -> int:
    """Return the runtime's id; when it has none, an id that no cache will ever meet again."""
    return driver.pointer_attribute("BUFFER_ID", ptr) or next(_fresh_ids)


def mapping_at(ptr: int) -> Mapping | None:
    """Return the one driver mapping around ``ptr``, or None where nothing is mapped."""
    found = driver.question("hipMemGetAddressRange", ptr)
    mapping = None if found is None else Mapping(int(found[0]), int(found[1]))
    return mapping if mapping and mapping.base <= ptr < mapping.end else None


def mappings_from(ptr: int, *, end: int) -> Iterator[Mapping]:
    """Yield the mappings side by side from the one around ``ptr`` until ``end`` is reached or a hole."""
    while ptr < end and (found := mapping_at(ptr)) is not None:
        yield found
        ptr = found.end


def _inspect_vmm(ptr: int, *, exportable: tuple[HandleKind, ...]) -> AllocationInfo:
    """Walk a grown range in both directions, inside the address range that was reserved for it.

    Two reservations may be neighbours: what lies beyond the own one belongs to somebody else. Where the runtime does
    not tell the reservation, the one mapping around ``ptr`` is all that is known.
    """
    start = driver.pointer_attribute("RANGE_START_ADDR", ptr) or 0
    reserved = Mapping(start, driver.pointer_attribute("RANGE_SIZE", ptr) or 0)
    own = mapping_at(ptr) or Mapping(ptr, 0)
    if not reserved.base <= ptr < reserved.end:
        reserved = own
    first, newest = own, allocation_id(own.base)
    while first.base > reserved.base and (before := mapping_at(first.base - 1)) is not None:
        first, newest = before, max(newest, allocation_id(before.base))
    last = own
    for last in mappings_from(own.end, end=reserved.end):
        newest = max(newest, allocation_id(last.base))
    # The newest id: replacing any mapping of the range changes it.
    return AllocationInfo(
        first.base, last.end - first.base, MemoryKind.VMM, newest, exportable, "" if exportable else REASONS["vmm"]
    )
