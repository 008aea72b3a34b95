"""Driver status numbers as typed errors: what each means, who is to blame and what can be done.

Owns the table. Knows neither the bindings nor any object of this package, so that it can be read, and tested, alone.
Numbers and names are those of ``CUresult`` in the CUDA 13 headers; causes are those reported by users of IPC calls.
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

__all__ = [
    "DEINITIALIZED",
    "INVALID_VALUE",
    "NOT_READY",
    "NOT_SUPPORTED",
    "OUT_OF_MEMORY",
    "SUCCESS",
    "error_for",
]

SUCCESS = 0
"""CUDA_SUCCESS."""
INVALID_VALUE = 1
"""CUDA_ERROR_INVALID_VALUE."""
OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""
DEINITIALIZED = 4
"""CUDA_ERROR_DEINITIALIZED: the driver is being torn down with the process."""
NOT_SUPPORTED = 801
"""CUDA_ERROR_NOT_SUPPORTED."""
NOT_READY = 600
"""CUDA_ERROR_NOT_READY: an answer of queries, not a failure."""


@dataclass(frozen=True, slots=True)
class _Meaning:
    error: type[DevIPCError]
    code: str
    text: str
    remedy: str = ""
    retryable: bool = False


_DRIVER_FIT = "compare the driver version of the host with the libcuda in use (`devipc` prints both)"
_LOST = "end this process; every later call on the device fails too. `dmesg` shows the Xid of the cause"
_MPS = "check that the MPS server runs and that this container shares its pipe folder and the host's IPC namespace"

_MEANINGS: dict[int, _Meaning] = {
    1: _Meaning(DriverError, "invalid_value", "the driver refused an argument"),
    2: _Meaning(
        ResourceExhausted, "device_memory", "out of memory", "free device memory, or close mappings of dead peers", True
    ),
    3: _Meaning(DriverError, "not_initialized", "the driver is not initialised in this process"),
    4: _Meaning(DriverError, "deinitialized", "the driver is shutting down with this process"),
    34: _Meaning(
        CapabilityError,
        "stub_library",
        "libcuda is the stub that is meant for linking only",
        "remove the toolkit's `stubs` folder from LD_LIBRARY_PATH",
    ),
    36: _Meaning(CapabilityError, "old_driver", "the call needs a newer driver", "update the NVIDIA driver"),
    46: _Meaning(
        CapabilityError,
        "device_busy",
        "the device is busy or unavailable, as in exclusive compute mode with another process on it",
        "set compute mode Default (`nvidia-smi -c DEFAULT`) or use MPS",
        True,
    ),
    100: _Meaning(
        CapabilityError,
        "no_device",
        "the driver finds no device",
        "check CUDA_VISIBLE_DEVICES, /dev/nvidia* and the container's GPU setting",
    ),
    101: _Meaning(
        DriverError,
        "invalid_device",
        "the device is unknown to this process",
        "make the exporter's device visible here (CUDA_VISIBLE_DEVICES) and check peer access between devices",
    ),
    102: _Meaning(CapabilityError, "not_licensed", "the device has no licence", "check the vGPU licence"),
    201: _Meaning(
        DriverError,
        "invalid_context",
        "no usable context, or a handle that this same process made",
        "memory of the own process is used by its pointer; between containers, equal process ids look the same",
    ),
    205: _Meaning(
        DriverError,
        "map_failed",
        "the driver could not map the memory",
        "check that the exporter still lives, that both see the same device nodes, and that address space is left",
    ),
    206: _Meaning(DriverError, "unmap_failed", "the driver could not unmap the memory"),
    208: _Meaning(
        DriverError,
        "already_mapped",
        "the memory is mapped in this process already, by another library",
        "close the other mapping (torch, UCX) or share its pointer",
        True,
    ),
    217: _Meaning(
        CapabilityError,
        "no_peer_access",
        "these two devices cannot reach each other's memory",
        "open the memory on the device that it is on (`nvidia-smi topo -p2p r` shows which can reach which)",
    ),
    304: _Meaning(DriverError, "operating_system", "a call to the operating system failed", "check `ulimit -n`"),
    400: _Meaning(
        DriverError,
        "invalid_handle",
        "the handle is not valid (any more)",
        "the exporter freed it, ended, or cannot be reached: events need a common /dev/shm, and WSL has no legacy IPC",
    ),
    500: _Meaning(DriverError, "not_found", "the driver does not know the address or name"),
    704: _Meaning(DriverError, "peer_enabled", "peer access is enabled already"),
    711: _Meaning(ResourceExhausted, "peers", "the device's limit of mapped peers is reached"),
    712: _Meaning(
        DriverError, "already_registered", "part of the host memory is registered already", "register it once only"
    ),
    713: _Meaning(DriverError, "not_registered", "the host memory is not registered"),
    800: _Meaning(
        CapabilityError,
        "not_permitted",
        "the driver does not permit the call here",
        "check the container's device cgroup and capabilities; fabric handles need an IMEX channel",
    ),
    801: _Meaning(
        CapabilityError,
        "not_supported",
        "this platform does not support the call",
        "WSL, integrated and confidential-computing devices lack parts of IPC: use another handle kind or strategy",
    ),
    802: _Meaning(
        CapabilityError, "system_not_ready", "the system is not ready", "start nvidia-fabricmanager and wait", True
    ),
    803: _Meaning(CapabilityError, "driver_mismatch", "libcuda does not fit the kernel driver", _DRIVER_FIT),
    804: _Meaning(CapabilityError, "compat", "compatibility libcuda is not supported on this device", _DRIVER_FIT),
    805: _Meaning(CapabilityError, "mps", "no connection to the MPS daemon", _MPS, True),
    806: _Meaning(CapabilityError, "mps", "the MPS server failed", _MPS, True),
    807: _Meaning(CapabilityError, "mps", "the MPS server is not ready", _MPS, True),
    808: _Meaning(ResourceExhausted, "mps_clients", "the MPS server has its most clients", _MPS),
    809: _Meaning(ResourceExhausted, "mps_connections", "the MPS server has its most connections", _MPS),
    919: _Meaning(CapabilityError, "fabric", "the fabric is not ready", "start nvidia-fabricmanager and IMEX", True),
    999: _Meaning(DriverError, "unknown", "the driver gives no cause", "`dmesg` may show an Xid"),
}

# Sticky: the context, and with it everything that this process holds on the device, is dead.
_STICKY = {
    214: "an uncorrectable memory error",
    220: "an uncorrectable NVLink error",
    226: "a contained memory error",
    700: "an access to an illegal address",
    702: "a kernel that ran too long",
    709: "a context that somebody destroyed or reset",
    710: "a device-side assertion",
    714: "a hardware stack error",
    715: "an illegal instruction",
    716: "a misaligned access",
    717: "an access to an invalid address space",
    718: "an invalid program counter",
    719: "a failed kernel",
    721: "leaked tensor memory",
    810: "the end of the MPS client",
}
_MEANINGS.update(
    {
        value: _Meaning(DeviceLostError, "device_lost", f"the device is lost: {cause}", _LOST)
        for value, cause in _STICKY.items()
    }
)
_MEANINGS.update(
    {
        value: _Meaning(
            DriverError, "capture", "the call is not allowed while a graph is captured", "call it outside of capture"
        )
        for value in range(900, 909)
    }
)

_EXPORT_DEAD = "the exporter freed the memory or ended, or both sides do not share the needed namespaces"
_EVENT_GONE = "the exporter's event is gone, or both sides do not share one /dev/shm"
_NO_POOL = "the descriptor is no exported pool"
_NO_MEMORY = "the descriptor is no exported device memory"
_REMEDIES: dict[tuple[str, int], str] = {
    ("cuIpcOpenMemHandle", 1): _EXPORT_DEAD,
    ("cuIpcOpenMemHandle", 101): "peer access alone is not enough for handles; keep both sides on one device",
    **dict.fromkeys([("cuIpcOpenEventHandle", value) for value in (1, 205, 400)], _EVENT_GONE),
    **dict.fromkeys([("cuMemImportFromShareableHandle", value) for value in (1, 999)], _NO_MEMORY),
    **dict.fromkeys([("cuMemPoolImportFromShareableHandle", value) for value in (1, 999)], _NO_POOL),
    ("cuMemPoolImportPointer", 1): _EXPORT_DEAD,
    ("cuIpcGetMemHandle", 1): "only memory of cuMemAlloc can be exported this way",
    ("cuMemExportToShareableHandle", 1): "the memory was created without the file-descriptor handle type",
    ("cuIpcGetEventHandle", 400): "only events made for interprocess use, without timing, can be exported",
}


def error_for(call: str, value: int, name: str = "", *, device: str = "") -> DevIPCError:
    """Return the typed error for status ``value`` of the C function ``call``; unknown numbers become DriverError.

    Parameters
    ----------
    call, value, name : str, int, str
        The C function, its status, and the driver's name of it.
    device : str
        Identity of the device, when known.
    """
    meaning = _MEANINGS.get(value, _Meaning(DriverError, "driver", "the driver refused the call"))
    return meaning.error(
        meaning.text,
        code=meaning.code,
        remedy=_REMEDIES.get((call, value), meaning.remedy),
        retryable=meaning.retryable,
        backend="cuda",
        device=device,
        status=VendorStatus(call, value, name),
    )
