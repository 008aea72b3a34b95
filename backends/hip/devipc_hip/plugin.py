"""What the entry point ``hip`` names: the contract's version and the hook that returns the backend.

Loads no driver and no binding.
"""

from __future__ import annotations

from devipc.spi import Backend, hookimpl
from devipc_hip.backend import HipBackend

__all__ = ["DEVIPC_CONTRACT", "devipc_backend"]

DEVIPC_CONTRACT = 1
"""Version of the contract that this package was written against."""


@hookimpl
def devipc_backend() -> Backend:
    """Return the HIP backend; no driver call is made."""
    return HipBackend()
