"""Which deployment a URL stands for.

Owns that table. Clients are made from a link and never ask where it leads.
"""

from __future__ import annotations

from collections.abc import Collection

from devipc.errors import UsageError
from devipc.hicache.client.daemonlink import DaemonLink
from devipc.hicache.client.links import EngineLink
from devipc.hicache.engine.transferengine import EngineConfig
from devipc.hicache.local import LocalEngine, LocalLink
from devipc.interfaces.backend import Device

__all__ = ["open_link"]

_UNIX = "unix:"


def open_link(
    url: str,
    *,
    device: Device | None,
    config: EngineConfig | None,
    engine: LocalEngine | None,
    wait_s: float,
    allow_uids: Collection[int],
) -> EngineLink:
    """Return the link that ``url`` stands for; see :func:`devipc.hicache.api.connect`."""
    if url.startswith(_UNIX):
        if config is not None or engine is not None:
            raise UsageError(
                "a daemon has its engine and its configuration",
                code="url",
                remedy="configure `devipc hicache serve`, and pass neither config= nor engine=",
            )
        return DaemonLink(url.removeprefix(_UNIX), device=device, wait_s=wait_s, allow_uids=allow_uids)
    if url != "inproc:" or (device is None) == (engine is None):
        raise UsageError(
            f"{url!r} with {'both' if device and engine else 'neither'} device and engine"
            if url == "inproc:"
            else f"{url!r} is no cache URL",
            code="url",
            remedy="pass 'inproc:' and either device= or engine=, or 'unix:/path'",
        )
    if engine is not None:
        return LocalLink(engine, owned=False)
    assert device is not None
    return LocalLink(LocalEngine(device, config), owned=True)
