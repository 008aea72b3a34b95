"""Structures and signatures of the Level Zero calls that this package makes, for ctypes.

Owns their layouts and the constants in them; calls nothing. Source: the headers of versions 1.4 and 1.17, in which all
of them are the same. Addresses are 64-bit numbers without sign: drivers hand out some above 2^63. Handles for other
processes are structures that travel by value; an array in their place would be passed as a pointer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char, c_char_p, c_int32, c_size_t, c_ubyte, c_uint32, c_uint64, c_void_p
from typing import Any, ClassVar

__all__ = [
    "HANDLE_NBYTES",
    "NULLABLE_EVENTS",
    "SIGNATURES",
    "ContextDesc",
    "DeviceMemory",
    "DeviceMemoryDesc",
    "DeviceProperties",
    "DriverProperties",
    "EventDesc",
    "EventPoolDesc",
    "IpcFlags",
    "IpcHandle",
    "MemoryProperties",
    "PciProperties",
    "QueueDesc",
    "QueueGroup",
    "Region",
    "make",
]

HANDLE_NBYTES = 64
"""Size of handles for other processes (ZE_MAX_IPC_HANDLE_SIZE)."""


class IpcHandle(ctypes.Structure):
    """``ze_ipc_mem_handle_t`` and ``ze_ipc_event_pool_handle_t``."""

    _fields_ = (("data", c_ubyte * HANDLE_NBYTES),)


class Region(ctypes.Structure):
    """``ze_copy_region_t``; a depth of 0 means two dimensions."""

    _fields_ = tuple((name, c_uint32) for name in ("x", "y", "z", "width", "height", "depth"))


class _Base(ctypes.Structure):
    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (("stype", c_int32), ("next", c_void_p))


class ContextDesc(_Base):
    """``ze_context_desc_t``."""

    STYPE = 0xD
    _fields_ = (("flags", c_uint32),)


class DeviceMemoryDesc(_Base):
    """``ze_device_mem_alloc_desc_t``, and ``ze_host_mem_alloc_desc_t``, which ends after the flags."""

    STYPE = 0x15
    _fields_ = (("flags", c_uint32), ("ordinal", c_uint32))


class DeviceProperties(_Base):
    """``ze_device_properties_t``."""

    STYPE = 0x3
    _fields_ = (
        ("type", c_int32),
        ("vendor_id", c_uint32),
        ("device_id", c_uint32),
        ("flags", c_uint32),
        ("subdevice_id", c_uint32),
        ("core_clock_rate", c_uint32),
        ("max_mem_alloc_size", c_uint64),
        ("numbers", c_uint32 * 7),
        ("timer_resolution", c_uint64),
        ("valid_bits", c_uint32 * 2),
        ("uuid", c_ubyte * 16),
        ("name", c_char * 256),
    )


class DeviceMemory(_Base):
    """``ze_device_memory_properties_t``."""

    STYPE = 0x7
    _fields_ = (
        ("flags", c_uint32),
        ("max_clock_rate", c_uint32),
        ("max_bus_width", c_uint32),
        ("total_size", c_uint64),
        ("name", c_char * 256),
    )


class PciProperties(_Base):
    """``ze_pci_ext_properties_t``."""

    STYPE = 0x10008
    _fields_ = (
        ("domain", c_uint32),
        ("bus", c_uint32),
        ("device", c_uint32),
        ("function", c_uint32),
        ("speed", c_int32 * 2),
        ("bandwidth", c_uint64),
    )


class DriverProperties(_Base):
    """``ze_driver_properties_t``."""

    STYPE = 0x1
    _fields_ = (("uuid", c_ubyte * 16), ("version", c_uint32))


class IpcFlags(_Base):
    """``ze_driver_ipc_properties_t``."""

    STYPE = 0x2
    _fields_ = (("flags", c_uint32),)


class QueueGroup(_Base):
    """``ze_command_queue_group_properties_t``."""

    STYPE = 0x6
    _fields_ = (("flags", c_uint32), ("max_fill_pattern", c_size_t), ("queues", c_uint32))


class QueueDesc(_Base):
    """``ze_command_queue_desc_t``."""

    STYPE = 0xE
    _fields_ = (
        ("ordinal", c_uint32),
        ("index", c_uint32),
        ("flags", c_uint32),
        ("mode", c_int32),
        ("priority", c_int32),
    )


class EventPoolDesc(_Base):
    """``ze_event_pool_desc_t``."""

    STYPE = 0x10
    _fields_ = (("flags", c_uint32), ("count", c_uint32))


class EventDesc(_Base):
    """``ze_event_desc_t``."""

    STYPE = 0x11
    _fields_ = (("index", c_uint32), ("signal", c_uint32), ("wait", c_uint32))


class MemoryProperties(_Base):
    """``ze_memory_allocation_properties_t``."""

    STYPE = 0x17
    _fields_ = (("type", c_int32), ("id", c_uint64), ("page_size", c_uint64))


def make(kind: type[Any], **values: Any) -> Any:
    """Return a structure of ``kind`` with its type number set, zero elsewhere but for ``values``."""
    return kind(stype=kind.STYPE, **values)


_EVENT = c_void_p
_STREAM = c_void_p
_ADDRESS = c_uint64
_OUT = c_void_p
NULLABLE_EVENTS = (c_uint32, POINTER(c_void_p))
"""A number of events to wait for, and their handles."""

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "zeInit": (c_uint32,),
    "zeDriverGet": (_OUT, _OUT),
    "zeDriverGetApiVersion": (c_void_p, _OUT),
    "zeDriverGetProperties": (c_void_p, _OUT),
    "zeDriverGetIpcProperties": (c_void_p, _OUT),
    "zeDriverGetExtensionFunctionAddress": (c_void_p, c_char_p, _OUT),
    "zeDeviceGet": (c_void_p, _OUT, _OUT),
    "zeDeviceGetProperties": (c_void_p, _OUT),
    "zeDeviceGetMemoryProperties": (c_void_p, _OUT, _OUT),
    "zeDeviceGetRootDevice": (c_void_p, _OUT),
    "zeDeviceGetCommandQueueGroupProperties": (c_void_p, _OUT, _OUT),
    "zeDeviceGetStatus": (c_void_p,),
    "zeDevicePciGetPropertiesExt": (c_void_p, _OUT),
    "zeContextCreate": (c_void_p, _OUT, _OUT),
    "zeContextDestroy": (c_void_p,),
    "zeMemAllocDevice": (c_void_p, _OUT, c_size_t, c_size_t, c_void_p, _OUT),
    "zeMemAllocHost": (c_void_p, _OUT, c_size_t, c_size_t, _OUT),
    "zeMemFree": (c_void_p, _ADDRESS),
    "zeMemGetAllocProperties": (c_void_p, _ADDRESS, _OUT, _OUT),
    "zeMemGetAddressRange": (c_void_p, _ADDRESS, _OUT, _OUT),
    "zeMemGetIpcHandle": (c_void_p, _ADDRESS, _OUT),
    "zeMemGetIpcHandleWithProperties": (c_void_p, _ADDRESS, _OUT, _OUT),
    "zeMemGetFileDescriptorFromIpcHandleExp": (c_void_p, IpcHandle, _OUT),
    "zeMemPutIpcHandle": (c_void_p, IpcHandle),
    "zeMemOpenIpcHandle": (c_void_p, c_void_p, IpcHandle, c_uint32, _OUT),
    "zeMemCloseIpcHandle": (c_void_p, _ADDRESS),
    "zeEventPoolCreate": (c_void_p, _OUT, c_uint32, _OUT, _OUT),
    "zeEventPoolDestroy": (c_void_p,),
    "zeEventPoolGetIpcHandle": (c_void_p, _OUT),
    "zeEventPoolPutIpcHandle": (c_void_p, IpcHandle),
    "zeEventPoolOpenIpcHandle": (c_void_p, IpcHandle, _OUT),
    "zeEventPoolCloseIpcHandle": (c_void_p,),
    "zeEventCreate": (c_void_p, _OUT, _OUT),
    "zeEventDestroy": (_EVENT,),
    "zeEventHostReset": (_EVENT,),
    "zeEventQueryStatus": (_EVENT,),
    "zeEventHostSynchronize": (_EVENT, c_uint64),
    "zeCommandListCreateImmediate": (c_void_p, c_void_p, _OUT, _OUT),
    "zeCommandListDestroy": (_STREAM,),
    "zeCommandListAppendBarrier": (_STREAM, _EVENT, *NULLABLE_EVENTS),
    "zeCommandListAppendMemoryFill": (_STREAM, _ADDRESS, _OUT, c_size_t, c_size_t, _EVENT, *NULLABLE_EVENTS),
    "zeCommandListAppendMemoryCopy": (_STREAM, _ADDRESS, _ADDRESS, c_size_t, _EVENT, *NULLABLE_EVENTS),
    "zeCommandListAppendMemoryCopyRegion": (
        *(_STREAM, _ADDRESS, POINTER(Region), c_uint32, c_uint32, _ADDRESS, POINTER(Region), c_uint32, c_uint32),
        *(_EVENT, *NULLABLE_EVENTS),
    ),
    "zexDriverImportExternalPointer": (c_void_p, _ADDRESS, c_size_t),
    "zexDriverReleaseImportedPointer": (c_void_p, _ADDRESS),
}
"""Parameters of each function; every one returns ``ze_result_t``. ``zex`` functions come from the driver, by name."""
