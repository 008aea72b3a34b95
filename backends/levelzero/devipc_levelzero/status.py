"""Results of Level Zero calls as typed errors: what each means, who is to blame and what can be done.

Owns the table. Knows neither the loader nor any object of this package, so that it can be read, and tested, alone.
Numbers and names are those of ``ze_result_t`` in the headers of version 1.17.
"""

from __future__ import annotations

from dataclasses import dataclass

from devipc.spi import (
    CapabilityError,
    DeviceLostError,
    DevIPCError,
    DriverError,
    ResourceExhausted,
    VendorStatus,
)

__all__ = ["INVALID_ARGUMENT", "NAMES", "NOT_READY", "SUCCESS", "UNINITIALIZED", "UNSUPPORTED_FEATURE", "error_for"]

SUCCESS = 0
"""ZE_RESULT_SUCCESS."""
NOT_READY = 1
"""ZE_RESULT_NOT_READY: an answer of queries, not a failure."""
UNINITIALIZED = 0x78000001
"""ZE_RESULT_ERROR_UNINITIALIZED."""
UNSUPPORTED_FEATURE = 0x78000003
"""ZE_RESULT_ERROR_UNSUPPORTED_FEATURE; what the loader answers for a call that the driver does not have."""
INVALID_ARGUMENT = 0x78000004
"""ZE_RESULT_ERROR_INVALID_ARGUMENT; what drivers answer for handles that resolve to nothing."""

NAMES = {
    0: "SUCCESS",
    1: "NOT_READY",
    0x70000001: "ERROR_DEVICE_LOST",
    0x70000002: "ERROR_OUT_OF_HOST_MEMORY",
    0x70000003: "ERROR_OUT_OF_DEVICE_MEMORY",
    0x70000006: "ERROR_DEVICE_REQUIRES_RESET",
    0x70000007: "ERROR_DEVICE_IN_LOW_POWER_STATE",
    0x70010000: "ERROR_INSUFFICIENT_PERMISSIONS",
    0x70010001: "ERROR_NOT_AVAILABLE",
    0x70020000: "ERROR_DEPENDENCY_UNAVAILABLE",
    0x78000001: "ERROR_UNINITIALIZED",
    0x78000002: "ERROR_UNSUPPORTED_VERSION",
    0x78000003: "ERROR_UNSUPPORTED_FEATURE",
    0x78000004: "ERROR_INVALID_ARGUMENT",
    0x78000005: "ERROR_INVALID_NULL_HANDLE",
    0x78000006: "ERROR_HANDLE_OBJECT_IN_USE",
    0x78000007: "ERROR_INVALID_NULL_POINTER",
    0x78000008: "ERROR_INVALID_SIZE",
    0x78000009: "ERROR_UNSUPPORTED_SIZE",
    0x7800000A: "ERROR_UNSUPPORTED_ALIGNMENT",
    0x7800000C: "ERROR_INVALID_ENUMERATION",
    0x7800000D: "ERROR_UNSUPPORTED_ENUMERATION",
    0x78000020: "ERROR_SURVIVABILITY_MODE_DETECTED",
    0x78000021: "ERROR_ADDRESS_NOT_FOUND",
    0x7FFFFFFE: "ERROR_UNKNOWN",
}
"""The vendor's names, without their common beginning; asking the driver for one could fail too."""


@dataclass(frozen=True, slots=True)
class _Meaning:
    error: type[DevIPCError]
    code: str
    text: str
    remedy: str = ""
    retryable: bool = False


_LOST = "end this process; every later call on the device fails too. `dmesg` shows what the kernel driver saw"
_RESET = "the device has to be reset (unbind and bind its driver, or reboot)"
_NODES = "install the GPU driver's Level Zero library, and see that this user may open /dev/dri/renderD*"

_MEANINGS: dict[int, _Meaning] = {
    0x70000001: _Meaning(
        DeviceLostError, "device_lost", "the device is lost: it hung, was reset or was removed", _LOST
    ),
    0x70000002: _Meaning(
        ResourceExhausted, "host_memory", "out of host memory or descriptors", "check `ulimit -n` and free memory", True
    ),
    0x70000003: _Meaning(
        ResourceExhausted, "device_memory", "out of memory", "free device memory, or close mappings of dead peers", True
    ),
    0x70000006: _Meaning(DeviceLostError, "needs_reset", "the device needs a reset", _RESET),
    0x70000007: _Meaning(CapabilityError, "low_power", "the device sleeps", "wake it up and try again", True),
    0x70010000: _Meaning(
        CapabilityError,
        "not_permitted",
        "the driver does not permit the call to this user",
        "add the user to the groups `render` and `video`, or run with the needed rights",
    ),
    0x70010001: _Meaning(
        CapabilityError, "not_available", "the device is used by somebody else", "wait until it is free", True
    ),
    0x70020000: _Meaning(
        CapabilityError, "dependency", "a library that the driver needs is missing", "reinstall the GPU driver"
    ),
    UNINITIALIZED: _Meaning(CapabilityError, "no_device", "the loader finds no driver with a device", _NODES),
    0x78000002: _Meaning(
        CapabilityError,
        "version_mismatch",
        "loader, layers and driver are of versions that do not fit",
        "install libze1 and its layers from one release; ZE_ENABLE_LOADER_DEBUG_TRACE=1 shows which was refused",
    ),
    UNSUPPORTED_FEATURE: _Meaning(
        CapabilityError,
        "not_supported",
        "this driver does not have the call, or the device cannot do it",
        "update the GPU driver, or use another handle kind or strategy",
    ),
    INVALID_ARGUMENT: _Meaning(DriverError, "invalid_argument", "the driver refused an argument"),
    0x78000005: _Meaning(DriverError, "null_handle", "a handle is missing"),
    0x78000006: _Meaning(DriverError, "in_use", "the object is still in use", "wait for the work that uses it"),
    0x78000007: _Meaning(DriverError, "null_pointer", "a pointer is missing"),
    0x78000008: _Meaning(DriverError, "invalid_size", "the driver refused a size"),
    0x78000009: _Meaning(
        ResourceExhausted, "allocation_size", "the driver does not allocate that much at once", "allocate in parts"
    ),
    0x78000020: _Meaning(
        DeviceLostError, "survivability", "the device is in survivability mode", "update its firmware"
    ),
    0x78000021: _Meaning(DriverError, "address", "the driver does not know the address"),
    0x7FFFFFFE: _Meaning(DriverError, "unknown", "the driver gives no cause", "`dmesg` may show one"),
}

_EXPORT_DEAD = "the exporter freed the memory or ended, or this process cannot open the exporter's device"
_REMEDIES: dict[tuple[str, int], str] = {
    ("zeMemOpenIpcHandle", INVALID_ARGUMENT): _EXPORT_DEAD,
    ("zeMemGetIpcHandle", INVALID_ARGUMENT): "only memory of zeMemAllocDevice and zeMemAllocHost can be exported",
    ("zeEventPoolOpenIpcHandle", INVALID_ARGUMENT): "the exporter's events are gone",
    ("zexDriverImportExternalPointer", INVALID_ARGUMENT): "register page-aligned memory of this process, once",
}


def error_for(call: str, value: int, *, device: str = "") -> DevIPCError:
    """Return the typed error for result ``value`` of the C function ``call``; unknown numbers become DriverError.

    Parameters
    ----------
    call, value : str, int
        The C function and its result, as an unsigned number.
    device : str
        Identity of the device, when known.
    """
    meaning = _MEANINGS.get(value, _Meaning(DriverError, "driver", "the driver refused the call"))
    return meaning.error(
        meaning.text,
        code=meaning.code,
        remedy=_REMEDIES.get((call, value), meaning.remedy),
        retryable=meaning.retryable,
        backend="levelzero",
        device=device,
        status=VendorStatus(call, value, NAMES.get(value, "")),
    )
