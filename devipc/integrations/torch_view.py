"""torch tensors, in and out.

Owns what only torch can answer, and is the one file that imports it: when a tensor is really there or wanted. Where a
tensor lies is taken from the build of torch, not from its device string, which says the same for two vendors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from devipc.errors import CapabilityError, UsageError
from devipc.integrations.buffers import BufferView, make_view, reach, refuse
from devipc.integrations.dtypes import dtype_named
from devipc.integrations.pybuffer import buffer_at

if TYPE_CHECKING:
    import torch

    from devipc.integrations.foreign import ForeignBuffer

__all__ = ["describe_tensor", "to_tensor"]

_DEVICE_TYPES = {"xpu": "oneapi"}


def describe_tensor(tensor: torch.Tensor) -> BufferView:
    """Describe a strided tensor with memory; see :func:`devipc.integrations.describe`."""
    _check_plain(tensor)
    dtype = dtype_named(str(tensor.dtype).removeprefix("torch."))
    notes: tuple[str, ...] = ()
    if tensor.requires_grad:
        notes = ("detached: what a peer writes is not seen by autograd",)
    tensor = tensor.detach()  # always: the caller's own may be pointed at other memory later, by ``tensor.data = ...``
    try:
        ptr, storage = tensor.data_ptr(), tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    except (RuntimeError, NotImplementedError) as error:
        raise refuse(f"the tensor has no memory ({error})", "materialise it first") from error
    view = make_view(
        ptr=ptr,
        dtype=dtype,
        shape=tensor.shape,
        strides=tensor.stride(),
        device_type=_device_type(tensor),
        device_index=0 if tensor.device.type == "cpu" else tensor.device.index,
        readonly=False,
        owner=tensor,
        protocol="torch",
        notes=notes,
    )
    if view.span_ptr < start or view.span_ptr + view.span_nbytes > end:
        raise refuse(
            f"its elements reach over {view.span_nbytes} bytes, its storage has {end - start}",
            "the storage was resized under the tensor; make the tensor anew",
        )
    return view


def _check_plain(tensor: torch.Tensor) -> None:
    import torch

    kind = type(tensor)
    wrong = ""
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        wrong, remedy = f"a {kind.__name__} is computed, not stored", "share the plain tensors inside it"
    elif tensor.is_nested:
        wrong, remedy = "a nested tensor has no one shape", "share its buffer and offsets"
    elif tensor.layout is not torch.strided:
        wrong, remedy = f"a tensor of layout {tensor.layout} has no strides", "share its indices and values as tensors"
    elif tensor.device.type == "meta":
        wrong, remedy = "a meta tensor has no memory", "allocate it on a device"
    elif tensor.is_quantized:
        wrong, remedy = "a quantised tensor is more than its bytes", "share int_repr(), scale and zero point"
    elif tensor.is_conj():
        wrong, remedy = "the tensor is lazily conjugated: its bytes are not its values", "call resolve_conj() first"
    elif tensor.is_neg():
        wrong, remedy = "the tensor is lazily negated: its bytes are not its values", "call resolve_neg() first"
    if wrong:
        raise refuse(wrong, remedy)


def _device_type(tensor: torch.Tensor) -> str:
    import torch

    kind = tensor.device.type
    if kind == "cuda" and torch.version.hip is not None:
        return "rocm"
    return _DEVICE_TYPES.get(kind, kind)


def to_tensor(buffer: ForeignBuffer, *, allow_readonly: bool) -> torch.Tensor:
    """Return a tensor over ``buffer`` that keeps it alive; see :meth:`ForeignBuffer.to_torch`."""
    try:
        import torch
    except ImportError as error:
        raise CapabilityError("torch is not installed", remedy="pip install 'devipc[torch]'") from error
    dtype = getattr(torch, buffer.dtype.name, None)
    if dtype is None:
        raise CapabilityError(f"torch {torch.__version__} has no {buffer.dtype.name}", remedy="upgrade torch")
    if buffer.readonly and not allow_readonly:
        raise CapabilityError(
            "the memory is shared read-only, and torch has no read-only tensors",
            code="readonly",
            remedy="use to_numpy(), have it shared writable, or pass allow_readonly=True and never write",
        )
    if any(stride < 0 for stride in buffer.strides) or buffer.ptr % min(buffer.dtype.itemsize, 8):
        raise UsageError(
            f"torch cannot express strides {buffer.strides} at address {buffer.ptr:#x}",
            code="view",
            remedy="use to_numpy(), or share the bytes as uint8",
        )
    if math.prod(buffer.shape) == 0:
        # No byte is shared; where it cannot be placed, the device's own build of torch is missing all the same.
        return torch.empty(buffer.shape, dtype=dtype, device="cpu" if buffer.on_host else _torch_device(buffer))
    if buffer.on_host:
        _, high = reach(buffer.shape, buffer.strides)
        memory = buffer_at(buffer.ptr, (high + 1) * buffer.dtype.itemsize, owner=buffer)
        return torch.frombuffer(memory, dtype=dtype).as_strided(buffer.shape, buffer.strides)
    return _from_device(buffer, dtype)


def _torch_device(buffer: ForeignBuffer) -> str:
    kind, index = buffer.__dlpack_device__()
    return f"{'xpu' if kind == 14 else 'cuda'}:{index}"


def _from_device(buffer: ForeignBuffer, dtype: torch.dtype) -> torch.Tensor:
    """By DLPack, in elements that every torch takes: the narrow floats travel as bytes."""
    import torch
    from torch.utils.dlpack import from_dlpack

    narrow = buffer.dtype.name.startswith("float8")
    try:
        tensor: torch.Tensor = from_dlpack(_Bytes(buffer) if narrow else buffer)
    except Exception as error:
        raise CapabilityError(
            f"torch {torch.__version__} does not take memory of {buffer.device.name} ({type(error).__name__}: {error})",
            device=buffer.device.uuid,
            remedy="install the torch build of this device's vendor, and check that torch sees the device",
        ) from error
    return tensor.view(dtype) if narrow else tensor


class _Bytes:
    """``buffer`` with its elements called bytes; they have the same size."""

    def __init__(self, buffer: ForeignBuffer) -> None:
        self._buffer = buffer

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._buffer.__dlpack_device__()

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None, **_options: Any) -> object:
        return self._buffer.capsule(dtype_named("uint8"), max_version=max_version)
