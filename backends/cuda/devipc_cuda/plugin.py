"""What the entry point ``cuda`` names: the contract's version and the hook that returns the backend.

Loads no driver and no binding.
"""

from __future__ import annotations

from devipc.spi import Backend, hookimpl
from devipc_cuda.backend import CudaBackend

__all__ = ["DEVIPC_CONTRACT", "devipc_backend"]

DEVIPC_CONTRACT = 1
"""Version of the contract that this package was written against."""


@hookimpl
def devipc_backend() -> Backend:
    """Return the CUDA backend; no driver call is made."""
    return CudaBackend()
