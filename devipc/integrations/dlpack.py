"""DLPack both ways: a description read out of a capsule, and a capsule made for memory that we mapped.

Owns the C structures (header 1.1, both the classic and the versioned form). A capsule's deleter is called by its
consumer on any thread, with or without the interpreter's lock, during the handling of an exception and after the
interpreter's end: Python code cannot be that deleter. numpy's can, so it makes our capsules, and what they say about
device and elements is written into them afterwards.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from devipc.errors import CapabilityError, DevIPCError, UsageError
from devipc.integrations.buffers import DLPACK_DEVICES, BufferView, make_view, refuse
from devipc.integrations.dtypes import DType, dtype_of_dlpack

__all__ = ["READ_ONLY", "describe_dlpack", "make_capsule"]

VERSION = (1, 1)
READ_ONLY = 1
"""Flag of the versioned form: the consumer must not write."""

_IS_COPIED = 2
_MAX_DIMENSIONS = 64
_DEVICES_WITH_STREAMS = (2, 10, 13)
_CLASSIC, _VERSIONED = b"dltensor", b"dltensor_versioned"


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# Own prototypes: argtypes set on ctypes.pythonapi itself would be everybody's.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


# --- producing ------------------------------------------------------------------------------------------------------


class _Carrier:
    """What numpy makes an array of: right in address, geometry and size of the elements. Nobody reads through it."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def make_capsule(
    *,
    ptr: int,
    dtype: DType,
    shape: Sequence[int],
    strides: Sequence[int],
    device: tuple[int, int],
    readonly: bool,
    owner: object,
    max_version: tuple[int, int] | None,
) -> object:
    """Return a capsule that keeps ``owner`` alive until its consumer calls the deleter, or until nobody consumed it.

    The versioned form is made when ``max_version`` is at least (1, 0).

    Raises
    ------
    CapabilityError
        For read-only memory and a consumer that takes the classic form only, which cannot say so; without numpy.
    UsageError
        For negative strides, or an address that is no multiple of the element's size: consumers take both for granted.
    """
    if any(stride < 0 for stride in strides):
        raise UsageError("negative strides do not travel by DLPack", code="view", remedy="share the array unreversed")
    if ptr % min(dtype.itemsize, 8):
        raise UsageError(
            f"address {ptr:#x} is no multiple of the {dtype.itemsize} bytes of a {dtype.name}",
            code="view",
            remedy="share the bytes as uint8",
        )
    interface = {
        "data": (ptr, readonly),
        "shape": tuple(shape),
        "strides": tuple(stride * dtype.itemsize for stride in strides),
        "typestr": dtype.typestr or f"|V{dtype.itemsize}",
        "version": 3,
    }
    versioned = max_version is not None and tuple(max_version) >= (1, 0)
    capsule = _carry(_Carrier(interface, owner), dtype.itemsize, readonly=readonly, versioned=versioned)
    tensor, _, _ = _read(capsule)
    tensor.device_type, tensor.device_id = device
    tensor.code, tensor.bits, tensor.lanes = dtype.dlpack_code, 8 * dtype.itemsize, 1
    return capsule


def _carry(carrier: _Carrier, itemsize: int, *, readonly: bool, versioned: bool) -> object:
    """Have numpy make the capsule, in elements that it can export."""
    try:
        import numpy
    except ImportError as error:
        raise CapabilityError(
            "DLPack capsules are made by numpy, which is not installed", remedy="install numpy"
        ) from error
    array = numpy.asarray(carrier)
    if array.dtype.kind == "V":
        array = array.view(f"u{itemsize}")
    can_version = numpy.lib.NumpyVersion(numpy.__version__) >= "2.1.0"
    if readonly and not (versioned and can_version):
        raise CapabilityError(
            "read-only memory, and a DLPack version on one side that cannot say so",
            code="readonly",
            remedy="upgrade the consumer to DLPack 1.0 and numpy to 2.1, or share the memory writable",
        )
    if versioned and can_version:
        return array.__dlpack__(max_version=VERSION)
    return array.__dlpack__()


# --- consuming ------------------------------------------------------------------------------------------------------


def describe_dlpack(obj: Any) -> BufferView:
    """Describe an object by the capsule that it makes; the capsule itself is kept, unconsumed, as the owner.

    No stream is synchronised: ordering is the business of fences.
    """
    try:
        device_type, device_id = (int(number) for number in obj.__dlpack_device__())
        capsule = _capsule_of(obj, device_type)
    except DevIPCError:
        raise
    except Exception as error:
        raise refuse(
            f"{type(obj).__name__} makes no DLPack capsule ({type(error).__name__}: {error})",
            "detach it from what keeps it from being shared, or pass (address, nbytes)",
        ) from error
    tensor, flags, protocol = _read(capsule)
    if flags & _IS_COPIED:
        raise refuse(f"{type(obj).__name__} would share a copy of its memory", "share an object that is no lazy view")
    if (tensor.device_type, tensor.device_id) != (device_type, device_id):
        raise refuse("its capsule names another device than the object itself", "pass (address, nbytes)")
    if not 0 <= tensor.ndim <= _MAX_DIMENSIONS or (tensor.ndim and not tensor.shape):
        raise refuse(f"its capsule has {tensor.ndim} dimensions", "pass (address, nbytes)")
    shape = tensor.shape[: tensor.ndim]
    return make_view(
        ptr=(tensor.data or 0) + tensor.byte_offset,
        dtype=dtype_of_dlpack(tensor.code, tensor.bits, tensor.lanes),
        shape=shape,
        strides=tensor.strides[: tensor.ndim] if tensor.strides else None,
        device_type=DLPACK_DEVICES.get(device_type, f"dlpack_{device_type}"),
        device_index=device_id,
        readonly=bool(flags & READ_ONLY),
        owner=(obj, capsule),
        protocol=protocol,
    )


def _capsule_of(obj: Any, device_type: int) -> object:
    stream = {"stream": -1} if device_type in _DEVICES_WITH_STREAMS else {}  # -1: do not synchronise
    try:
        return obj.__dlpack__(max_version=VERSION, copy=False, **stream)
    except TypeError:  # written before DLPack 1.0
        return obj.__dlpack__(**stream)


def _read(capsule: object) -> tuple[_Tensor, int, str]:
    """Return the tensor in a capsule, its flags, and how the capsule was made."""
    if _is_valid(capsule, _VERSIONED):
        managed = _ManagedVersioned.from_address(_pointer(capsule, _VERSIONED))
        if managed.major != VERSION[0]:
            raise refuse(f"DLPack {managed.major}.{managed.minor} is not known here", "pass (address, nbytes)")
        return managed.tensor, managed.flags, f"dlpack {managed.major}.{managed.minor}"
    if _is_valid(capsule, _CLASSIC):
        return _Managed.from_address(_pointer(capsule, _CLASSIC)).tensor, 0, "dlpack 0"
    raise refuse("its __dlpack__ returned no DLPack capsule", "pass (address, nbytes)")
