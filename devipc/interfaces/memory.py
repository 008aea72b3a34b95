"""DeviceMemoryIPC: sharing device memory between processes, and nothing about when work on it is done.

Owns the contract only. Identity of processes, generations, caching, counting and leases are the core's; a backend
sees one extent at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from devipc.capabilities import Capability
from devipc.types import AllocationInfo, ExportedExtent, HandleKind, OpenedExtent

__all__ = ["Allocation", "DeviceMemoryIPC", "SideBySide"]


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory that a backend allocated so that it can be shared.

    Parameters
    ----------
    ptr : int
        Device address; aligned to the backend's granularity.
    nbytes : int
        Usable size: what was asked for, rounded up to whole driver blocks, so that no neighbour is shared with it.
    kind : HandleKind
        How it will be exported.
    token : object
        What the backend needs to free it; nobody else looks inside.
    """

    ptr: int
    nbytes: int
    kind: HandleKind
    token: object


@runtime_checkable
class DeviceMemoryIPC(Protocol):
    """Share memory of one device.

    All methods may be called from any thread; a backend whose driver is not thread-safe serialises them itself. All
    release the GIL while a driver call blocks. All raise :class:`~devipc.errors.ForkError` in a forked child and
    :class:`~devipc.errors.DriverError` (with the vendor's status) for a refusal that is listed nowhere below.
    """

    def kinds(self) -> Mapping[HandleKind, Capability]:
        """Return every handle kind that this backend knows, with what is known about it here. Never raises for "no"."""
        ...

    def allocate(self, nbytes: int, *, kind: HandleKind | None = None, zero: bool = False) -> Allocation:
        """Allocate memory that can be exported as ``kind`` (the backend's best when None).

        ``zero`` fills it with zeros before returning, so that no earlier owner's bytes are shared.

        Raises
        ------
        UsageError
            For ``nbytes <= 0``.
        CapabilityError
            For a kind that this device cannot allocate.
        ResourceExhausted
            When memory ran out.
        """
        ...

    def free(self, allocation: Allocation) -> None:
        """Give an allocation back. Freeing it twice raises :class:`~devipc.errors.UsageError`."""
        ...

    def describe(self, ptr: int) -> AllocationInfo:
        """Ask the driver what ``ptr`` points into.

        Unknown and freed pointers come back with kind ``unknown``, an empty ``exportable`` and a reason; they are not
        an error, and never crash.
        """
        ...

    def export(self, ptr: int, nbytes: int, *, kind: HandleKind | None = None) -> ExportedExtent:
        """Make the range ``[ptr, ptr + nbytes)`` available to other processes.

        The driver is always given the allocation's base; the distance travels in the chunks. A grown range becomes
        several chunks. The result owns its descriptors.

        Raises
        ------
        UsageError
            For zero bytes or a range that leaves its allocation.
        CapabilityError
            For memory of a kind that cannot be exported; names the kind and the allocator setting to change.
        """
        ...

    def release(self, extent: ExportedExtent) -> None:
        """Take an export back: close its descriptors and whatever the driver keeps for it. Does not free the memory."""
        ...

    def open(self, extent: ExportedExtent) -> OpenedExtent:
        """Map an extent that another process exported; all chunks side by side, or none.

        May block in the driver; callers that need a deadline call it from a thread that can be abandoned. Descriptors
        of ``extent`` stay the caller's. Every chunk is checked against the size that *this* process's driver reports.

        Raises
        ------
        BoundsError
            When a chunk leaves the driver's allocation.
        HandleError
            For payloads of the wrong size or shape, before any driver call.
        """
        ...

    def close(self, opened: OpenedExtent) -> None:
        """Unmap. The caller guarantees that no queued work of this process still uses the range."""
        ...


@runtime_checkable
class SideBySide(Protocol):
    """What a :class:`DeviceMemoryIPC` has as well when it can choose where extents are mapped.

    Then one strided copy moves a page of all layers, where each layer is an allocation of its own. Backends whose
    driver chooses the addresses do not have it.
    """

    def side_by_side(self, kind: HandleKind) -> Capability:
        """Return whether extents of ``kind`` can be opened so, and if not, why. Never raises for "no"."""
        ...

    def open_side_by_side(self, extents: Sequence[ExportedExtent]) -> tuple[OpenedExtent, ...]:
        """Map several extents, one behind the other in the order given, in one reserved range: all or none.

        They are of one kind and one ``region``, and extents of equal chunks lie at equal distances. Each is closed on
        its own by :meth:`DeviceMemoryIPC.close`; the addresses go back with the last. Rules and errors are those of
        :meth:`DeviceMemoryIPC.open`.

        Raises
        ------
        CapabilityError
            For a kind that the driver places itself.
        """
        ...
