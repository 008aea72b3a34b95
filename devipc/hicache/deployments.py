"""Which deployment a URL stands for.

Owns that table. Clients are made from a link and never ask where it leads.
"""

from __future__ import annotations

from devipc.errors import CapabilityError, UsageError
from devipc.hicache.engine import EngineConfig
from devipc.hicache.links import EngineLink
from devipc.hicache.local import LocalEngine, LocalLink
from devipc.interfaces.backend import Device

__all__ = ["open_link"]


def open_link(
    url: str, *, device: Device | None, config: EngineConfig | None, engine: LocalEngine | None
) -> EngineLink:
    """Return the link that ``url`` stands for; see :func:`devipc.hicache.api.connect`."""
    if url.startswith("unix:"):
        raise CapabilityError(
            "this version has no cache daemon to connect to", code="no_daemon", remedy="use inproc:, in each scheduler"
        )
    if url != "inproc:" or (device is None) == (engine is None):
        raise UsageError(
            f"{url!r} with {'both' if device and engine else 'neither'} device and engine"
            if url == "inproc:"
            else f"{url!r} is no cache URL",
            code="url",
            remedy="pass 'inproc:' and either device= or engine=",
        )
    if engine is not None:
        return LocalLink(engine, owned=False)
    assert device is not None
    return LocalLink(LocalEngine(device, config), owned=True)
