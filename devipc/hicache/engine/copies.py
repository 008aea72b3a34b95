"""Copies, Job and Carrier: what an engine's operations need of whoever moves the bytes.

Owns the contracts only. Tables, keys, room and deadlines are the engine's, wherever it runs; a carrier knows pools,
pages and places in the arena. One is in this process (:mod:`~devipc.hicache.engine.localcopies`), one stands for an
engine process (:mod:`~devipc.hicache.daemon.remotecopies`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from devipc.errors import DevIPCError
from devipc.hicache.engine.pools import Pool
from devipc.hicache.planning.planner import Direction
from devipc.hicache.requests import CompletionFence, PageIds, RegisterPool
from devipc.hicache.tier.records import Places

__all__ = ["Carrier", "Copies", "Job", "OpenedPool", "Opener"]

OpenedPool = object
"""A pool as its carrier knows it; kept in :attr:`Pool.opened`, and handed back by whoever moves its pages."""
Opener = Callable[[OpenedPool | DevIPCError], None]
"""Takes an opened pool, or why it was not opened; called once, on any thread, perhaps before the call returned."""


class Job(Protocol):
    """The copies of one operation, in flight."""

    @property
    def error(self) -> DevIPCError | None:
        """Why they failed; what they wrote is then unknown. Valid once :meth:`poll` returned True."""
        ...

    def poll(self) -> bool:
        """Return True once nothing of it can move any more. Does not block.

        Raises
        ------
        DevIPCError
            While that cannot be known: the pages stay in use.
        """
        ...


class Copies(Protocol):
    """One direction of one device, as its lane sees it; called from the lane's thread. Nothing blocks.

    Attributes
    ----------
    wake : callable
        Set by the lane before the first job. A carrier that learns of ends by itself calls it, on any thread.
    """

    wake: Callable[[], None]

    @property
    def wakes(self) -> bool:
        """True when every end of a job, and every ready point, wakes the lane. False: the lane looks all the time."""
        ...

    def announce(self) -> None:
        """Note that :meth:`start` is about to be called, perhaps; whoever moves the pages may wake for it."""
        ...

    def start(self, pool: Pool, direction: Direction, pages: PageIds, places: Places, fence: CompletionFence) -> Job:
        """Begin to move ``pages`` of ``pool``, in order behind what was started before; ``places`` may be none.

        ``fence`` is that of the request, signalled by layer group. Whatever fails is the job's error.
        """
        ...

    def close(self) -> None:
        """Give everything back. Called once, when no job is in flight, or none will ever end."""
        ...


class Carrier(Protocol):
    """Both directions of one device, and the memory of clients that it reaches. Any thread."""

    @property
    def device_uuid(self) -> str:
        """Identity of the device."""
        ...

    @property
    def unpinned_reason(self) -> str:
        """Why the arena is not pinned, with the remedy; empty when it is."""
        ...

    @property
    def floor_nbytes_per_s(self) -> float:
        """What one contiguous copy to the device moves, measured at the start; 0 when it was not to be measured."""
        ...

    def plans(self) -> dict[str, dict[str, int]]:
        """Return by direction how many copies were submitted in each of :data:`~devipc.hicache.moving.fan.FORMS`."""
        ...

    def copies(self, direction: Direction) -> Copies:
        """Return what moves pages in that direction; asked once each."""
        ...

    def open_pool(self, owner: bytes, request: RegisterPool, done: Opener) -> None:
        """Reach a client's pool, and call ``done``; neither blocks nor raises.

        Parameters
        ----------
        owner : bytes
            The client, as :meth:`~devipc.hicache.engine.Engine.attach` was told.
        request : RegisterPool
            What is asked.
        done : callable
            Takes what is to be kept for :meth:`close_pool`, or the error.
        """
        ...

    def close_pool(self, opened: OpenedPool, done: Callable[[], None]) -> None:
        """Let a pool go that nothing uses any more, and call ``done`` once nothing reaches its memory. Never blocks.

        ``done`` is called once, on any thread, perhaps before this returned.
        """
        ...

    def close(self) -> None:
        """Give the device's part back, when both directions were closed. Blocks while the driver does."""
        ...
