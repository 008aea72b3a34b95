"""Plain values shared by every layer: names of kinds, identities, extents and poison reasons.

Owns no behaviour beyond validation. Nothing here does I/O, calls a driver or knows a vendor. Enum values equal their
JSON spelling.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = [
    "MAX_FENCE_VALUE",
    "POISON_BASE",
    "AllocationInfo",
    "Chunk",
    "DeviceInfo",
    "ExportedExtent",
    "HandleKind",
    "Mechanism",
    "MemoryInfo",
    "MemoryKind",
    "OpenedExtent",
    "PoisonReason",
    "Strategy",
]

MAX_FENCE_VALUE = 2**62 - 1
"""Largest value that a fence can be signalled to; the smallest is 1."""

POISON_BASE = 2**62
"""A poisoned fence's word holds this plus the reason, so that signed-cyclic and unsigned ``>=`` waits both end."""


class HandleKind(enum.StrEnum):
    """Wire form of an exported allocation."""

    LEGACY = "legacy"
    VMM_FD = "vmm_fd"
    POOL = "pool"
    DMABUF = "dmabuf"
    FABRIC = "fabric"
    OPAQUE = "opaque"
    MEMFD = "memfd"


class MemoryKind(enum.StrEnum):
    """What a pointer turned out to be when the driver was asked."""

    DEVICE = "device"
    VMM = "vmm"
    POOL = "pool"
    MANAGED = "managed"
    HOST = "host"
    IMPORTED = "imported"
    UNKNOWN = "unknown"


class Mechanism(enum.StrEnum):
    """How a backend makes a fence."""

    STREAM_MEMOP = "stream_memop"
    EVENT = "event"
    HOST = "host"


class Strategy(enum.StrEnum):
    """How a consumer learns that work is done, in the order in which they are tried (``event`` on request only)."""

    STREAM_MEMOP = "stream_memop"
    HOST_FLAG = "host_flag"
    POLLING = "polling"
    EVENT = "event"


class PoisonReason(enum.IntEnum):
    """Why all waiters of a fence were released as failed."""

    PEER_DIED = 1
    CLOSED = 2
    DEVICE_LOST = 3
    CANCELLED = 4
    TIMEOUT = 5
    PROTOCOL = 6


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device as a backend sees it.

    Parameters
    ----------
    uuid : str
        Identity that is equal in every process of the host; for a slice, the slice's own.
    ordinal : int
        Position in this process only; never sent to a peer.
    name : str
        Marketing name.
    pci : str
        Bus address, empty when there is none.
    parent_uuid : str
        For a slice the identity of the whole device, else empty.
    total_nbytes : int
        Size of the device's memory.
    dlpack_type : int
        Device type code of the DLPack standard under which array libraries know this device, with ``ordinal`` as its
        id; 1 is host memory. 0 when no array library knows it: then no tensor of it can be made.
    """

    uuid: str
    ordinal: int
    name: str
    pci: str = ""
    parent_uuid: str = ""
    total_nbytes: int = 0
    dlpack_type: int = 0


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Free and total device memory in bytes, as the driver reports it."""

    free_nbytes: int
    total_nbytes: int


@dataclass(frozen=True, slots=True)
class AllocationInfo:
    """What the driver says about the allocation that a pointer lies in.

    Parameters
    ----------
    base : int
        First address of the allocation (of the whole mapped range for grown ranges).
    nbytes : int
        Size in bytes from ``base``, as the driver reports it.
    kind : MemoryKind
        What sort of memory it is.
    allocation_id : int
        Driver's or backend's id that is never used twice in this process, so that a reused address is noticed.
    exportable : tuple of HandleKind
        Kinds that :meth:`DeviceMemoryIPC.export` will accept, best first; empty when it will refuse.
    reason : str
        Why ``exportable`` is empty, with the setting to change; empty otherwise.
    """

    base: int
    nbytes: int
    kind: MemoryKind
    allocation_id: int
    exportable: tuple[HandleKind, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One exported driver allocation and the part of it that is shared.

    Parameters
    ----------
    allocation_nbytes : int
        Size of the driver's allocation.
    offset : int
        Distance in bytes of the shared part from the allocation's base.
    nbytes : int
        Length of the shared part; ``offset + nbytes <= allocation_nbytes``.
    payload : bytes
        Opaque vendor bytes, at most 512.
    has_fd : bool
        True when one file descriptor of the extent, in chunk order, belongs to this chunk.
    """

    allocation_nbytes: int
    offset: int
    nbytes: int
    payload: bytes = b""
    has_fd: bool = False


@dataclass(frozen=True, slots=True)
class ExportedExtent:
    """A shared range in the form that travels: chunks in address order, and the descriptors that carry them.

    The object *owns* ``fds``: whoever holds it last closes them (:func:`devipc.spi.close_fds`). Sending them over a
    channel duplicates them into the peer and leaves these as they are.

    Parameters
    ----------
    kind : HandleKind
        The same for all chunks.
    chunks : tuple of Chunk
        At least one; several for ranges that were grown.
    fds : tuple of int
        One for each chunk with ``has_fd``, in chunk order.
    """

    kind: HandleKind
    chunks: tuple[Chunk, ...]
    fds: tuple[int, ...] = field(default=())

    @property
    def nbytes(self) -> int:
        """Length of the shared range in bytes."""
        return sum(chunk.nbytes for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class OpenedExtent:
    """An extent mapped into this process by a backend.

    Parameters
    ----------
    ptr : int
        Device address of the first *shared* byte.
    nbytes : int
        Length of the shared range.
    token : object
        What the backend needs to unmap it again; nobody else looks inside.
    region : int
        Extents of one region other than 0 lie side by side, and one strided copy may span them while all are open.
        Never used twice in this process.
    """

    ptr: int
    nbytes: int
    token: object
    region: int = 0
