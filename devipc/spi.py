"""The one module that a vendor imports: contracts, values, errors and the few helpers that every backend needs.

Owns no logic of its own beyond closing descriptors. Everything a backend may rely on is named in ``__all__``; the
rest of devipc is none of its business.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from devipc.calltrace import report
from devipc.capabilities import Capability, Verdict
from devipc.deadline import call_with_deadline
from devipc.errors import (
    BoundsError,
    CapabilityError,
    ClosedError,
    CompletionTimeout,
    DeviceLostError,
    DevIPCError,
    DriverError,
    ForkError,
    HandleError,
    ResourceExhausted,
    UsageError,
    VendorStatus,
)
from devipc.extents import PayloadShape, check_payloads, explain_missing_fd
from devipc.futex import futex_wait, futex_wake
from devipc.hookspecs import CONTRACT_VERSION, hookimpl
from devipc.interfaces.backend import Backend, Device
from devipc.interfaces.memory import Allocation, DeviceMemoryIPC, SideBySide
from devipc.interfaces.sync import (
    DeviceSyncIPC,
    InterprocessEvent,
    InterprocessEvents,
    WordWaits,
    WordWrites,
)
from devipc.interfaces.transfer import DeviceTransfer, HostRegistration, Marker, Stream
from devipc.memfd import PAGE_NBYTES, SharedMap, create_memfd, round_up, validate_memfd
from devipc.pinned import PIN_STEP_NBYTES, Pinning, Pins, Rectangle, pinning_limits
from devipc.types import (
    AllocationInfo,
    Chunk,
    DeviceInfo,
    ExportedExtent,
    HandleKind,
    Mechanism,
    MemoryInfo,
    MemoryKind,
    OpenedExtent,
)

__all__ = [
    "CONTRACT_VERSION",
    "PAGE_NBYTES",
    "PIN_STEP_NBYTES",
    "Allocation",
    "AllocationInfo",
    "Backend",
    "BoundsError",
    "Capability",
    "CapabilityError",
    "Chunk",
    "ClosedError",
    "CompletionTimeout",
    "DevIPCError",
    "Device",
    "DeviceInfo",
    "DeviceLostError",
    "DeviceMemoryIPC",
    "DeviceSyncIPC",
    "DeviceTransfer",
    "DriverError",
    "ExportedExtent",
    "ForkError",
    "HandleError",
    "HandleKind",
    "HostRegistration",
    "InterprocessEvent",
    "InterprocessEvents",
    "Marker",
    "Mechanism",
    "MemoryInfo",
    "MemoryKind",
    "OpenedExtent",
    "PayloadShape",
    "Pinning",
    "Pins",
    "Rectangle",
    "ResourceExhausted",
    "SharedMap",
    "SideBySide",
    "Stream",
    "UsageError",
    "VendorStatus",
    "Verdict",
    "WordWaits",
    "WordWrites",
    "call_with_deadline",
    "check_chunk",
    "check_payloads",
    "close_fds",
    "create_memfd",
    "explain_missing_fd",
    "futex_wait",
    "futex_wake",
    "hookimpl",
    "pinning_limits",
    "report",
    "round_up",
    "validate_memfd",
]


def close_fds(fds: Iterable[int]) -> None:
    """Close descriptors that an :class:`ExportedExtent` owns; one that is closed already is passed over."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            continue


def check_chunk(chunk: Chunk, *, driver_nbytes: int) -> None:
    """Check one chunk against the allocation size that the importing driver reports.

    Raises
    ------
    BoundsError
        When the shared part does not lie inside ``driver_nbytes``.
    """
    if chunk.offset < 0 or chunk.nbytes <= 0 or chunk.offset + chunk.nbytes > driver_nbytes:
        raise BoundsError(
            f"shared range [{chunk.offset}, {chunk.offset + chunk.nbytes}) leaves the allocation of"
            f" {driver_nbytes} bytes that the driver reports",
            remedy="the exporter's handle is wrong or was changed on the way; export again",
        )
