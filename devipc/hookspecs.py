"""The one hook by which a backend joins devipc, and the version of the contract behind it.

Owns the hook's signature. A plugin is a module named by an entry point of the group ``devipc.backends``; it carries
``DEVIPC_CONTRACT = 1`` and implements :func:`devipc_backend`. pluggy is imported only when a plugin is loaded.
"""

from __future__ import annotations

import pluggy

from devipc.interfaces.backend import Backend

__all__ = ["CONTRACT_VERSION", "ENTRY_POINT_GROUP", "PROJECT", "hookimpl", "hookspec"]

PROJECT = "devipc"
ENTRY_POINT_GROUP = "devipc.backends"
CONTRACT_VERSION = 1

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def devipc_backend() -> Backend:  # type: ignore[empty-body]
    """Return the backend. Must not load a driver: that happens when a device is listed or opened."""
