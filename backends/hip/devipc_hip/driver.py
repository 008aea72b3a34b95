"""The one place that touches ``rocm.bindings.hip``: loading, calling, checking, and what the binding gets wrong.

Owns the rule that every call is reported, checked and refused after a fork, and the hiding of binding objects: the
rest of the package passes and gets integers and bytes. Knows nothing of memory kinds or fences.

What is handled here, seen with hip-python 10.0: it loads a copy of the runtime of its own choice, even when the process
has one loaded (torch brings its own); statuses that its enumeration lacks raise ``ValueError``, an absent library or
symbol ``RuntimeError``; after a failure the value slots hold garbage; 64-byte handles can be read and not written, so
plain bytes are passed; ``hipThreadExchangeStreamCaptureMode`` passes an uninitialised mode and ``hipMemcpyBatchAsync``
uninitialised arrays, so both are called by ctypes on the library that the binding loaded. Its structures are those of
ROCm 6, so that older runtimes are refused. Its flags above 2**31 are negative, and one of its structures hides the
handle types: numbers and layouts are this package's own.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from devipc.spi import CapabilityError, DeviceLostError, DevIPCError, ForkError, report
from devipc_hip.installed import OLDEST_RUNTIME, bindings_version, library_paths, version_text
from devipc_hip.status import error_for

__all__ = [
    "DEFAULT_COPY",
    "DMABUF",
    "FD",
    "attempt",
    "bindings_version",
    "bound",
    "call",
    "copy_batch",
    "device_attribute",
    "exchange_capture_mode",
    "export_fd",
    "has",
    "initialize",
    "library_paths",
    "name_of",
    "pointer_attribute",
    "question",
    "quietly",
    "runtime_version",
    "text",
    "uuid_bytes",
    "version_text",
]

FD = ("hipMemAllocationHandleType", 1)
"""The handle type that is a file descriptor."""
DMABUF = ("hipMemRangeHandleType", 1)
"""A dma-buf of an address range."""
DEFAULT_COPY = ("hipMemcpyKind", 4)
"""Copies whose sides the runtime finds out."""

_UNKNOWN_STATUS = re.compile(r"(\d+) is not a valid")
_lock = threading.Lock()
_module: Any = None
_initialized = False
_pid = 0


def _bindings() -> Any:
    global _module, _pid
    if _module is None:
        with _lock:
            try:
                module = importlib.import_module("rocm.bindings.hip")
                if _module is None:
                    _prefer_loaded_library()
            except ImportError as error:
                raise CapabilityError(
                    f"layer 'bindings': rocm.bindings.hip cannot be imported ({error})",
                    code="no_bindings",
                    remedy="pip install 'hip-python>=10.0'",
                    backend="hip",
                ) from error
            _pid, _module = os.getpid(), module  # last: from here on others make calls, which load a library
    return _module


def _prefer_loaded_library() -> None:
    """Make the binding use the copy of the runtime that this process has loaded: two do not know of each other."""
    if loaded := library_paths():
        paths: Any = importlib.import_module("rocm.bindings.util.paths")
        find = paths.get_library_path
        paths.get_library_path = lambda name: loaded[0].encode() if name == "amdhip64" else find(name)


def _check_process() -> None:
    if _initialized and os.getpid() != _pid:
        raise ForkError(
            "the HIP runtime was initialised before this process was forked and cannot be used in it",
            remedy="start processes with the 'spawn' method, or fork before the first use of a device",
            backend="hip",
        )


def initialize() -> None:
    """Load the runtime, check its version and call ``hipInit`` once; later calls return at once.

    Raises
    ------
    CapabilityError
        Naming the layer that failed: bindings, library, runtime or initialisation.
    """
    global _initialized, _pid
    _check_process()
    if _initialized:
        return
    version = int(call("hipRuntimeGetVersion"))
    if version < OLDEST_RUNTIME:
        raise CapabilityError(
            f"layer 'runtime': HIP runtime {version_text(version)} is older than 6.0, and the bindings lay out"
            " properties and memory types as ROCm 6 and newer do",
            code="old_runtime",
            remedy="update ROCm to 6.0 or newer",
            backend="hip",
        )
    call("hipInit", 0)
    _pid = os.getpid()
    _initialized = True


def runtime_version() -> int:
    """Return the runtime's version, as it counts: 7.2.1 is 70_200_001."""
    return int(call("hipRuntimeGetVersion"))


def attempt(name: str, *args: Any) -> tuple[int, Any]:
    """Call the C function ``name``; return its status and its value (a tuple for several, None for none or failure).

    A failure does not stay behind as the thread's last error, where a framework would take it for its own.

    Raises
    ------
    ForkError
        In a forked child.
    CapabilityError
        When library or function are absent.
    """
    _check_process()
    status, values = _invoke(_function(name), name, args)
    if status or not values:
        return status, None
    plain = tuple(_plain(value) for value in values)
    return 0, plain[0] if len(plain) == 1 else plain


def _function(name: str) -> Callable[..., Any]:
    function = getattr(_bindings(), name, None)
    if function is None:
        raise _missing(name, "the bindings do not have it")
    return function  # type: ignore[no-any-return]


def _invoke(function: Callable[..., Any], name: str, args: tuple[Any, ...]) -> tuple[int, tuple[Any, ...]]:
    report(name)
    try:
        result = function(*(_enumerated(function, name, arg) for arg in args))
        status = int(result[0])
    except ValueError as error:
        found = _UNKNOWN_STATUS.search(str(error))
        if found is None:
            raise
        result, status = (), int(found[1])
    except RuntimeError as error:
        raise _missing(name, str(error)) from error
    if status:
        _forget_failure()
    return status, result[1:]


def _forget_failure() -> None:
    """Take the thread's last error back; asking for one that the enumeration lacks raises once more."""
    try:
        _bindings().hipGetLastError()
    except ValueError:
        pass


def _enumerated(function: Callable[..., Any], name: str, arg: Any) -> Any:
    """Pairs ``("hipMemcpyKind", 4)`` stand for members of the binding's enumerations."""
    return getattr(_bindings(), arg[0])(arg[1]) if isinstance(arg, tuple) else arg


def _plain(value: Any) -> Any:
    """Return integers for handles, pointers and enumerations, bytes for opaque handles."""
    if value is None:
        return 0
    if isinstance(value, int | bytes):
        return int(value) if isinstance(value, int) else value
    opaque = getattr(value, "reserved", None)
    return bytes(opaque) if opaque is not None else int(value)


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
        As :func:`devipc_hip.status.error_for` says.
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


def bound(name: str, *last: tuple[str, int]) -> Callable[..., None]:
    """Return ``name`` for use in a loop: checked and reported like :func:`call`, but looked up once, without value.

    ``last`` are enumeration members to be put in front of the last argument, which is the stream.
    """
    _check_process()
    function = _function(name)
    members = tuple(_enumerated(function, name, member) for member in last)

    def run(*args: Any) -> None:
        status, _ = _invoke(function, name, (*args[:-1], *members, args[-1]))
        if status:
            raise error_for(name, status, name_of(status))

    return run


def has(name: str) -> bool:
    """Return True when the loaded library exports ``name``; False also when there is no library."""
    return bool(_bindings().has_symbol(name))


def _missing(name: str, text: str) -> CapabilityError:
    text = " ".join(text.split())
    if "dlopen" in text:
        return CapabilityError(
            f"layer 'library': libamdhip64.so cannot be loaded ({text})",
            code="no_library",
            remedy="install ROCm's HIP runtime with its unversioned libamdhip64.so (Debian: libamdhip64-dev), or set"
            " ROCM_PATH to the folder that holds lib/libamdhip64.so",
            backend="hip",
        )
    return CapabilityError(
        f"the runtime has no {name} ({text})",
        code="missing_symbol",
        remedy="update ROCm",
        backend="hip",
    )


def name_of(status: int) -> str:
    """Return the vendor's name of a status, empty for unknown ones.

    Taken from the binding's enumeration: asking the runtime could fail too, and hide the status.
    """
    try:
        return str(_bindings().hipError_t(status).name)
    except ValueError:
        return ""


def text(name: str, *args: Any) -> str:
    """Call a function that fills a text, ``hipDeviceGetName`` or ``hipDeviceGetPCIBusId``, and return it."""
    _check_process()
    status, values = _invoke(_function(name), name, args)
    if status:
        raise error_for(name, status, name_of(status))
    return ctypes.string_at(int(values[0])).decode("utf-8", "replace").strip()


def uuid_bytes(ordinal: int) -> bytes:
    """Return the device's 16 bytes of identity."""
    status, values = _invoke(_function("hipDeviceGetUuid"), "hipDeviceGetUuid", (ordinal,))
    if status:
        raise error_for("hipDeviceGetUuid", status, name_of(status))
    return ctypes.string_at(int(values[0].as_c_void_p().value), 16)


def device_attribute(name: str, ordinal: int) -> int | None:
    """Return ``hipDeviceAttribute<name>``, or None when runtime or bindings do not know it."""
    attribute = getattr(_bindings().hipDeviceAttribute_t, f"hipDeviceAttribute{name}", None)
    if attribute is None:
        return None
    status, value = attempt("hipDeviceGetAttribute", attribute, ordinal)
    return None if status else int(value)


def pointer_attribute(name: str, ptr: int) -> int | None:
    """Return ``HIP_POINTER_ATTRIBUTE_<name>`` of ``ptr``, or None when the runtime has no answer for it.

    Raises
    ------
    DeviceLostError
        An unknown pointer is an answer, a dead device is not.
    """
    attribute = getattr(_bindings().hipPointer_attribute, f"HIP_POINTER_ATTRIBUTE_{name}", None)
    if attribute is None:
        return None
    value = (ctypes.c_uint64 * 2)()  # room for the one attribute that is longer
    status, _ = attempt("hipPointerGetAttribute", value, attribute, ptr)
    if not status:
        return int(value[0])
    error = error_for("hipPointerGetAttribute", status, name_of(status))
    if isinstance(error, DeviceLostError):
        raise error
    return None


def export_fd(name: str, *before: Any, after: tuple[Any, ...]) -> int:
    """Call a function whose first argument is where a descriptor goes; return it, closed on exec and the caller's."""
    fd = (ctypes.c_int * 1)(-1)
    call(name, fd, *before, *after)
    os.set_inheritable(fd[0], False)
    return int(fd[0])


# --- past the bindings ------------------------------------------------------------------------------------------------


@functools.cache
def _library() -> ctypes.CDLL:
    """Return the library that the bindings loaded, for ctypes; calls release the GIL."""
    call("hipGetDevice")
    return ctypes.CDLL(library_paths()[0])


def _direct(name: str, *args: Any) -> int:
    _check_process()
    try:
        function = getattr(_library(), name)
    except AttributeError as error:
        raise _missing(name, str(error)) from error
    report(name)
    status = int(function(*args))
    if status:
        _forget_failure()
    return status


def exchange_capture_mode(mode: int) -> int | None:
    """Set how this thread's calls meet captures of other threads; return the mode before, None when it failed."""
    value = ctypes.c_int(mode)
    status = _direct("hipThreadExchangeStreamCaptureMode", ctypes.byref(value))
    return None if status else value.value


def copy_batch(dst: Sequence[int], src: Sequence[int], nbytes: Sequence[int], stream: int) -> int:
    """Submit copies in one call, in any order; return the status.

    Raises
    ------
    CapabilityError
        When the runtime does not have the call: 6.4 has not, 7.15 has.
    """
    n = len(dst)
    array = ctypes.c_uint64 * n
    failed = ctypes.c_size_t()
    return _direct(
        "hipMemcpyBatchAsync",
        array(*dst),
        array(*src),
        array(*nbytes),
        ctypes.c_size_t(n),
        None,
        None,
        ctypes.c_size_t(0),
        ctypes.byref(failed),
        ctypes.c_void_p(stream),
    )
