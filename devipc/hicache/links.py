"""EngineLink: how a client reaches its engine, whichever deployment that is.

Owns the contract only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from devipc.hicache.index import IndexReader
from devipc.hicache.operations import Event
from devipc.hicache.requests import Answers, ReadyPoint, Request, SignalledFence
from devipc.hicache.ticket import WaitFence
from devipc.interfaces.transfer import Stream

__all__ = ["EngineLink", "LinkFence"]


class LinkFence(SignalledFence, WaitFence, Protocol):
    """A completion fence of one operation: the end that is sent along, and the one that stays."""


class EngineLink(Protocol):
    """Carries requests there, and answers back in order for each operation. Any thread."""

    @property
    def layer_groups(self) -> Sequence[int]:
        """Sizes of the engine's first layer groups."""
        ...

    def attach(self, answers: Answers) -> None:
        """Begin; from now on answers may come."""
        ...

    def reader(self) -> IndexReader:
        """Return a reader of the index, which is the caller's."""
        ...

    def reach(self, exports: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        """Make memory of this process (address, nbytes) reachable for the engine; return its addresses there."""
        ...

    def ready(self, stream: Stream) -> ReadyPoint:
        """Return a point behind all work of ``stream`` so far."""
        ...

    def fence(self) -> LinkFence:
        """Return a fence for one operation."""
        ...

    def submit(self, request: Request) -> None:
        """Hand a request over. Does not wait for what becomes of it."""
        ...

    def tell(self, op: int, event: Event) -> None:
        """Say something about an operation that was submitted. Does not wait."""
        ...

    def close(self, timeout_s: float) -> None:
        """Leave: when this returns, the engine touches nothing of the client's.

        Raises
        ------
        CompletionTimeout
            When it still does; may be called again.
        """
        ...
