"""Copies by the thousand: laid out by numpy as the driver's own structures, and handed over by address.

Owns what is cheap about submitting many copies, and the choice among the driver's forms of them. It checks no address
and opens no context: the caller has made it current. An object of the bindings for each copy would cost more than the
copy.

Sources: ``CUDA_MEMCPY2D`` has 16 words of 64 bits and ``CUDA_MEMCPY3D_BATCH_OP`` 14, ``CUmemcpyAttributes`` 24 bytes
(cuda.h of 12.8 and 13); a strided copy names its memory as ``unified``, so that the driver finds out what an address
is; batches make no promise about order, are refused on default streams, and since 13.0 return no failed index (CUDA
driver API, memory management).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from devipc.spi import CapabilityError, report
from devipc_cuda import driver
from devipc_cuda.status import error_for

__all__ = ["Submission", "U64Array"]

U64Array = npt.NDArray[np.uint64]
"""What a column of copies is."""

_UNIFIED = 4
_POINTER = 1
_STREAM_ORDER = 1
_NOT_SUPPORTED = 801
_BATCH_LEAST = 4
"""Below this a call for each copy is cheaper than a batch, which looks at every entry twice."""
_BOXES_LEAST = 65
"""The same for strided copies, of which the first runs while others are submitted one by one; a batch of 16 took 300 us
until its first began (H200, 2026-11-29), longer than a copy of 16 MB takes."""

_WORD, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_FLAT = (_WORD, _WORD, _SIZE, _WORD)
_STRIDED = (_WORD, _WORD)
_LINEAR_BATCH = (_WORD, _WORD, _WORD, _SIZE, _WORD, _WORD, _SIZE)
_BOX_BATCH = (_SIZE, _WORD)


class Submission:
    """Puts copies on streams. One for a device; any thread.

    Attributes
    ----------
    missing : dict of str to str
        Batch calls that this driver does not have, and why.
    """

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}
        self._start = np.zeros(1, np.uint64)
        self._attributes = np.array([_STREAM_ORDER, 0, 0, 0, 0, 0], np.uint32)

    def flat(self, native: Any, dst: U64Array, src: U64Array, nbytes: U64Array, *, batch: bool) -> None:
        """Submit contiguous copies, none of them empty; ``batch`` where the stream takes batches."""
        if batch and len(dst) >= _BATCH_LEAST and self._linear_batch(native, dst, src, nbytes):
            return
        copy = driver.entry("cuMemcpyAsync", 4000, *_FLAT)
        stream = int(native)
        for to, back, length in zip(dst.tolist(), src.tolist(), nbytes.tolist(), strict=True):
            report("cuMemcpyAsync")
            if status := copy(to, back, length, stream):
                raise error_for("cuMemcpyAsync", status, driver.name_of(status))

    def strided(self, native: Any, copies: U64Array, *, batch: bool) -> None:
        """Submit strided copies ``(n, 6)``, none of them empty, at pitches that the driver takes."""
        if batch and len(copies) >= _BOXES_LEAST and self._box_batch(native, copies):
            return
        words = np.zeros((len(copies), 16), np.uint64)
        words[:, 2] = words[:, 9] = _UNIFIED
        words[:, 11], words[:, 4], words[:, 13], words[:, 6], words[:, 14], words[:, 15] = copies.T
        copy = driver.entry("cuMemcpy2DAsync", 3020, *_STRIDED)
        stream, first = int(native), words.ctypes.data
        for address in range(first, first + words.nbytes, words.strides[0]):
            report("cuMemcpy2DAsync")
            if status := copy(address, stream):
                raise error_for("cuMemcpy2DAsync", status, driver.name_of(status))

    def _linear_batch(self, native: Any, dst: U64Array, src: U64Array, nbytes: U64Array) -> bool:
        dst, src, nbytes = (np.ascontiguousarray(column) for column in (dst, src, nbytes))
        arguments = (
            dst.ctypes.data,
            src.ctypes.data,
            nbytes.ctypes.data,
            len(dst),
            self._attributes.ctypes.data,
            self._start.ctypes.data,
            1,
        )
        return self._try("cuMemcpyBatchAsync", native, _LINEAR_BATCH, arguments, ())

    def _box_batch(self, native: Any, copies: U64Array) -> bool:
        words = np.zeros((len(copies), 14), np.uint64)
        words[:, 0] = words[:, 5] = _POINTER
        words[:, 6], words[:, 1], words[:, 7], words[:, 2], words[:, 10], words[:, 11] = copies.T
        words[:, 12] = 1
        words[:, 13] = _STREAM_ORDER
        return self._try("cuMemcpy3DBatchAsync", native, _BOX_BATCH, (len(copies), words.ctypes.data), (0,))

    def _try(
        self, name: str, native: Any, types: tuple[Any, ...], before: tuple[int, ...], flags: tuple[int, ...]
    ) -> bool:
        """Call a batch; False when it is absent or refuses, and then the caller submits one by one.

        Copying a range twice is harmless. An absence is remembered, a refusal is not: its cause may be an address.
        """
        if name in self.missing:
            return False
        behind = (ctypes.c_uint64,) * len(flags) + (_WORD,)
        try:
            call, failed = _versioned(name, types, behind)
        except CapabilityError as error:
            self.missing[name] = str(error)
            return False
        report(name)
        status = call(*before, *(ctypes.addressof(one) for one in failed), *flags, int(native))
        if status == _NOT_SUPPORTED:
            self.missing[name] = f"{name} -> {status}"
        return status == 0


def _versioned(
    name: str, before: tuple[Any, ...], behind: tuple[Any, ...]
) -> tuple[Callable[..., int], tuple[ctypes.Array[ctypes.c_size_t], ...]]:
    """Return the call and what goes between its arguments, by address: a place for the failed index, before 13.0."""
    try:
        return driver.entry(name, 13000, *before, *behind), ()
    except CapabilityError:
        failed = (ctypes.c_size_t * 1)()
        return driver.entry(name, 12080, *before, _WORD, *behind), (failed,)  # kept for the time of the call
