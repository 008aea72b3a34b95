"""devipc: share accelerator memory between processes and know when work on it is done.

Only names are defined here; everything heavier is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module

from devipc._version import __version__

# Checkers take the name for typing's own; importing typing would be most of what `import devipc` costs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from devipc import errors
    from devipc.registry import backend_names, load_backend
    from devipc.session import Exporter, Importer

__all__ = ["Exporter", "Importer", "__version__", "backend_names", "errors", "load_backend"]

_LAZY = {
    "Exporter": "devipc.session",
    "Importer": "devipc.session",
    "backend_names": "devipc.registry",
    "load_backend": "devipc.registry",
}


def __getattr__(name: str) -> object:
    if name == "errors":
        return import_module("devipc.errors")
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'devipc' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
