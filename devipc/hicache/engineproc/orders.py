"""From an entry of a ring to an order to copy that was checked: pages and places, a client, its pool in use.

Owns the order that was taken ahead. What is wrong with one is said in it, for whoever reports; nothing is submitted
here.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from devipc.errors import DevIPCError, StaleError
from devipc.hicache.engine.localcopies import LocalCopies, PlannedAhead
from devipc.hicache.engineproc.clients import Clients, EngineClient, MappedPool
from devipc.hicache.engineproc.timeline import Timeline
from devipc.hicache.planning.planner import Direction
from devipc.hicache.requests import PageIds
from devipc.hicache.tier.records import Places
from devipc.hicache.wire import jobs as j
from devipc.hicache.wire.ring import Consumer

__all__ = ["CopyOrder", "Orders", "RefusedOrder"]


@dataclass(slots=True)
class CopyOrder:
    """What is to be copied. Its pool is in use: whoever takes it gives it to the client's ``unuse`` when it is over."""

    move: j.Move
    pages: PageIds
    places: Places
    client: EngineClient
    timeline: Timeline
    pool: MappedPool
    planned: PlannedAhead | None = None


@dataclass(frozen=True, slots=True)
class RefusedOrder:
    """The number of an order of which nothing will be done, and why."""

    job: int
    error: DevIPCError


class Orders:
    """See the module. One thread at a time.

    Parameters
    ----------
    ring : Consumer
        Not owned.
    clients : Clients
        Whose pools are named.
    copies : LocalCopies
        Plans ahead.
    direction : Direction
        Which way.
    """

    def __init__(self, ring: Consumer, clients: Clients, copies: LocalCopies, direction: Direction) -> None:
        self._ring = ring
        self._clients = clients
        self._copies = copies
        self._direction = direction
        self._ahead: CopyOrder | RefusedOrder | bytes | None = None

    @property
    def empty(self) -> bool:
        """True when none was taken ahead."""
        return self._ahead is None

    def take(self, *, timeout_s: float) -> CopyOrder | RefusedOrder:
        """Return the next order; waits for one. Errors as the ring's, and WireError for what is none."""
        ahead, self._ahead = self._ahead, None
        if isinstance(ahead, CopyOrder | RefusedOrder):
            return ahead
        return self._checked(self._ring.take(timeout_s=timeout_s) if ahead is None else ahead)

    def take_ahead(self) -> None:
        """Take the next order, if there is one, and plan it, while the last one is still being submitted.

        What is wrong with it, or with the ring, :meth:`take` or whoever plans it meets again; only a defect is raised.
        """
        if self._ahead is not None:
            return
        with contextlib.suppress(DevIPCError):
            self._ahead = body = self._ring.take(timeout_s=0.0, spin=False)
            self._ahead = order = self._checked(body)
            if isinstance(order, CopyOrder):
                order.planned = self._copies.plan(order.pool.planner, self._direction, order.pages, order.places)

    def _checked(self, body: bytes) -> CopyOrder | RefusedOrder:
        move = j.decode_move(body)
        try:
            pages, places = j.lists_of(move)
            client = self._clients.get(move.client)
            client.slots.check(move.slot)
            timeline = client.timelines.get(self._direction)
            if timeline is None:
                raise StaleError("the client's session has no fences", remedy="attach again")
            return CopyOrder(move, pages, places, client, timeline, client.use((move.pool, move.generation)))
        except DevIPCError as error:
            return RefusedOrder(move.job, error)
