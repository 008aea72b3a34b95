"""Runtime status numbers as typed errors: what each means, who is to blame and what can be done.

Owns the table. Knows neither the bindings nor any object of this package, so that it can be read, and tested, alone.
Numbers and names are those of ``hipError_t`` in the ROCm 6 and 7 headers; causes are those reported by users of IPC
calls (issues of ROCm/hip, ROCm/clr and ROCm/rocm-systems).
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

__all__ = ["INVALID_STREAM", "INVALID_VALUE", "NOT_READY", "NOT_SUPPORTED", "error_for"]

INVALID_VALUE = 1
"""hipErrorInvalidValue."""
INVALID_STREAM = 709
"""hipErrorContextIsDestroyed."""
NOT_READY = 600
"""hipErrorNotReady: an answer of queries, not a failure."""
NOT_SUPPORTED = 801
"""hipErrorNotSupported."""


@dataclass(frozen=True, slots=True)
class _Meaning:
    error: type[DevIPCError]
    code: str
    text: str
    remedy: str = ""
    retryable: bool = False


_LOST = "end this process; every later call on the device fails too. `dmesg` shows what amdgpu says about it"
_VISIBLE = "check HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES, /dev/kfd, /dev/dri and the groups render and video"

_MEANINGS: dict[int, _Meaning] = {
    1: _Meaning(DriverError, "invalid_value", "the runtime refused an argument"),
    2: _Meaning(
        ResourceExhausted, "device_memory", "out of memory", "free device memory, or close mappings of dead peers", True
    ),
    3: _Meaning(DriverError, "not_initialized", "the runtime could not start", _VISIBLE),
    4: _Meaning(DriverError, "deinitialized", "the runtime is shutting down with this process"),
    17: _Meaning(
        DriverError,
        "invalid_pointer",
        "the runtime does not know the memory, or could not attach it",
        "check that the exporter still lives and has not freed it",
    ),
    35: _Meaning(CapabilityError, "old_driver", "the call needs a newer driver", "update amdgpu and ROCm"),
    100: _Meaning(CapabilityError, "no_device", "the runtime finds no device", _VISIBLE),
    101: _Meaning(DriverError, "invalid_device", "the device is unknown to this process", _VISIBLE),
    201: _Meaning(
        DriverError,
        "invalid_context",
        "the runtime takes the handle for one that this same process made",
        "memory of the own process is used by its pointer; in two containers whose processes have equal numbers, share"
        " the pid namespace, or use kind 'vmm_fd' and a strategy without events",
    ),
    205: _Meaning(
        DriverError,
        "map_failed",
        "the runtime could not map the memory",
        "check that the exporter still lives, and that both sides share the net and ipc namespaces",
    ),
    206: _Meaning(DriverError, "unmap_failed", "the runtime could not unmap the memory"),
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
        "open the memory on the device that it is on (`rocm-smi --showtopo` shows which can reach which)",
    ),
    304: _Meaning(DriverError, "operating_system", "a call to the operating system failed", "check `ulimit -n`"),
    400: _Meaning(
        DriverError, "invalid_handle", "the handle is not valid (any more)", "the exporter freed it, or ended"
    ),
    500: _Meaning(DriverError, "not_found", "the runtime does not know the address or name"),
    704: _Meaning(DriverError, "peer_enabled", "peer access is enabled already"),
    # The runtime says that the context is destroyed, and means a stream or event (ROCm/clr, wherever it checks one).
    INVALID_STREAM: _Meaning(
        DriverError,
        "invalid_stream",
        "the stream or event is none of this process (any more)",
        "keep a stream that is borrowed until all work on it is submitted",
    ),
    712: _Meaning(
        DriverError, "already_registered", "part of the host memory is registered already", "register it once only"
    ),
    713: _Meaning(DriverError, "not_registered", "the host memory is not registered"),
    801: _Meaning(
        CapabilityError,
        "not_supported",
        "this platform does not support the call",
        "use another handle kind or strategy",
    ),
    999: _Meaning(DriverError, "unknown", "the runtime gives no cause", "`dmesg` may show one"),
    1052: _Meaning(
        DriverError, "runtime_memory", "a memory call of the layer below failed", "`dmesg` may show a cause"
    ),
    1053: _Meaning(DriverError, "runtime_other", "a call of the layer below failed", "`dmesg` may show a cause"),
}

# Sticky: the device, and with it everything that this process holds on it, is dead.
_STICKY = {
    214: "an uncorrectable memory error",
    700: "an access to an illegal address",
    702: "a kernel that ran too long",
    710: "a device-side assertion",
    719: "a failed kernel",
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

_EXPORT_DEAD = "the exporter freed the memory or ended, or both sides do not share the net, ipc and pid namespaces"
_EVENT_GONE = "the exporter's event is gone, or both sides do not share one /dev/shm"
_NO_MEMORY = "the descriptor is no exported device memory"
_EXPORT = (
    "only memory of hipMalloc can be exported this way; HSA_ENABLE_IPC_MODE_LEGACY=1 is known to make every export fail"
    " on RDNA 3 and 4 with mainline kernels"
)
_REMEDIES: dict[tuple[str, int], str] = {
    **dict.fromkeys([("hipIpcOpenMemHandle", value) for value in (1, 17)], _EXPORT_DEAD),
    **dict.fromkeys([("hipIpcOpenEventHandle", value) for value in (1, 205, 400)], _EVENT_GONE),
    **dict.fromkeys([("hipMemImportFromShareableHandle", value) for value in (1, 999)], _NO_MEMORY),
    **dict.fromkeys([("hipImportExternalMemory", value) for value in (1, 999)], _NO_MEMORY),
    **dict.fromkeys([("hipMemPoolImportFromShareableHandle", value) for value in (1, 999)], "no exported pool"),
    ("hipMemPoolImportPointer", 1): _EXPORT_DEAD,
    ("hipIpcGetMemHandle", 1): _EXPORT,
    ("hipMemExportToShareableHandle", 1): "the memory was created without the file-descriptor handle type",
    ("hipMemGetHandleForAddressRange", 1): "a dma-buf covers one whole allocation of whole pages",
    ("hipIpcGetEventHandle", 400): "only events made for interprocess use, without timing, can be exported",
}


def error_for(call: str, value: int, name: str = "", *, device: str = "") -> DevIPCError:
    """Return the typed error for status ``value`` of the C function ``call``; unknown numbers become DriverError.

    Parameters
    ----------
    call, value, name : str, int, str
        The C function, its status, and the runtime's name of it.
    device : str
        Identity of the device, when known.
    """
    meaning = _MEANINGS.get(value, _Meaning(DriverError, "driver", "the runtime refused the call"))
    return meaning.error(
        meaning.text,
        code=meaning.code,
        remedy=_REMEDIES.get((call, value), meaning.remedy),
        retryable=meaning.retryable,
        backend="hip",
        device=device,
        status=VendorStatus(call, value, name),
    )
