"""One direction of the engine process: the thread that takes orders to copy, submits them, and reports their ends.

Owns its ring of orders and the jobs in flight. An order that is wrong is reported as failed, and touches nothing: pages
and places are checked again here, whatever the supervisor has checked.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from devipc.channel.hello import encode_error
from devipc.deadline import start_thread
from devipc.errors import CompletionTimeout, DevIPCError
from devipc.hicache.engine.localcopies import LocalCopies, LocalJob
from devipc.hicache.engineproc.clients import Clients, EngineClient, MappedPool
from devipc.hicache.engineproc.orders import CopyOrder, Orders, RefusedOrder
from devipc.hicache.engineproc.timeline import JobFence, Timeline
from devipc.hicache.planning.planner import Direction
from devipc.hicache.results import defect
from devipc.hicache.wire import jobs as j
from devipc.hicache.wire.pulse import Pulse
from devipc.hicache.wire.ring import Consumer

__all__ = ["JobLane", "Rates"]

_IDLE_S = 0.5
_AHEAD_S = 0.15e-3
_SPIN_S, _AROUND_S, _PAUSE_S = 2e-3, 0.3e-3, 0.2e-3
"""How long to look without a pause at what was just begun (for 100 MB), and before and after an end is expected: each
pause would delay its end."""
_OWED_PAUSE_S = 5e-3
_log = logging.getLogger("devipc.hicache")


@dataclass(slots=True)
class _Flying:
    number: int
    job: LocalJob
    client: EngineClient
    pool: MappedPool
    nbytes: int
    due: float
    announced: bool = False


class Rates:
    """How long jobs take, by what the last ones of about that size took: small ones take long for their bytes."""

    def __init__(self) -> None:
        self._byte_s: dict[int, float] = {}  # by the size's power of two

    def expected_s(self, nbytes: int) -> float:
        """Return how many seconds a job of so many bytes should take."""
        return nbytes * self._byte_s.get(nbytes.bit_length(), 1 / 50e9)

    def learn(self, nbytes: int, late_s: float) -> None:
        """Take from a job that took so much longer than expected (less: negative) how long the next one will take."""
        if nbytes:
            took_s = self.expected_s(nbytes) + 0.25 * late_s
            self._byte_s[nbytes.bit_length()] = max(took_s / nbytes, 1e-12)


class JobLane:
    """See the module.

    Parameters
    ----------
    direction : Direction
        Which way.
    copies : LocalCopies
        Its stream.
    orders : Consumer
        Where orders come from; nobody else takes any.
    report : callable
        Takes reports; any thread.
    lose : callable
        Told when it is not known any more whether copies are over; does not return.
    announce : callable
        Told when a report is about to come.
    """

    def __init__(
        self,
        direction: Direction,
        copies: LocalCopies,
        orders: Consumer,
        clients: Clients,
        pulse: Pulse,
        *,
        report: Callable[[j.Report], None],
        lose: Callable[[DevIPCError], None],
        announce: Callable[[], None],
    ) -> None:
        self.direction = direction
        self.moved = 0
        self._copies = copies
        self._orders = Orders(orders, clients, copies, direction)
        self._pulse = pulse
        self._report = report
        self._lose = lose
        self._announce = announce
        self._rates = Rates()
        self._flying: deque[_Flying] = deque()
        self._owed: set[Timeline] = set()
        self._stopping = False
        copies.stopped = self._get_on
        copies.fan.meanwhile = self._orders.take_ahead
        self._thread = threading.Thread(target=self._run, name=f"devipc-engine-{direction.value}", daemon=True)

    def start(self) -> None:
        """Begin to take orders.

        Raises
        ------
        ResourceExhausted
            When no thread is to be had.
        """
        start_thread(self._thread, "copy pages")

    @property
    def flying(self) -> int:
        """Jobs in flight."""
        return len(self._flying)

    def stop(self, *, timeout_s: float) -> bool:
        """Take no more orders, and wait for what is in flight; False when that took too long."""
        self._stopping = True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _get_on(self) -> bool:
        """Say that a copy through the buffer is waiting for its stream, not stuck in a call."""
        self._pulse.busy(self.direction.value)
        return self._stopping

    def _run(self) -> None:
        quiet_since = time.monotonic()
        while True:
            order: CopyOrder | RefusedOrder | None = None
            try:
                with contextlib.suppress(CompletionTimeout):
                    order = self._orders.take(timeout_s=self._pause_s(quiet_since))
            except DevIPCError as error:
                self._lose(error)
                return
            except BaseException as error:  # a defect in reading an order
                _log.exception("the engine process ends")
                self._lose(defect(error))
                return
            idle = order is None and not (self._flying or self._owed)
            if not (idle and self._stopping):
                self._pulse.busy(self.direction.value)
                try:
                    if isinstance(order, CopyOrder):
                        self._begin(order)
                    elif order is not None:
                        self._report(j.Done(order.job, encode_error(order.error)))
                    elif idle:  # who begins nothing on a device that is lost would never learn of it
                        self._copies.check()
                    if self._look() or order is not None:
                        quiet_since = time.monotonic()
                except BaseException as error:  # a stream of which nothing is known, or a defect: the process ends
                    _log.exception("the engine process ends")
                    self._lose(defect(error))
                    return
                finally:
                    self._pulse.idle(self.direction.value)
            if self._stopping and not self._flying and self._orders.empty:
                return

    def _pause_s(self, quiet_since: float) -> float:
        """How long to wait for an order: devices wake nobody, so what flies is looked at again and again."""
        if not self._orders.empty:
            return 0.0
        if not self._flying:
            return _OWED_PAUSE_S if self._owed else 0.05 if self._stopping else _IDLE_S
        now = time.monotonic()
        if now - quiet_since < _SPIN_S or abs(now - self._flying[0].due) < _AROUND_S:
            select.select((), (), (), 0)  # lets threads of the backend's own run, and costs less than any sleep
        else:
            time.sleep(_PAUSE_S)  # a ring sleeps for whole milliseconds
        return 0.0

    def _begin(self, order: CopyOrder) -> None:
        move, client, planner = order.move, order.client, order.pool.planner
        nbytes = len(order.pages) * planner.page_nbytes
        duration_s = self._rates.expected_s(nbytes)
        soon = not self._flying and duration_s < _AHEAD_S
        if soon:
            self._announce()
        restore = self.direction is Direction.RESTORE
        count = len(planner.groups) if restore else 1
        fence = JobFence(order.timeline, count, client.slots, move.slot, move.op, later=not restore)
        job = self._copies.move(planner, self.direction, order.pages, order.places, fence, planned=order.planned)
        self._pulse.count(self.direction.value, self._copies.mover.counts)
        fence.finish(self._copies.stream)
        self._owed.add(order.timeline)
        began = max(time.monotonic(), self._flying[-1].due if self._flying else 0.0)
        self._flying.append(_Flying(move.job, job, client, order.pool, nbytes, began + duration_s, announced=soon))

    def _look(self) -> bool:
        """Report what is over; True when anything was."""
        moved = False
        if self._flying and not self._flying[0].announced and time.monotonic() > self._flying[0].due - _AHEAD_S:
            self._flying[0].announced = True
            self._announce()
        while self._flying and self._flying[0].job.poll():
            flying = self._flying.popleft()
            self._rates.learn(flying.nbytes, time.monotonic() - flying.due)
            flying.client.unuse(flying.pool)
            error = flying.job.error
            self._report(j.Done(flying.number, None if error is None else encode_error(error)))
            self.moved += 1
            moved = True
        if self._owed:
            self._owed = {timeline for timeline in self._owed if not timeline.catch_up(self._copies.stream)}
        return moved
