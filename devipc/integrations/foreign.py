"""Mapped memory as an object that array libraries understand.

Owns the way out: protocols for whoever asks, tensors and arrays on request, nothing copied. Every view keeps the
buffer alive, and the buffer one count of its mapping. It does not know where the mapping came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from devipc.errors import CapabilityError, UsageError
from devipc.integrations.buffers import DLPACK_DEVICES, contiguous_strides
from devipc.integrations.dtypes import DType, dtype_named
from devipc.integrations.keeper import ViewKeeper
from devipc.types import DeviceInfo

if TYPE_CHECKING:
    import numpy
    import torch

__all__ = ["ForeignBuffer"]

_HOST = (1, 3, 11)
_DEVICE_INTERFACE = (2, 10, 13)


class ForeignBuffer:
    """A view of mapped memory. Offers ``__dlpack__``, and the array interface that fits the device.

    Whoever holds this object, or anything made from it, keeps the mapping. Any thread. No protocol orders accesses:
    that is what fences are for, so streams that consumers pass are not waited for.

    Parameters
    ----------
    ptr : int
        Address of element zero.
    dtype : str
        Element type in devipc's spelling.
    shape : sequence of int
        Elements per dimension; 0 is allowed.
    strides : sequence of int or None
        Distance in elements per dimension; None for a dense array. The caller has checked that all of it is mapped.
    device : DeviceInfo
        Where the memory lies; its ``dlpack_type`` decides which protocols can be spoken.
    readonly : bool
        True when nothing may be written through this view.
    keeper : ViewKeeper
        Counts the views of the mapping.

    Raises
    ------
    UsageError
        For an unknown element type or a shape that is none.
    ClosedError
        When the mapping is closed already.
    ForkError
        In a forked child, by every method too.
    """

    __slots__ = ("__weakref__", "_hold", "_keeper", "device", "dtype", "ptr", "readonly", "shape", "strides")

    def __init__(
        self,
        *,
        ptr: int,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        device: DeviceInfo,
        readonly: bool = False,
        keeper: ViewKeeper,
    ) -> None:
        self.ptr = ptr
        self.dtype = dtype_named(dtype)
        self.shape = tuple(shape)
        self.strides = contiguous_strides(self.shape) if strides is None else tuple(strides)
        if ptr <= 0 or len(self.strides) != len(self.shape) or any(extent < 0 for extent in self.shape):
            raise UsageError(
                f"shape {self.shape} with strides {self.strides} at {ptr:#x} is no array",
                remedy="check what the exporter announced",
            )
        self.device = device
        self.readonly = readonly
        self._keeper = keeper
        self._hold = keeper.hold()

    @property
    def on_host(self) -> bool:
        """True when the host can address the memory."""
        return self.device.dlpack_type in _HOST

    def __dlpack_device__(self) -> tuple[int, int]:
        kind = self.device.dlpack_type
        if kind == 0:
            raise CapabilityError(
                f"no array library knows the device {self.device.name}",
                device=self.device.uuid,
                remedy="use the address, or a backend that names its DLPack device type",
            )
        return kind, 0 if kind == 1 else self.device.ordinal

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise CapabilityError(
                "this memory is shared, never copied", code="copy", remedy="copy the tensor after it was made"
            )
        return self.capsule(self.dtype, max_version=max_version)

    def capsule(self, dtype: DType, *, max_version: tuple[int, int] | None) -> Any:
        """Return a DLPack capsule that calls the elements ``dtype``, of the same size; raises as ``__dlpack__``."""
        from devipc.integrations.dlpack import make_capsule

        self._keeper.check_process()
        return make_capsule(
            ptr=self.ptr,
            dtype=dtype,
            shape=self.shape,
            strides=self.strides,
            device=self.__dlpack_device__(),
            readonly=self.readonly,
            owner=self,
            max_version=max_version,
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.device.dlpack_type not in _DEVICE_INTERFACE or not self.dtype.typestr:
            raise AttributeError("this memory or element type is not known to the interface")
        return {**self._interface(), "stream": None}

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if not self.on_host or not self.dtype.typestr:
            raise AttributeError("this memory or element type is not known to the interface")
        return self._interface()

    def _interface(self) -> dict[str, Any]:
        self._keeper.check_process()
        strides = tuple(stride * self.dtype.itemsize for stride in self.strides)
        return {
            "data": (self.ptr, self.readonly),
            "shape": self.shape,
            "strides": strides,
            "typestr": self.dtype.typestr,
            "version": 3,
        }

    def to_numpy(self) -> numpy.ndarray[Any, Any]:
        """Return a zero-copy array, read-only where the memory is.

        Raises
        ------
        CapabilityError
            For memory that the host cannot address, element types that numpy lacks, and without numpy.
        """
        from devipc.integrations.numpy_view import to_array

        return to_array(self)

    def to_torch(self, *, allow_readonly: bool = False) -> torch.Tensor:
        """Return a zero-copy tensor.

        Parameters
        ----------
        allow_readonly : bool
            torch has no read-only tensors. True: the caller promises not to write, which would change the exporter's
            data or end this process.

        Raises
        ------
        CapabilityError
            For read-only memory without that promise, a torch build that does not know the device, and without torch.
        UsageError
            For negative strides and misaligned addresses, which torch cannot express.
        """
        from devipc.integrations.torch_view import to_tensor

        self._keeper.check_process()
        return to_tensor(self, allow_readonly=allow_readonly)

    def __repr__(self) -> str:
        where = DLPACK_DEVICES.get(self.device.dlpack_type, self.device.name)
        access = "read-only" if self.readonly else "writable"
        return f"ForeignBuffer({self.dtype.name}{list(self.shape)} on {where}, {access})"
