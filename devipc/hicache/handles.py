"""What a caller of the cache holds and passes: pools, ready points, checked arrays.

Owns values and no rule about operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from devipc.completion import Fence
from devipc.errors import BoundsError, DevIPCError, UsageError
from devipc.hicache.keys import KEY_NBYTES
from devipc.hicache.layout import Advice, PoolLayout
from devipc.hicache.requests import Keys, PageIds, ReadyPoint
from devipc.interfaces.memory import DeviceMemoryIPC

__all__ = [
    "UNFENCED",
    "FencePoint",
    "NeverReady",
    "PoolHandle",
    "check_exports",
    "check_keys",
    "check_pages",
    "check_ready",
    "ready_failure",
]


@dataclass(frozen=True, slots=True)
class FencePoint:
    """A value of a fence as a ready point: pages are touched once it is reached, never when the fence is poisoned."""

    fence: Fence
    n: int

    def reached(self) -> bool:
        """Return True when it is reached. Raises FencePoisoned."""
        return self.fence.query(self.n)


class _Unfenced:
    def reached(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class NeverReady:
    """A point that nobody will reach: there was no engine to make one with. What is submitted behind it fails."""

    error: DevIPCError

    def reached(self) -> bool:
        """Raise the reason."""
        raise self.error


UNFENCED: ReadyPoint = _Unfenced()
"""Says that nothing on any stream touches the pages any more. Unsafe when that is not so: nobody checks it."""


@dataclass(frozen=True, slots=True)
class PoolHandle:
    """A registered pool; what every operation on its pages is given.

    Parameters
    ----------
    number, generation : int
        Its identity with this client.
    layout : PoolLayout
        As registered.
    namespace : bytes
        Digest; the parent of the first page's key.
    groups : tuple of tuple of int
        Layers of each group of a restore.
    advice : tuple of Advice
        What will be slow, and what to change.
    page_nbytes : int
        Bytes of one page in host memory.
    """

    number: int
    generation: int
    layout: PoolLayout
    namespace: bytes
    groups: tuple[tuple[int, ...], ...]
    advice: tuple[Advice, ...]
    page_nbytes: int


def check_pages(pages: npt.ArrayLike) -> PageIds:
    """Return page ids as a copy, int64 ``(n,)``."""
    try:
        found = np.array(pages)
    except ValueError as error:
        raise UsageError(f"pages: {error}", code="shape", remedy="pass integers (n,)") from error
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise UsageError(f"pages {found.dtype} of shape {found.shape}", code="shape", remedy="pass integers (n,)")
    return found.astype(np.int64)


def check_keys(keys: Keys) -> Keys:
    """Return page keys as a copy, uint8 ``(n, 16)``."""
    found = np.array(keys)
    if found.ndim != 2 or found.dtype != np.uint8 or found.shape[1] != KEY_NBYTES:
        raise UsageError(f"keys {found.dtype} of shape {found.shape}", code="key", remedy="pass uint8 (n, 16)")
    return found


def check_ready(point: ReadyPoint) -> ReadyPoint:
    """Return a ready point; what cannot be asked is refused while the caller can still be told."""
    if not callable(getattr(point, "reached", None)):
        raise UsageError(
            f"{point!r} is no ready point", code="ready_point", remedy="pass a stream, a FencePoint, or UNFENCED"
        )
    return point


def ready_failure(error: BaseException) -> DevIPCError:
    """Return the error of an operation whose ready point raised ``error``, instead of an answer."""
    if isinstance(error, DevIPCError):
        return error
    return DevIPCError(
        f"the ready point failed: {type(error).__name__}: {error}",
        code="ready_point",
        remedy="pass a stream, or a point that answers True or False",
    )


def check_exports(memory: DeviceMemoryIPC | None, exports: tuple[tuple[int, int], ...]) -> None:
    """Refuse ranges (address, nbytes) that leave the allocation which the driver reports; raises BoundsError."""
    for ptr, nbytes in exports if memory is not None else ():
        assert memory is not None
        found = memory.describe(ptr)
        if not found.base <= ptr <= ptr + nbytes <= found.base + found.nbytes:
            raise BoundsError(
                f"[{ptr:#x}, {ptr + nbytes:#x}) leaves the allocation of {found.nbytes} bytes that the driver"
                f" reports ({found.kind.value})",
                remedy="pass the ranges that belong to the layout's chunks, in chunk order",
            )
