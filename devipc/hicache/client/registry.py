"""Registering pools and letting them go, on the client's side.

Owns the numbers of pools, and the rule that a pool is left once. It knows neither who opens a pool nor how.
"""

from __future__ import annotations

import contextlib
import itertools
import threading

from devipc.deadline import deadline_after, remaining
from devipc.errors import CompletionTimeout, DevIPCError, StaleError, UsageError
from devipc.hicache.builders import BuiltPool
from devipc.hicache.client.desk import Desk
from devipc.hicache.client.links import EngineLink, PoolMemory
from devipc.hicache.client.ticket import Ticket
from devipc.hicache.handles import PoolHandle
from devipc.hicache.keys import Namespace
from devipc.hicache.operations import Status
from devipc.hicache.planning.planner import layer_groups
from devipc.hicache.requests import UnregisterPool

__all__ = ["Registry"]

_TAKE_BACK_S = 2.0
_REMEMBERED = 64
_POOLS = itertools.count(1)  # of the whole process: a pool of another client is no pool of this one


class Registry:
    """See the module. Any thread.

    Parameters
    ----------
    link : EngineLink
        Makes memory reachable.
    desk : Desk
        Takes the operations.
    """

    def __init__(self, link: EngineLink, desk: Desk) -> None:
        self._link = link
        self._desk = desk
        self._unregistering = threading.Lock()  # of what follows
        self._leaving: dict[int, Ticket] = {}
        self._left: dict[int, None] = {}  # the last ones: another thread may be about to leave them

    def register(self, built: BuiltPool, namespace: Namespace) -> PoolHandle:
        """See :meth:`devipc.hicache.api.HiCacheClient.register_pool`."""
        layout = built.layout
        if namespace.layout != layout.content_bytes() or namespace.page_tokens != layout.page_tokens:
            raise UsageError(
                "the namespace was made for another layout: pages of both would be taken for each other",
                code="namespace",
                remedy="make it with Namespace.of(layout, ...)",
            )
        if [nbytes for _, nbytes in built.exports] != [chunk.nbytes for chunk in layout.chunks]:
            raise UsageError("exports and chunks differ in length", code="chunks", remedy="pass one for each, in order")
        number = next(_POOLS)
        memory = PoolMemory(number, number, layout, namespace.digest(), built.exports)
        addresses = self._link.reach(memory)
        try:
            self._desk.ask(lambda op: memory.request(op, addresses))
        except BaseException as error:
            self._take_back(number, error)
            raise
        groups = layer_groups(layout.layers, self._link.layer_groups)
        advice, page_nbytes = tuple(layout.advice()), layout.page_nbytes
        return PoolHandle(number, number, layout, memory.namespace, groups, advice, page_nbytes)

    def _take_back(self, number: int, why: BaseException) -> None:
        """Take a pool back whose registration failed: it may be under way, and end later."""
        answered = isinstance(why, DevIPCError) and not isinstance(why, CompletionTimeout)
        try:
            with contextlib.suppress(StaleError):  # answered all the same
                if not answered:
                    self._unregister(number, number, _TAKE_BACK_S)
            self._link.unreach(number, _TAKE_BACK_S)
        except DevIPCError as error:
            text = f"the pool was not registered, and the engine may still map it: {error.message}"
            remedy = "free none of its memory before close() of this client has returned"
            if isinstance(why, DevIPCError):
                raise CompletionTimeout(text, code="still_mapped", remedy=remedy) from why
            why.add_note(f"{text}; remedy: {remedy}")

    def unregister(self, pool: PoolHandle, timeout_s: float) -> None:
        """See :meth:`devipc.hicache.api.HiCacheClient.unregister`."""
        self._desk.check_process()
        self._unregister(pool.number, pool.generation, timeout_s)

    def _unregister(self, number: int, generation: int, timeout_s: float) -> None:
        deadline = deadline_after(timeout_s)
        with self._unregistering:  # once, however many threads do it
            if number in self._left:
                return
            if (ticket := self._leaving.get(number)) is None:
                ticket = self._desk.submit(lambda op: UnregisterPool(op=op, pool=number, generation=generation))
                self._leaving[number] = ticket
        outcome = ticket.wait(timeout_s)
        if outcome.status is Status.REFUSED and outcome.error is not None and outcome.error.code != "degraded":
            with self._unregistering:
                self._leaving.pop(number, None)
            ticket.result(0.0)
        self._link.unreach(number, remaining(deadline))
        with self._unregistering:
            self._leaving.pop(number, None)
            self._left[number] = None
            while len(self._left) > _REMEMBERED:
                del self._left[next(iter(self._left))]
