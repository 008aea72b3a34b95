"""Sizes of a runtime.

Owns the plain values that a runtime is made with, here or in another process.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RuntimeConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Sizes of a runtime.

    Parameters
    ----------
    model, revision : str
        Names of the weights: pages of others are never taken for theirs.
    pages : int
        Pages for requests and kept extents.
    page_tokens, chunk_tokens, max_requests : int
        As :class:`~devipc.hicache.reference.runtime.RuntimeLimits`.
    max_tokens : int
        Longest sequence.
    shuffle : int or None
        Seed that permutes the physical pages.
    itl_target_s : float or None
        Time between tokens beyond which backups are throttled.
    poison : bool
        Fill pages with NaN before something is restored to them, to prove that it was.
    """

    model: str
    revision: str = "1"
    pages: int = 256
    page_tokens: int = 16
    chunk_tokens: int = 16
    max_requests: int = 8
    max_tokens: int = 2048
    shuffle: int | None = None
    itl_target_s: float | None = None
    poison: bool = False
