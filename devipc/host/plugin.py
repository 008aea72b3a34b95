"""Entry point of the host backend in the group ``devipc.backends``.

Owns the hook alone; the backend is imported when the hook is called.
"""

from __future__ import annotations

from devipc.spi import CONTRACT_VERSION, Backend, hookimpl

__all__ = ["DEVIPC_CONTRACT", "devipc_backend"]

DEVIPC_CONTRACT = CONTRACT_VERSION
"""Contract that this plugin was written for; the built-in one moves with the core."""


@hookimpl
def devipc_backend() -> Backend:
    """Return the host backend."""
    from devipc.host.backend import HostBackend

    return HostBackend()
