"""What an object's memory looks like: address, elements, strides, device and the exact range of bytes behind them.

Owns :func:`describe` and the record that it returns. It asks objects by their protocols and copies nothing: what
cannot be expressed is refused. It calls no driver and does not know how memory is exported.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from devipc.errors import UsageError
from devipc.integrations.dtypes import DType, dtype_named, dtype_of_typestr
from devipc.interfaces.memory import Allocation
from devipc.types import DeviceInfo

__all__ = [
    "DLPACK_DEVICES",
    "BufferView",
    "check_device",
    "contiguous_strides",
    "describe",
    "make_view",
    "reach",
    "refuse",
]

DLPACK_DEVICES = {
    1: "cpu",
    2: "cuda",
    3: "cuda_host",
    10: "rocm",
    11: "rocm_host",
    13: "cuda_managed",
    14: "oneapi",
}
"""Our names of DLPack's device type codes (``DLDeviceType`` of its header 1.1)."""

_MAX_ADDRESS = 2**64
_BUFFER_KINDS = {**dict.fromkeys("bhilqn", "int"), **dict.fromkeys("BHILQNc", "uint"), **dict.fromkeys("efd", "float")}


@dataclass(frozen=True, slots=True, eq=False)
class BufferView:
    """Memory of somebody else, and how it is looked at. Never a copy.

    Parameters
    ----------
    ptr : int
        Address of element zero (all indices 0).
    dtype : str
        Element type in devipc's spelling, such as ``float16``, ``bfloat16``, ``float8_e4m3fn`` or ``uint8``.
    itemsize : int
        Bytes per element.
    shape : tuple of int
        Elements per dimension, each at least 1.
    strides : tuple of int
        Distance in *elements* per dimension; 0 where one element is seen many times, negative where order is reversed.
    device_type : str
        ``cpu``, ``cuda``, ``rocm``, ``oneapi`` and so on; empty when only the driver can tell (plain addresses).
        The framework's word for it does not decide: a ROCm build of torch says "cuda" for what is ``rocm`` here.
    device_index : int or None
        Position in this process; None when the object does not say.
    span_ptr, span_nbytes : int
        The smallest range of bytes that holds every element.
    readonly : bool
        True when the object says that it must not be written.
    owner : object
        Keeps the memory alive as long as it lives.
    protocol : str
        How the object was asked, with the protocol's version.
    notes : tuple of str
        What the caller should know, such as a gradient that is not followed.
    """

    ptr: int
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device_type: str
    device_index: int | None
    span_ptr: int
    span_nbytes: int
    readonly: bool
    owner: object
    protocol: str
    notes: tuple[str, ...] = ()


def describe(obj: object) -> BufferView:
    """Say what the memory of ``obj`` looks like, without copying a byte.

    Accepted are torch tensors, numpy arrays, objects with ``__dlpack__``, ``__cuda_array_interface__``,
    ``__array_interface__`` or the buffer protocol, ``(address, nbytes)`` pairs, and
    :class:`~devipc.interfaces.memory.Allocation`. Does not block, calls no driver, imports neither torch nor numpy.
    Any thread.

    Raises
    ------
    UsageError
        For an object without any element (no driver can share zero bytes; code ``empty``), and for whatever cannot be
        expressed as address, shape and strides of plain numbers: sparse, quantised, lazily conjugated or negated and
        meta tensors, masked arrays, records, objects, foreign byte order (codes ``view`` and ``dtype``).
    """
    if isinstance(obj, BufferView):
        return obj
    if isinstance(obj, Allocation):
        return _of_address(obj.ptr, obj.nbytes, owner=obj, protocol="allocation")
    if isinstance(obj, tuple):
        if len(obj) != 2 or not all(type(number) is int for number in obj):
            raise refuse(f"a tuple of {len(obj)} is no (address, nbytes)", "pass two integers")
        return _of_address(obj[0], obj[1], owner=None, protocol="address")
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(obj, torch.Tensor):
        from devipc.integrations.torch_view import describe_tensor

        return describe_tensor(obj)
    if numpy is not None and isinstance(obj, (numpy.ndarray, numpy.generic)):
        from devipc.integrations.numpy_view import check_array

        check_array(obj)
        return _of_interface(obj, obj.__array_interface__, "array_interface", device_type="cpu", device_index=0)
    return _of_protocol(obj)


def _of_protocol(obj: Any) -> BufferView:
    """Ask in the order of how much a protocol can say. Objects may raise anything while they are asked."""
    try:
        speaks_dlpack = hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__")
        of_device, of_host = (
            None if speaks_dlpack else getattr(obj, name, None)
            for name in ("__cuda_array_interface__", "__array_interface__")
        )
        memory = memoryview(obj) if not speaks_dlpack and of_device is None and of_host is None else None
    except Exception as error:
        raise refuse(
            f"an object of type {type(obj).__name__} shows no memory ({type(error).__name__}: {error})",
            "pass a tensor, an array, an open buffer, or (address, nbytes)",
        ) from error
    if speaks_dlpack:
        from devipc.integrations.dlpack import describe_dlpack

        return describe_dlpack(obj)
    if of_device is not None:
        return _of_interface(obj, of_device, "cuda_array_interface", device_type="cuda", device_index=None)
    if of_host is not None:
        return _of_interface(obj, of_host, "array_interface", device_type="cpu", device_index=0)
    assert memory is not None
    return _of_memoryview(memory)


def check_device(view: BufferView, device: DeviceInfo) -> None:
    """Check that ``view`` lies on ``device`` as far as the object says.

    Raises
    ------
    UsageError
        When it says another kind of device, or another index.
    """
    wanted = DLPACK_DEVICES.get(device.dlpack_type, "")
    # The older interface is spoken by more than one vendor's libraries under the same name.
    vague = view.protocol.startswith("cuda_array_interface") and wanted != "cpu"
    kind = view.device_type.removesuffix("_managed")  # the driver says better what is wrong with managed memory
    if wanted and kind and not vague and kind != wanted:
        raise UsageError(
            f"the object is {view.device_type} memory, this device's is {wanted}",
            code="wrong_device",
            remedy="share it through the backend of its own device",
            device=device.uuid,
        )
    if wanted != "cpu" and view.device_index is not None and view.device_index != device.ordinal:
        raise UsageError(
            f"the object lies on device {view.device_index}, this is device {device.ordinal}",
            code="wrong_device",
            remedy="open the device on which the object lies",
            device=device.uuid,
        )


# --- geometry -------------------------------------------------------------------------------------------------------


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides in elements of a dense array whose last index runs fastest."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def reach(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """Return the lowest and the highest element index that a non-empty view touches, relative to element zero."""
    ends = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    return sum(end for end in ends if end < 0), sum(end for end in ends if end > 0)


def make_view(
    *,
    ptr: int,
    dtype: DType,
    shape: Sequence[int],
    strides: Sequence[int] | None,
    device_type: str,
    device_index: int | None,
    readonly: bool,
    owner: object,
    protocol: str,
    notes: tuple[str, ...] = (),
) -> BufferView:
    """Check the geometry and complete it with its span; ``strides`` of None mean dense."""
    shape = tuple(index(extent) for extent in shape)
    strides = contiguous_strides(shape) if strides is None else tuple(index(stride) for stride in strides)
    if any(extent < 0 for extent in shape) or len(strides) != len(shape):
        raise refuse(f"shape {shape} with strides {strides} is no array", "the object's description is wrong")
    if math.prod(shape) == 0:
        raise UsageError(
            f"nothing to share: shape {shape} has no element", code="empty", remedy="skip empty arrays; see `numel()`"
        )
    low, high = reach(shape, strides)
    start, end = ptr + low * dtype.itemsize, ptr + (high + 1) * dtype.itemsize
    if start <= 0 or end > _MAX_ADDRESS:
        raise refuse(
            f"the bytes from {start:#x} to {end:#x} are no memory", "the object's memory was freed, or never was"
        )
    return BufferView(
        ptr, dtype.name, dtype.itemsize, shape, strides, device_type, device_index, start, end - start, readonly,
        owner, protocol, notes,
    )  # fmt: skip


def refuse(message: str, remedy: str) -> UsageError:
    """Return the error for a view that cannot be expressed."""
    return UsageError(message, code="view", remedy=remedy)


def _in_elements(strides: Sequence[int] | None, itemsize: int) -> tuple[int, ...] | None:
    if strides is None:
        return None
    if any(stride % itemsize for stride in strides):
        raise refuse(
            f"strides of {tuple(strides)} bytes are no multiple of the element's {itemsize}",
            "share the records as uint8 and cut the field out on the other side",
        )
    return tuple(stride // itemsize for stride in strides)


# --- protocols ------------------------------------------------------------------------------------------------------


def _of_address(ptr: int, nbytes: int, *, owner: object, protocol: str) -> BufferView:
    if ptr <= 0 or nbytes < 0:
        raise refuse(f"{nbytes} bytes at {ptr:#x} are no memory", "pass (address, nbytes), both positive")
    return make_view(
        ptr=ptr,
        dtype=dtype_named("uint8"),
        shape=(nbytes,),
        strides=None,
        device_type="",
        device_index=None,
        readonly=False,
        owner=owner,
        protocol=protocol,
    )


def _of_interface(
    obj: object, interface: Any, protocol: str, *, device_type: str, device_index: int | None
) -> BufferView:
    """Read an array interface, of which the host's and the device's version 3 are alike."""
    try:
        ptr, readonly = interface["data"]
        shape = tuple(index(extent) for extent in interface["shape"])
        typestr, version = str(interface["typestr"]), index(interface["version"])
        strides, mask, stream = (interface.get(key) for key in ("strides", "mask", "stream"))
        strides = None if strides is None else tuple(index(stride) for stride in strides)
        ptr = 0 if ptr is None else index(ptr)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise refuse(
            f"its array interface cannot be read ({error!r})", "pass the memory by (address, nbytes)"
        ) from None
    if mask is not None:
        raise refuse("a mask lies over the array", "share data and mask as two arrays")
    dtype = dtype_of_typestr(typestr)
    notes = ("its producer asks to be synchronised with a stream first",) if stream is not None else ()
    return make_view(
        ptr=ptr,
        dtype=dtype,
        shape=shape,
        strides=_in_elements(strides, dtype.itemsize),
        device_type=device_type,
        device_index=device_index,
        readonly=bool(readonly),
        owner=obj,
        protocol=f"{protocol} {version}",
        notes=notes,
    )


def _of_memoryview(memory: memoryview) -> BufferView:
    from devipc.integrations.pybuffer import address_of

    text = memory.format
    order, kind = (text[0], text[1:]) if text[:1] in tuple("@=<>!") else ("@", text)
    if order in ">!" and memory.itemsize > 1:
        raise refuse(f"elements of format {text!r} are in the other byte order", "share the bytes as uint8")
    family = "bool" if kind == "?" else _BUFFER_KINDS.get(kind)
    if family is None or memory.suboffsets:
        raise refuse(f"elements of format {text!r} are no plain numbers in one piece", "share the bytes as uint8")
    dtype = dtype_named(family if family == "bool" else f"{family}{8 * memory.itemsize}")
    return make_view(
        ptr=address_of(memory),
        dtype=dtype,
        shape=memory.shape or (),
        strides=_in_elements(memory.strides, dtype.itemsize),
        device_type="cpu",
        device_index=0,
        readonly=memory.readonly,
        owner=memory,
        protocol="buffer",
    )
