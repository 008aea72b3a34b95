"""The session of an engine process with one client: what it asks the driver shows in the pulse, however long it lasts.

Owns which calls of a session are made in what. It knows no pool and no page.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from devipc.interfaces.backend import Device
from devipc.session import Exporter
from devipc.session.inside import SUBMISSIONS, inside

if TYPE_CHECKING:
    from devipc.hicache.engineproc.clients import EngineClient

__all__ = ["ClientExporter"]


class ClientExporter(Exporter):
    """See the module.

    Parameters
    ----------
    path, options
        See :class:`~devipc.session.Exporter`.
    client : EngineClient
        Whose session it is.
    """

    def __init__(self, path: str, client: EngineClient, **options: Any) -> None:
        self._client = client
        with client.pulse.beside():  # opens the device
            super().__init__(path, **options)

    @property
    def fence_device(self) -> Device:
        """See :class:`~devipc.session.Endpoint`. What is submitted is the lanes', who are in the pulse anyway."""
        return inside(self.device, self._client.pulse.beside, direct=SUBMISSIONS)

    @property
    def trial_device(self) -> Device:
        """See :class:`~devipc.session.Endpoint`."""
        return inside(self.device, self._client.pulse.beside)

    def driving(self) -> AbstractContextManager[object]:
        """See :class:`~devipc.session.Endpoint`."""
        return self._client.driving()

    def not_unmapped(self, error: Exception) -> None:
        """See :class:`~devipc.session.Endpoint`."""
        self._client.lose(error)
