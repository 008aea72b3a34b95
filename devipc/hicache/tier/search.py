"""Searching an engine's index, whichever engine serves now.

Owns the reader in use: it is replaced when another engine serves, and never closed under a search.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from devipc.hicache.requests import Keys
from devipc.hicache.tier.index import IndexReader

__all__ = ["Search"]


class Search:
    """See the module. Any thread; a search waits for another one, and for nobody else.

    Parameters
    ----------
    reader : IndexReader
        Owned, as are those that follow.
    """

    def __init__(self, reader: IndexReader) -> None:
        self._reader = reader
        self._lock = threading.Lock()

    def find(self, names: Keys, page_nbytes: int) -> npt.NDArray[np.bool_]:
        """Return which of ``names`` are there, bool ``(n,)``: those whose pages have this size."""
        with self._lock:
            hit, nbytes = self._reader.find(names)
        hit &= nbytes == page_nbytes
        return hit

    def expire(self) -> None:
        """Miss everything from now on. Never blocks."""
        self._reader.expire()

    def use(self, reader: IndexReader) -> None:
        """Search with another reader from now on."""
        with self._lock:
            self._reader.close()
            self._reader = reader

    def close(self) -> None:
        """Give the reader back; everything is a miss from now on."""
        with self._lock:
            self._reader.close()
