"""The one module that a vendor imports: contracts, values, errors and the few helpers that every backend needs.

Owns no logic of its own. Everything a backend may rely on is named in ``__all__``; the
rest of devipc is none of its business.
"""

from __future__ import annotations

from devipc.calltrace import report
from devipc.capabilities import Capability, Verdict
from devipc.deadline import call_with_deadline
from devipc.descriptors import Descriptor, close_fds, explain_missing_fd, file_of
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
from devipc.extents import PayloadShape, check_chunk, check_payloads
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
from devipc.turns import Turns
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
from devipc.undoing import note_left, raise_first, try_each, undo

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
    "Descriptor",
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
    "Turns",
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
    "file_of",
    "futex_wait",
    "futex_wake",
    "hookimpl",
    "note_left",
    "pinning_limits",
    "raise_first",
    "report",
    "round_up",
    "try_each",
    "undo",
    "validate_memfd",
]
