"""The one place that touches ``pyzes`` and the Level Zero loader: loading, calling, checking.

Owns the rules that there is one copy of the loader, that every call is reported, checked and refused after a fork, and
that functions which a loader or driver may lack are asked for before they are used. ``pyzes`` binds the management part
(Sysman) only, and raises while it is imported where the loader is not at the one path that it knows: then the loader is
found by name, and only management is missing. Loaders 1.8 to 1.32 are supported.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import threading
from collections.abc import Callable
from typing import Any

from devipc.spi import CapabilityError, DeviceLostError, DevIPCError, ForkError, report
from devipc_levelzero.abi import SIGNATURES, DriverProperties, make
from devipc_levelzero.status import NOT_READY, SUCCESS, error_for

__all__ = [
    "LOADER",
    "attempt",
    "bound",
    "call",
    "drivers",
    "extension",
    "has",
    "initialize",
    "loader_paths",
    "manages",
    "pyzes",
    "pyzes_version",
    "question",
    "quietly",
    "raw_driver",
    "versions",
    "why_no_pyzes",
]

LOADER = "libze_loader.so.1"
"""File name of the loader."""

_MASK = 0xFFFFFFFF  # ze_result_t is signed for ctypes
_HANDLE_DRIVER = 0  # ZEL_HANDLE_DRIVER
_GPU_ONLY = 1
_lock = threading.Lock()
_library: Any = None
_pyzes: Any = None
_why_no_pyzes = ""
_functions: dict[str, Any] = {}
_drivers: list[int] | None = None
_pid = 0


def loader_paths() -> list[str]:
    """Return the paths of all loader copies mapped into this process; more than one is a mix that does not work."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        found = {line.split(maxsplit=5)[5].strip() for line in maps if "/libze_loader.so" in line}
    return sorted(found)


def _load() -> Any:
    """Load the loader once."""
    global _library, _pid
    with _lock:
        if _library is None:
            _library = _choose()
            _pid = os.getpid()
        return _library


def _choose() -> Any:
    """Return the copy that is in the process already, else the one of ``pyzes``, else what the linker finds."""
    global _pyzes, _why_no_pyzes
    present = loader_paths()
    try:
        module = importlib.import_module("pyzes")
        found = module.gpuLib
    except Exception as error:  # it raises what its own loading raises
        found, _why_no_pyzes = None, f"pyzes cannot be imported ({error})"
    else:
        _pyzes = module
    if present and (found is None or loader_paths() != present):
        # Somebody else's copy came first, and a second one would know nothing of its devices.
        _pyzes, _why_no_pyzes = None, _why_no_pyzes or f"pyzes uses another copy of the loader than {present[0]}"
        return ctypes.CDLL(present[0])
    if found is not None:
        return found
    try:
        return ctypes.CDLL(LOADER)
    except OSError as error:
        raise CapabilityError(
            f"layer 'loader': {LOADER} cannot be loaded ({error})",
            code="no_library",
            remedy="install the Level Zero loader (Debian and Ubuntu: `apt-get install libze1`)",
            backend="levelzero",
        ) from error


def pyzes() -> Any:
    """Return the module ``pyzes``, or None where it is of no use; see :func:`why_no_pyzes`."""
    _load()
    return _pyzes


def why_no_pyzes() -> str:
    """Return why management calls cannot be made; empty when they can."""
    return _why_no_pyzes


def pyzes_version() -> str:
    """Return the version of pyzes, empty when it is not installed."""
    try:
        return importlib.metadata.version("pyzes")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _check_process() -> None:
    if _pid and os.getpid() != _pid:
        raise ForkError(
            "the Level Zero loader was loaded before this process was forked and cannot be used in it",
            remedy="start processes with the 'spawn' method, or fork before the first use of a device",
            backend="levelzero",
        )


def _function(name: str) -> Any:
    """Return a function with its signature; None where the loader does not have it."""
    if name not in _functions:
        try:
            found = _load()[name]  # a function object of our own: pyzes sets signatures on shared ones
        except AttributeError:
            found = None
        else:
            found.argtypes, found.restype = SIGNATURES[name], ctypes.c_int32
        _functions[name] = found
    return _functions[name]


def has(name: str) -> bool:
    """Return True when the loader has the function ``name``; the driver behind it may still lack it."""
    return _function(name) is not None


def attempt(name: str, *args: Any) -> int:
    """Call the C function ``name`` and return its result.

    Raises
    ------
    ForkError
        In a forked child.
    CapabilityError
        When loader or function are absent.
    """
    _check_process()
    function = _function(name)
    if function is None:
        raise CapabilityError(
            f"the Level Zero loader has no {name}",
            code="missing_symbol",
            remedy="install a newer loader (libze1)",
            backend="levelzero",
        )
    report(name)
    return int(function(*args)) & _MASK


def call(name: str, *args: Any, device: str = "") -> None:
    """Call the C function ``name``; a result other than success raises what it means.

    Raises
    ------
    DriverError, DeviceLostError, ResourceExhausted, CapabilityError
        As :func:`devipc_levelzero.status.error_for` says.
    """
    status = attempt(name, *args)
    if status:
        raise error_for(name, status, device=device)


def question(name: str, *args: Any) -> bool:
    """Call the C function ``name``, for which every failure, and its absence, is the answer "no".

    Raises
    ------
    DeviceLostError
        A dead device answers nothing.
    """
    if not has(name):
        return False
    status = attempt(name, *args)
    if status not in (SUCCESS, NOT_READY) and isinstance(error := error_for(name, status), DeviceLostError):
        raise error
    return status == SUCCESS


def quietly(function: Callable[..., object], *args: Any) -> None:
    """Undo something while another error is on its way: that one is the cause, and must not be hidden."""
    try:
        function(*args)
    except DevIPCError:
        pass


def bound(name: str, device: str) -> Callable[..., None]:
    """Return ``name`` for use in a loop: checked and reported like :func:`call`, but looked up once."""
    _check_process()
    function = _function(name)

    def run(*args: Any) -> None:
        report(name)
        status = int(function(*args)) & _MASK
        if status:
            raise error_for(name, status, device=device)

    return run


def initialize() -> None:
    """Load the loader and call ``zeInit`` once; later calls return at once.

    Raises
    ------
    CapabilityError
        Naming the layer that failed: loader or driver.
    """
    global _drivers
    _check_process()
    if _drivers is not None:
        return
    status = attempt("zeInit", _GPU_ONLY)
    found: list[int] = []
    if not status:
        count = ctypes.c_uint32(0)
        call("zeDriverGet", ctypes.byref(count), None)
        if count.value:  # a list of no drivers is asked for by nobody: some loaders follow the pointer
            handles = (ctypes.c_void_p * count.value)()
            call("zeDriverGet", ctypes.byref(count), handles)
            found = [int(handle) for handle in handles[: count.value] if handle]
    if not found:
        error = error_for("zeInit", status or 0x78000001)
        raise CapabilityError(
            f"layer 'driver': {error.message}; loader {', '.join(loader_paths())}",
            code=error.code,
            remedy=error.remedy,
            retryable=error.retryable,
            backend="levelzero",
            status=error.status,
        )
    _drivers = found


def drivers() -> list[int]:
    """Return the handles of all drivers, after :func:`initialize`."""
    return list(_drivers or ())


def versions(driver: int) -> tuple[str, str]:
    """Return a driver's own version, as the number that it gives, and that of the interface, as ``major.minor``."""
    found, api = make(DriverProperties), ctypes.c_uint32(0)
    call("zeDriverGetProperties", driver, ctypes.byref(found))
    call("zeDriverGetApiVersion", driver, ctypes.byref(api))
    return f"{found.version:#010x}", f"{api.value >> 16}.{api.value & 0xFFFF}"


def raw_driver(driver: int) -> int:
    """Return the driver's own handle: extension functions do not pass through the loader, which may have wrapped it."""
    _load()
    try:
        translate = _library["zelLoaderTranslateHandle"]
    except AttributeError:
        return driver
    translate.argtypes = (ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
    translate.restype = ctypes.c_int32
    out = ctypes.c_void_p()
    report("zelLoaderTranslateHandle")
    status = int(translate(_HANDLE_DRIVER, driver, ctypes.byref(out)))
    return int(out.value) if status == SUCCESS and out.value else driver


def extension(driver: int, name: str) -> Callable[..., int] | None:
    """Return a function that the driver has beside the standard, or None. Its result is not checked."""
    address = ctypes.c_void_p()
    status = attempt("zeDriverGetExtensionFunctionAddress", driver, name.encode(), ctypes.byref(address))
    if status or not address.value:
        return None
    function = ctypes.CFUNCTYPE(ctypes.c_int32, *SIGNATURES[name])(address.value)

    def run(*args: Any) -> int:
        _check_process()
        report(name)
        return int(function(*args)) & _MASK

    return run


def manages() -> bool:
    """Return True when the loader has management calls of their own start (``zesInit``)."""
    try:
        return bool(_load()["zesInit"])
    except AttributeError:
        return False
