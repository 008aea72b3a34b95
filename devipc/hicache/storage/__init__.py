"""The seam to the storage tier: what the engine will ask of whoever keeps pages on disk or elsewhere.

Owns the contract only. There is no implementation yet, and nothing calls it: a prefetch is refused, and a backup ends
when its pages are visible in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Storage"]

Mask = npt.NDArray[np.bool_]


class Storage(Protocol):
    """Keeps whole pages by name. Every method may block; all are called off the engine's own threads.

    A page that cannot be read whole and unchanged is a miss, whatever the cause. A page that was written is there
    whole or not at all, after a crash too.
    """

    def exists(self, namespace: bytes, names: Sequence[bytes]) -> Mask:
        """Return which pages are there, bool ``(n,)``: a hint."""
        ...

    def read(self, namespace: bytes, names: Sequence[bytes], targets: Sequence[memoryview]) -> Mask:
        """Fill one buffer a page; return which are filled, bool ``(n,)``. What the others hold is undefined."""
        ...

    def write(self, namespace: bytes, names: Sequence[bytes], sources: Sequence[memoryview]) -> Mask:
        """Keep one buffer a page; return which are kept, bool ``(n,)``."""
        ...

    def remove(self, namespace: bytes, names: Sequence[bytes]) -> None:
        """Forget pages; those that are not there are passed over."""
        ...
