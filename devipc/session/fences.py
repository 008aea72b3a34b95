"""The fences that this process shares by name.

Owns the table. No driver call is made under its lock: a slow device must not stop a peer's question for another name.
"""

from __future__ import annotations

import logging
import threading

from devipc import completion
from devipc.completion import FenceHandle, ProducerFence
from devipc.errors import ClosedError, HandleError, UsageError
from devipc.interfaces.backend import Device
from devipc.session.messages import MAX_NAMES
from devipc.session.shares import check_name
from devipc.types import Strategy

__all__ = ["FenceTable"]

_log = logging.getLogger("devipc.session")


class FenceTable:
    """Fences of one endpoint by name. Any thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._fences: dict[str, ProducerFence] = {}
        self._coming: set[str] = set()
        self._closed = False

    def create(self, name: str, strategy: Strategy) -> ProducerFence:
        """Make a fence and share it as ``name``; see :meth:`devipc.session.Endpoint.create_fence`."""
        check_name(name)
        with self._lock:
            self._fences = {known: fence for known, fence in self._fences.items() if not fence.closed}
            if name in self._fences or name in self._coming:
                raise UsageError(f"a fence is shared as {name!r} already", code="duplicate", remedy="use another name")
            if len(self._fences) + len(self._coming) >= MAX_NAMES:
                raise UsageError(f"more than {MAX_NAMES} fences", remedy="close those that are no longer used")
            self._coming.add(name)
        fence = None
        try:
            fence = completion.create_fence(self._device, strategy)
        finally:
            with self._lock:
                self._coming.discard(name)
                late = self._closed
                if fence is not None and not late:
                    self._fences[name] = fence
        if late:
            fence.close()
            raise ClosedError("the session is closed", remedy="make a new one")
        return fence

    def names(self) -> list[str]:
        """Return the names that can be opened now."""
        with self._lock:
            return sorted(name for name, fence in self._fences.items() if not fence.closed)

    def lend(self, name: str) -> tuple[ProducerFence, FenceHandle]:
        """Return the fence ``name`` and a new consumer's handle of it, whose descriptors pass to the caller."""
        with self._lock:
            fence = self._fences.get(name)
        if fence is None or fence.closed:
            known = ", ".join(self.names()[:8]) or "none"
            raise HandleError(f"no fence is shared as {name!r}", code="unknown_name", remedy=f"fences: {known}")
        return fence, fence.export()

    def close(self, *, timeout_s: float) -> None:
        """Close every fence, and refuse new ones."""
        with self._lock:
            self._closed = True
            fences = list(self._fences.values())
        for fence in fences:
            try:
                fence.close(timeout_s=timeout_s)
            except Exception as error:  # what a driver refuses must not keep the others open
                _log.warning("closing: %r", error)
