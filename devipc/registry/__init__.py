"""Backends by name: loaded each alone, tried in a child where they may crash, and chosen with reasons.

Owns names only; :mod:`~devipc.registry.plugins` finds and loads, :mod:`~devipc.registry.check` tries and chooses.
"""

from __future__ import annotations

from devipc.registry.check import BackendCheck, BackendChoice, check_backend_in_child, default_backend
from devipc.registry.plugins import (
    DISABLE_VARIABLE,
    ENTRY_POINT_GROUP,
    Quarantined,
    backend_names,
    load_backend,
    quarantined,
)

__all__ = [
    "DISABLE_VARIABLE",
    "ENTRY_POINT_GROUP",
    "BackendCheck",
    "BackendChoice",
    "Quarantined",
    "backend_names",
    "check_backend_in_child",
    "default_backend",
    "load_backend",
    "quarantined",
]
