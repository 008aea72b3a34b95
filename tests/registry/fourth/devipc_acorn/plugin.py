"""Entry point of the Acorn backend. Loads nothing: the backend is imported when the hook is called."""

from __future__ import annotations

from devipc.spi import Backend, hookimpl

__all__ = ["DEVIPC_CONTRACT", "devipc_backend"]

DEVIPC_CONTRACT = 1
"""The contract that this package was written for; devipc quarantines a plugin of another one."""


@hookimpl
def devipc_backend() -> Backend:
    """Return the backend."""
    from .backend import AcornBackend

    return AcornBackend()
