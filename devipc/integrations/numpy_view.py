"""numpy arrays, in and out.

Owns the checks that only numpy can answer. Imported when an array is really there or wanted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from devipc.errors import CapabilityError
from devipc.integrations.buffers import refuse

if TYPE_CHECKING:
    import numpy

    from devipc.integrations.foreign import ForeignBuffer

__all__ = ["check_array", "to_array", "u64_array"]


def check_array(array: Any) -> None:
    """Refuse what has an array interface and yet is not memory with plain elements.

    Raises
    ------
    UsageError
        For scalars (their interface shows a temporary) and masked arrays (their mask would be dropped).
    """
    import numpy

    if isinstance(array, numpy.generic):
        raise refuse(f"a {type(array).__name__} is a value without memory of its own", "share an array that holds it")
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise refuse("a mask lies over the array", "share .data and .mask as two arrays")


def u64_array(values: Sequence[int] | Sequence[Sequence[int]]) -> numpy.ndarray[Any, Any]:
    """Return a C-contiguous uint64 array, the form in which descriptors of copies are passed.

    Raises
    ------
    CapabilityError
        When numpy is not installed.
    """
    try:
        import numpy
    except ImportError as error:
        raise CapabilityError("numpy is not installed", remedy="pip install numpy") from error
    return numpy.ascontiguousarray(values, dtype=numpy.uint64)


def to_array(buffer: ForeignBuffer) -> numpy.ndarray[Any, Any]:
    """Return an array over ``buffer`` whose ``base`` keeps it alive; see :meth:`ForeignBuffer.to_numpy`."""
    try:
        import numpy
    except ImportError as error:
        raise CapabilityError("numpy is not installed", remedy="pip install 'devipc[hicache]', or numpy") from error
    if not buffer.on_host:
        raise CapabilityError(
            f"memory of {buffer.device.name} is not addressable by the host",
            device=buffer.device.uuid,
            remedy="use to_torch(), or copy it to the host first",
        )
    if not buffer.dtype.typestr:
        raise CapabilityError(
            f"numpy has no {buffer.dtype.name}",
            code="dtype",
            remedy=f"use to_torch(), or share it as uint{8 * buffer.dtype.itemsize}",
        )
    return numpy.asarray(buffer)
