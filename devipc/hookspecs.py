"""The one hook by which a backend joins devipc, and the version of the contract behind it.

Owns the hook's signature. A plugin is a module named by an entry point of the group ``devipc.backends``; it carries
``DEVIPC_CONTRACT = 1`` and implements :func:`devipc_backend`. pluggy is imported only when a plugin is loaded.
"""

from __future__ import annotations

import pluggy

from devipc.interfaces.backend import Backend

__all__ = ["CONTRACT_VERSION", "PROJECT", "hookimpl", "hookspec"]

PROJECT = "devipc"
"""Name under which pluggy keeps the hook."""

CONTRACT_VERSION = 1
"""Version of everything that :mod:`devipc.spi` names; a plugin made for another one is quarantined."""

hookspec = pluggy.HookspecMarker(PROJECT)
"""Marks the specification below."""

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's implementation of :func:`devipc_backend`."""


@hookspec(firstresult=True)
def devipc_backend() -> Backend:  # type: ignore[empty-body]
    """Return the backend. Must not load a driver: that happens when a device is listed or opened."""
