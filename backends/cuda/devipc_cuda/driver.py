"""The one place that touches ``cuda.bindings.driver``: loading, calling, checking, and what its versions differ in.

Owns the rule that every call is reported, checked and refused after a fork, and the hiding of binding objects: the
rest of the package passes integers, bytes and objects that it got here. Knows nothing of memory kinds or fences.
Bindings 12.9 and 13.x are supported. They return ``(CUresult, values...)``, raise ``ValueError`` for a status that
their enumeration lacks, and a ``RuntimeError`` for a library or function that is absent.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
import threading
from collections.abc import Callable
from typing import Any

from devipc.spi import CapabilityError, DeviceLostError, DevIPCError, ForkError, report
from devipc_cuda.status import error_for

__all__ = [
    "HANDLE_NBYTES",
    "access_desc",
    "allocation_prop",
    "attempt",
    "attempt_pointer_attribute",
    "bindings_version",
    "bound",
    "call",
    "device_attribute",
    "entry",
    "fd_handle_type",
    "handle_bytes",
    "handle_from_bytes",
    "initialize",
    "library_paths",
    "make",
    "name_of",
    "parent_uuid",
    "pointer_attribute",
    "pool_props",
    "question",
    "quietly",
    "relaxed_capture",
]

HANDLE_NBYTES = 64
"""Size of every opaque handle of the driver: memory, event, pool pointer."""

_UNKNOWN_STATUS = re.compile(r"(\d+) is not a valid CUresult")
_lock = threading.Lock()
_module: Any = None
_initialized = False
_pid = 0


def _bindings() -> Any:
    global _module, _pid
    if _module is None:
        with _lock:
            try:
                _module = importlib.import_module("cuda.bindings.driver")
            except ImportError as error:
                raise CapabilityError(
                    f"layer 'bindings': cuda.bindings.driver cannot be imported ({error})",
                    code="no_bindings",
                    remedy="pip install 'cuda-bindings>=12.9'",
                    backend="cuda",
                ) from error
            _pid = os.getpid()
    return _module


def _check_process() -> None:
    if _initialized and os.getpid() != _pid:
        raise ForkError(
            "the CUDA driver was initialised before this process was forked and cannot be used in it",
            remedy="start processes with the 'spawn' method, or fork before the first use of a device",
            backend="cuda",
        )


def initialize() -> None:
    """Load the driver and call ``cuInit`` once; later calls return at once.

    Raises
    ------
    CapabilityError
        Naming the layer that failed: bindings, library, or initialisation.
    """
    global _initialized, _pid
    _check_process()
    if not _initialized:
        call("cuInit", 0)
        _pid = os.getpid()
        _initialized = True


def attempt(name: str, *args: Any) -> tuple[int, Any]:
    """Call the C function ``name``; return its status and its value (a tuple for several, None for none or failure).

    Raises
    ------
    ForkError
        In a forked child.
    CapabilityError
        When library or function are absent.
    """
    _check_process()
    function = getattr(_bindings(), name, None)
    if function is None:
        raise _missing(name, "the bindings do not have it")
    report(name)
    try:
        result = function(*args)
    except ValueError as error:
        found = _UNKNOWN_STATUS.search(str(error))
        if found is None:
            raise
        return int(found[1]), None
    except RuntimeError as error:
        raise _missing(name, str(error)) from error
    status = int(result[0])
    if status or len(result) == 1:
        return status, None
    return 0, result[1] if len(result) == 2 else result[1:]


def question(name: str, *args: Any) -> Any:
    """Call the C function ``name``, for which every failure is the answer "no"; return its value, None for "no".

    Raises
    ------
    DeviceLostError
        A dead device answers nothing.
    """
    status, value = attempt(name, *args)
    if not status:
        return value
    error = error_for(name, status, name_of(status))
    if isinstance(error, DeviceLostError):
        raise error
    return None


def call(name: str, *args: Any) -> Any:
    """Call the C function ``name`` and return its value; a status other than success raises what it means.

    Raises
    ------
    DriverError, DeviceLostError, ResourceExhausted, CapabilityError
        As :func:`devipc_cuda.status.error_for` says.
    """
    status, value = attempt(name, *args)
    if status:
        raise error_for(name, status, name_of(status))
    return value


def quietly(function: Callable[..., object], *args: Any) -> None:
    """Undo something while another error is on its way: that one is the cause, and must not be hidden."""
    try:
        function(*args)
    except DevIPCError:
        pass


def bound(name: str) -> Callable[..., None]:
    """Return ``name`` for use in a loop: checked and reported like :func:`call`, but looked up once, without value."""
    _check_process()
    function = getattr(_bindings(), name, None)
    if function is None:
        raise _missing(name, "the bindings do not have it")

    def run(*args: Any) -> None:
        report(name)
        try:
            status = function(*args)[0]
        except ValueError as error:
            found = _UNKNOWN_STATUS.search(str(error))
            if found is None:
                raise
            status = int(found[1])
        except RuntimeError as error:
            raise _missing(name, str(error)) from error
        if status:
            raise error_for(name, int(status), name_of(int(status)))

    return run


def _missing(name: str, text: str) -> CapabilityError:
    text = " ".join(text.split())
    if "driver library" in text or "libcuda" in text:
        return CapabilityError(
            f"layer 'library': libcuda.so.1 cannot be loaded ({text})",
            code="no_library",
            remedy="install the NVIDIA driver, or start the container with GPU support",
            backend="cuda",
        )
    return CapabilityError(
        f"the driver has no {name} ({text})",
        code="missing_symbol",
        remedy="update the NVIDIA driver and cuda-bindings to versions that fit each other",
        backend="cuda",
    )


def name_of(status: int) -> str:
    """Return the vendor's name of a status, empty for unknown ones.

    Taken from the binding's enumeration: asking the driver could fail too, and hide the status.
    """
    try:
        return str(_bindings().CUresult(status).name)
    except ValueError:
        return ""


def bindings_version() -> str:
    """Return the version of cuda-bindings, empty when it is not installed."""
    try:
        return str(importlib.import_module("cuda.bindings").__version__)
    except (ImportError, AttributeError):
        return ""


def library_paths() -> list[str]:
    """Return the paths of all libcuda copies mapped into this process; more than one is a mix that does not work."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        found = {line.split(maxsplit=5)[5].strip() for line in maps if "/libcuda.so" in line}
    return sorted(found)


def device_attribute(name: str, device: Any) -> int | None:
    """Return ``CU_DEVICE_ATTRIBUTE_<name>``, or None when driver or bindings do not know it."""
    attribute = getattr(_bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    if attribute is None:
        return None
    status, value = attempt("cuDeviceGetAttribute", attribute, device)
    return None if status else int(value)


def parent_uuid(device: Any) -> bytes:
    """Return the 16 bytes that identify the whole device of a slice, empty when the driver cannot tell.

    The binding offers only the second version of ``cuDeviceGetUuid``, which answers for the slice; the first one
    answers for the device that it was cut from.
    """
    status, found = attempt("cuGetProcAddress", b"cuDeviceGetUuid", 9020, 0)
    if status or not found[0]:
        return b""
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int)(found[0])
    raw = ctypes.create_string_buffer(16)
    report("cuDeviceGetUuid")
    return raw.raw if function(raw, int(device)) == 0 else b""


def pointer_attribute(name: str, ptr: int) -> int | None:
    """Return ``CU_POINTER_ATTRIBUTE_<name>`` of ``ptr``, or None when the driver has no answer for it.

    Raises
    ------
    DeviceLostError
        An unknown pointer is an answer, a dead device is not.
    """
    attribute = getattr(_bindings().CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}", None)
    if attribute is None:
        return None
    status, value = attempt_pointer_attribute(int(attribute), ptr)
    if status in _NO_ANSWER:
        return None
    if status:
        raise error_for("cuPointerGetAttribute", status, name_of(status))
    return value


def attempt_pointer_attribute(attribute: int, ptr: int) -> tuple[int, int]:
    """Return status and value of one attribute, an unsigned number of at most 8 bytes.

    By ctypes: the binding of 13.3 knows some attributes by name and refuses to read them (TypeError).
    """
    _check_process()
    function = entry("cuPointerGetAttribute", 4000, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    value = (ctypes.c_uint64 * 2)()  # room for the one attribute that is longer
    report("cuPointerGetAttribute")
    return int(function(value, attribute, ptr)), int(value[0])


@functools.cache
def entry(name: str, version: int, *types: Any) -> Callable[..., int]:
    """Return the C function as it was in CUDA ``version``, for calls by the thousand; it returns its status.

    Nobody reports or checks its calls but the caller. It lets go of the GIL, as the binding's functions do.

    Raises
    ------
    CapabilityError
        When the driver does not have it, or not yet.
    """
    status, found = attempt("cuGetProcAddress", name.encode(), version, 0)
    if status or not found[0]:
        raise _missing(name, f"the driver does not have that of CUDA {version // 1000}.{version % 1000 // 10}")
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(found[0])


_NO_ANSWER = {1, 101, 201, 500, 801}


def relaxed_capture() -> Any:
    """Return the mode in which a thread's calls neither fail nor break a capture of another thread."""
    return _bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


def make(name: str, value: int) -> Any:
    """Return the binding's object of type ``name`` (a handle or an enumeration) for an integer."""
    return getattr(_bindings(), name)(value)


def handle_bytes(handle: Any) -> bytes:
    """Return the 64 bytes of an opaque handle. Fields of these objects come and go between binding versions."""
    return ctypes.string_at(handle.getPtr(), HANDLE_NBYTES)


def handle_from_bytes(type_name: str, payload: bytes) -> Any:
    """Return an opaque handle of binding type ``type_name`` holding exactly 64 bytes."""
    if len(payload) != HANDLE_NBYTES:
        raise ValueError(f"{type_name} has {HANDLE_NBYTES} bytes, not {len(payload)}")
    handle = getattr(_bindings(), type_name)()
    ctypes.memmove(handle.getPtr(), payload, HANDLE_NBYTES)
    return handle


def fd_handle_type() -> Any:
    """Return the handle type that is exported as a file descriptor."""
    return _bindings().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _fill_location(location: Any, ordinal: int) -> None:
    location.type = _bindings().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = ordinal


def allocation_prop(ordinal: int) -> Any:
    """Return properties of physical memory on device ``ordinal`` that can be exported as a file descriptor."""
    prop = _bindings().CUmemAllocationProp()
    prop.type = _bindings().CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.requestedHandleTypes = fd_handle_type()
    location = _bindings().CUmemLocation()
    _fill_location(location, ordinal)
    prop.location = location
    return prop


def pool_props(ordinal: int) -> Any:
    """Return properties of a pool on device ``ordinal`` that can be exported as a file descriptor."""
    props = _bindings().CUmemPoolProps()
    props.allocType = _bindings().CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.handleTypes = fd_handle_type()
    location = _bindings().CUmemLocation()
    _fill_location(location, ordinal)
    props.location = location
    return props


def access_desc(ordinal: int) -> Any:
    """Return the permission to read and write for device ``ordinal``."""
    desc = _bindings().CUmemAccessDesc()
    desc.flags = _bindings().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    location = _bindings().CUmemLocation()
    _fill_location(location, ordinal)
    desc.location = location
    return desc
