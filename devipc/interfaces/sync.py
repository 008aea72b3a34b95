"""DeviceSyncIPC: the driver primitives from which fences between processes are made.

Owns the contract only. What a fence *means* (timeline, poison, deadlines, rules about legal waits) is written once,
in :mod:`devipc.completion`, on top of these primitives: see ``docs/decisions``. A primitive that a platform lacks is
absent (``None``), with the reason in :meth:`DeviceSyncIPC.mechanisms`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from devipc.capabilities import Capability
from devipc.interfaces.transfer import Stream
from devipc.types import Mechanism

__all__ = ["DeviceSyncIPC", "InterprocessEvent", "InterprocessEvents", "WordWaits", "WordWrites"]


class WordWrites(Protocol):
    """Stores that a stream performs on a 64-bit word of registered host memory."""

    def write(self, stream: Stream, device_ptr: int, value: int) -> None:
        """Enqueue: after all earlier work of ``stream`` is done *and visible*, store ``value`` at ``device_ptr``.

        ``device_ptr`` is 8-byte aligned inside a :class:`~devipc.interfaces.transfer.HostRegistration`; the store has
        system scope, does not tear, and makes earlier writes of the stream visible to the host and to peers first.
        Refuses capturing streams with :class:`~devipc.errors.UsageError`.
        """
        ...


class WordWaits(Protocol):
    """Waits that a stream performs on a 64-bit word of registered host memory, released by device or host stores."""

    def wait(self, stream: Stream, device_ptr: int, value: int) -> None:
        """Enqueue: later work of ``stream`` starts once the word is ``>= value`` (64 bit; values below 2**63).

        Refuses capturing streams with :class:`~devipc.errors.UsageError`.
        """
        ...


class InterprocessEvent(Protocol):
    """One event of the vendor, made here or opened from a peer."""


class InterprocessEvents(Protocol):
    """Events that two processes share. Imported events are only ever *queried*, by the host."""

    def create(self) -> InterprocessEvent:
        """Make an event that can be exported (no timing). Limited: callers keep a bounded ring of them."""
        ...

    def export(self, event: InterprocessEvent) -> bytes:
        """Return the bytes by which a peer opens ``event``; it must stay alive until every peer has closed it."""
        ...

    def open(self, payload: bytes) -> InterprocessEvent:
        """Open a peer's event. Wrong sizes raise :class:`~devipc.errors.HandleError` before any driver call.

        May block in some drivers: call it under a deadline.
        """
        ...

    def record(self, event: InterprocessEvent, stream: Stream) -> None:
        """Set the event behind all work of ``stream`` so far. Only its maker records it."""
        ...

    def query(self, event: InterprocessEvent) -> bool:
        """Return the vendor's answer. Beware: vendors answer True for an event that was never recorded."""
        ...

    def destroy(self, event: InterprocessEvent) -> None:
        """Give an event back, made or opened."""
        ...


@runtime_checkable
class DeviceSyncIPC(Protocol):
    """What one device offers for learning across processes that work is done."""

    @property
    def word_writes(self) -> WordWrites | None:
        """Stream stores on registered words, or None."""
        ...

    @property
    def word_waits(self) -> WordWaits | None:
        """Stream waits on registered words, or None."""
        ...

    @property
    def events(self) -> InterprocessEvents | None:
        """Inter-process events, or None."""
        ...

    def mechanisms(self) -> Mapping[Mechanism, Capability]:
        """Return every mechanism with what is known about it without trying; trying is the chooser's job."""
        ...
