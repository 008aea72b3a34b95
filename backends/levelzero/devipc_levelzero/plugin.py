"""What the entry point ``levelzero`` names: the contract's version and the hook that returns the backend.

Loads no loader, no driver and no binding.
"""

from __future__ import annotations

from devipc.spi import Backend, hookimpl
from devipc_levelzero.backend import LevelZeroBackend

__all__ = ["DEVIPC_CONTRACT", "devipc_backend"]

DEVIPC_CONTRACT = 1
"""Version of the contract that this package was written against."""


@hookimpl
def devipc_backend() -> Backend:
    """Return the Level Zero backend; no driver call is made."""
    return LevelZeroBackend()
