"""The engine process's thread for everything but copies: ready points are looked at, pools opened and closed.

Owns its ring of orders and the ready points that are waited for. What asks a client something runs on a thread of its
own: a client that does not answer delays nobody else.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable

from devipc.channel.hello import encode_error
from devipc.completion import Fence
from devipc.deadline import no_thread, start_thread
from devipc.errors import CompletionTimeout, DevIPCError, FencePoisoned
from devipc.hicache.engineproc.clients import Clients, EngineClient
from devipc.hicache.layout import decode_layout
from devipc.hicache.results import defect
from devipc.hicache.wire import jobs as j
from devipc.hicache.wire.pulse import Pulse
from devipc.hicache.wire.ring import Consumer
from devipc.hicache.wire.slots import Readiness
from devipc.wire import Reader

__all__ = ["Watcher"]

_IDLE_S = 0.5
_SPIN_S, _PAUSE_S, _LONGEST_PAUSE_S = 0.3e-3, 0.2e-3, 1e-3
_log = logging.getLogger("devipc.hicache")


class _Point:
    """One ready point that is looked at: a value of a fence, once that is open, or a word."""

    def __init__(self, number: int, client: EngineClient, order: j.Watch) -> None:
        self.number = number
        self.client = client
        self.n = order.point.n if order.point is not None else 0
        self.slot = order.slot
        self.fence: Fence | None = None
        self.failure: DevIPCError | None = None
        self.opening = False

    def reached(self) -> bool:
        """Raise what makes it never be reached."""
        if self.failure is not None:
            raise self.failure
        if self.opening:
            return False
        if self.fence is not None:
            return self.fence.query(self.n)
        readiness = self.client.slots.readiness(self.slot)
        if readiness is Readiness.NEVER:
            raise FencePoisoned(
                "the client says that its ready point never will be reached",
                code="cancelled",
                remedy="discard what waited for it",
            )
        return readiness is Readiness.REACHED


class Watcher:
    """See the module. Parameters as those of :class:`~devipc.hicache.engineproc.joblane.JobLane`."""

    def __init__(
        self,
        orders: Consumer,
        clients: Clients,
        pulse: Pulse,
        *,
        report: Callable[[j.Report], None],
        lose: Callable[[DevIPCError], None],
    ) -> None:
        self._orders = orders
        self._clients = clients
        self._pulse = pulse
        self._report = report
        self._lose = lose
        self._points: dict[int, _Point] = {}
        self._asking = threading.Lock()  # of what follows
        self._asked: dict[EngineClient, dict[int, list[_Point]]] = {}  # fences that a client is asked for, by number
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="devipc-engine-watch", daemon=True)

    def start(self) -> None:
        """Begin to take orders.

        Raises
        ------
        ResourceExhausted
            When no thread is to be had.
        """
        start_thread(self._thread, "watch ready points")

    @property
    def watched(self) -> int:
        """Ready points that are waited for."""
        return len(self._points)

    def stop(self, *, timeout_s: float) -> bool:
        """Look at nothing more; False when a driver call does not let go."""
        self._stopping = True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        quiet_since = time.monotonic()
        while not self._stopping:
            try:
                body = self._orders.take(timeout_s=self._pause_s(quiet_since))
            except CompletionTimeout:
                body = b""
            except DevIPCError as error:
                self._lose(error)
                return
            if not (body or self._points):
                continue
            self._pulse.busy("watch")
            try:
                if body:
                    self._obey(j.decode_order(body))
                if self._look() or body:
                    quiet_since = time.monotonic()
            except BaseException as error:
                _log.exception("the engine process ends")
                self._lose(defect(error))
                return
            finally:
                self._pulse.idle("watch")

    def _pause_s(self, quiet_since: float) -> float:
        if not self._points:
            return 0.05 if self._stopping else _IDLE_S
        quiet_s = time.monotonic() - quiet_since
        if quiet_s < _SPIN_S:
            select.select((), (), (), 0)  # lets other threads run, and costs less than any sleep
        else:
            time.sleep(_PAUSE_S if quiet_s < 0.1 else _LONGEST_PAUSE_S)
        return 0.0

    def _look(self) -> bool:
        moved = False
        for number, point in list(self._points.items()):
            try:
                if not point.reached():
                    continue
                report: j.Report = j.Reached(number)
            except DevIPCError as error:
                report = j.Poisoned(number, encode_error(error))
            del self._points[number]
            self._report(report)
            moved = True
        return moved

    # --- orders ---

    def _obey(self, order: j.Order) -> None:
        match order:
            case j.Watch():
                self._watch(order)
            case j.Forget():
                self._points.pop(order.job, None)
            case j.OpenPool():
                self._aside(
                    lambda: self._open_pool(order),
                    lambda error: self._report(j.Opened(order.job, encode_error(error))),
                )
            case j.ClosePool():
                self._close_pool(order)

    def _watch(self, order: j.Watch) -> None:
        try:
            client = self._clients.get(order.client)
            client.slots.check(order.slot)
            point = _Point(order.job, client, order)
            if order.point is not None:
                point.fence = client.known_ready_fence(order.point.fence)
                point.opening = point.fence is None
        except DevIPCError as error:
            self._report(j.Poisoned(order.job, encode_error(error)))
            return
        self._points[order.job] = point
        if order.point is not None and point.opening:
            self._ask(client, order.point.fence, point)

    def _ask(self, client: EngineClient, number: int, point: _Point) -> None:
        """Open a fence at its first use. A client has one thread for that, however many it names and gives up."""
        with self._asking:
            runs = client in self._asked
            self._asked.setdefault(client, {}).setdefault(number, []).append(point)
        if not runs:
            self._aside(lambda: self._open_fences(client), lambda error: self._not_opened(client, error))

    def _open_fences(self, client: EngineClient) -> None:
        """Open what is waited for, in turn, again and again: a stopped client answers later."""
        while (number := self._next_asked(client)) is not None:
            fence: Fence | None = None
            failure: DevIPCError | None = None
            try:
                fence = client.ready_fence(number)
            except CompletionTimeout:
                continue
            except DevIPCError as error:
                failure = error
            with self._asking:
                points = self._asked[client].pop(number, [])
            for point in points:
                point.fence, point.failure, point.opening = fence, failure, False

    def _next_asked(self, client: EngineClient) -> int | None:
        """Return a fence that is still waited for, each in turn; None when there is none, and the thread ends."""
        with self._asking:
            asked = self._asked[client]
            for number in list(asked):
                points = [point for point in asked.pop(number) if point.number in self._points]
                if points:
                    asked[number] = points  # the last one now
                    return number
            del self._asked[client]
            return None

    def _not_opened(self, client: EngineClient, failure: DevIPCError) -> None:
        with self._asking:
            asked = self._asked.pop(client, {})
        for points in asked.values():
            for point in points:
                point.failure, point.opening = failure, False

    def _open_pool(self, order: j.OpenPool) -> None:
        reader = Reader(order.layout)
        layout = decode_layout(reader)
        reader.end()
        self._clients.get(order.client).open_pool((order.pool, order.generation), order.job, layout)
        self._report(j.Opened(order.job, None))

    def _close_pool(self, order: j.ClosePool) -> None:
        client = self._clients.find(order.client)
        if client is None:  # closed, with all that it had
            self._report(j.Closed(order.job))
            return

        def unmap(client: EngineClient = client) -> None:
            key = (order.pool, order.generation)
            client.close_pool(key, order.opened, lambda: self._report(j.Closed(order.job)))

        try:  # a driver's unmap can take its time, and has nothing to do with ready points
            threading.Thread(target=unmap, name="devipc-engine-aside", daemon=True).start()
        except RuntimeError:
            unmap()

    def _aside(self, action: Callable[[], None], failed: Callable[[DevIPCError], None]) -> None:
        """Run ``action`` on a thread of its own; ``failed`` hears what it raises, or that there is no thread."""

        def guarded() -> None:
            try:
                action()
            except DevIPCError as error:
                _log.warning("beside the copies: %s", error)
                failed(error)
            except BaseException as error:  # whoever waits for this would wait for ever
                _log.exception("a defect beside the copies")
                failed(defect(error))

        try:
            threading.Thread(target=guarded, name="devipc-engine-aside", daemon=True).start()
        except RuntimeError as error:
            failed(no_thread("ask a client", error))
