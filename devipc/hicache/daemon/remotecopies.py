"""Copies by an engine process: orders go out, reports come back, and nothing here ever waits for either.

Owns the pairing of orders with reports, and the end of everything that is open when the process ends. It knows no
process and no link: rings and the news of an end are handed in.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from devipc.channel.hello import decode_error
from devipc.deadline import start_thread
from devipc.errors import ClosedError, CompletionTimeout, DeviceLostError, DevIPCError, FencePoisoned, ResourceExhausted
from devipc.hicache.daemon.slotwords import SlotCancel, SlotFence
from devipc.hicache.engine.copies import OpenedPool, Opener
from devipc.hicache.engine.pools import Pool
from devipc.hicache.layout import encode_layout
from devipc.hicache.planning.planner import Direction
from devipc.hicache.requests import CompletionFence, PageIds, RegisterPool
from devipc.hicache.results import defect, fresh
from devipc.hicache.tier.records import Places
from devipc.hicache.wire import jobs as j
from devipc.hicache.wire.protocol import Point
from devipc.hicache.wire.ring import Consumer, Producer
from devipc.hicache.wire.slots import Slots

__all__ = ["RemoteCarrier", "RemoteClient", "RemoteCopies", "RemoteJob", "RemotePool", "RemoteReady"]

_TICK_S = 0.25
_WHO = "the engine process"
_log = logging.getLogger("devipc.hicache")


class _Outlet:
    """One ring of orders. Sending never waits: what finds no room goes with the next send, or the next tick."""

    def __init__(self, ring: Producer) -> None:
        self._ring = ring
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()

    def send(self, frame: bytes) -> None:
        with self._lock:
            self._waiting.append(frame)
            self._flush()

    def announce(self) -> None:
        with self._lock:  # an order that met it at the ring would be turned away, and lie here for a tick
            self._ring.announce()

    def flush(self) -> None:
        if self._waiting:
            with self._lock:
                self._flush()

    def _flush(self) -> None:
        try:
            while self._waiting:
                self._ring.push(self._waiting[0], timeout_s=0.0)
                self._waiting.popleft()
        except (ResourceExhausted, CompletionTimeout):
            pass
        except DevIPCError as error:  # the process is over, and whoever waits is told so
            _log.debug("%d orders are not sent: %s", len(self._waiting), error)
            self._waiting.clear()

    def close(self) -> None:
        self._ring.close()


class RemoteJob:
    """Fulfils :class:`~devipc.hicache.engine.copies.Job`."""

    __slots__ = ("_carrier", "done", "error", "wake")

    def __init__(self, carrier: RemoteCarrier, wake: Callable[[], None]) -> None:
        self.error: DevIPCError | None = None
        self.done = False
        self.wake = wake
        self._carrier = carrier

    def poll(self) -> bool:
        """See :class:`~devipc.hicache.engine.copies.Job`. Raises what ended the process, once it is gone."""
        if not self.done and self._carrier.ended is not None:
            raise fresh(self._carrier.ended)
        return self.done


class RemotePool(NamedTuple):
    """A pool that the engine process has mapped, by the order of that number."""

    client: bytes
    key: tuple[int, int]
    number: int


class RemoteCopies:
    """One direction. Fulfils :class:`~devipc.hicache.engine.copies.Copies`."""

    wakes = True

    def __init__(self, carrier: RemoteCarrier, outlet: _Outlet) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._carrier = carrier
        self._outlet = outlet

    def announce(self) -> None:
        """See :class:`~devipc.hicache.engine.copies.Copies`."""
        self._outlet.announce()

    def start(
        self, pool: Pool, direction: Direction, pages: PageIds, places: Places, fence: CompletionFence
    ) -> RemoteJob:
        """See :class:`~devipc.hicache.engine.copies.Copies`. The fence is a :class:`SlotFence`."""
        assert isinstance(pool.opened, RemotePool)
        assert isinstance(fence, SlotFence)
        job = RemoteJob(self._carrier, self.wake)
        if not len(pages):
            job.done = True
            return job
        number = self._carrier.number(job)
        opened = pool.opened
        self._outlet.send(j.move_of(number, opened.client, opened.key, pages, places, slot=fence.slot, op=fence.op))
        return job

    def close(self) -> None:
        """See :class:`~devipc.hicache.engine.copies.Copies`: the process gives its streams back."""
        self.wake = lambda: None


class _Watched:
    """What is known of a ready point."""

    __slots__ = ("error", "reached", "wake")

    def __init__(self, wake: Callable[[], None]) -> None:
        self.error: DevIPCError | None = None
        self.reached = False
        self.wake = wake


class RemoteReady:
    """A ready point that the engine process looks at. Fulfils :class:`~devipc.hicache.requests.ReadyPoint`.

    It is watched from the first question on, and no longer when nobody has this object any more.
    """

    def __init__(self, carrier: RemoteCarrier, client: bytes, point: Point | None, slot: int) -> None:
        self._carrier = carrier
        self._order = (client, point, slot)
        self._watched: _Watched | None = None
        self._number = 0

    def reached(self) -> bool:
        """See :class:`~devipc.hicache.requests.ReadyPoint`."""
        if self._watched is None:
            self._watched = _Watched(self._carrier.wake_all)
            self._number = self._carrier.number(self._watched)
            self._carrier.order(j.Watch(self._number, *self._order))
            return False
        if self._watched.error is not None:
            raise fresh(self._watched.error)
        if not self._watched.reached and self._carrier.ended is not None:
            raise fresh(self._carrier.ended)
        return self._watched.reached

    def __del__(self) -> None:
        if self._number and self._watched is not None and not self._watched.reached:
            self._carrier.forgotten.append(self._number)  # no lock may be taken where garbage is collected


class _Always:
    def reached(self) -> bool:
        return True


class RemoteClient:
    """A client as the engine process knows it, and what its requests name by numbers. Any thread.

    Attributes
    ----------
    id : bytes
        16 bytes; also the owner that :meth:`~devipc.hicache.engine.Engine.attach` is told.
    path : str
        Socket where the client connects its session with the engine process.
    slots : Slots
        Closed with the client.
    """

    def __init__(self, carrier: RemoteCarrier, client_id: bytes, path: str, slots: Slots) -> None:
        self.id = client_id
        self.path = path
        self.slots = slots
        self._carrier = carrier

    def fence(self, slot: int, op: int) -> SlotFence:
        """Return the completion fence of operation ``op``; raises BoundsError for a slot that there is not."""
        return SlotFence(self.slots, slot, op)

    def cancel(self, slot: int) -> SlotCancel:
        """Return the cancel word of a slot; raises BoundsError."""
        return SlotCancel(self.slots, slot)

    def ready(self, point: Point | None, slot: int | None = None) -> RemoteReady | _Always:
        """Return a ready point: a value of one of the client's fences, what it says in ``slot``, or always reached."""
        if point is None and slot is None:
            return _Always()
        return RemoteReady(self._carrier, self.id, point, 0 if slot is None else self.slots.check(slot))


class RemoteCarrier:
    """Both directions of an engine process. Fulfils :class:`~devipc.hicache.engine.copies.Carrier`; any thread.

    Parameters
    ----------
    device_uuid, unpinned_reason : str
        What the process said.
    moves : mapping of Direction to Producer
        Rings of orders to copy; owned once this has returned.
    orders : Producer
        Ring of all others; owned likewise.
    reports : Consumer
        What the process tells; owned likewise.
    plans : callable
        See :meth:`~devipc.hicache.engine.copies.Carrier.plans`; must not block.
    broken : callable
        Told when the process breaks the rules; on the thread that takes reports.
    """

    def __init__(
        self,
        device_uuid: str,
        unpinned_reason: str,
        *,
        moves: Mapping[Direction, Producer],
        orders: Producer,
        reports: Consumer,
        plans: Callable[[], dict[str, dict[str, int]]],
        broken: Callable[[DevIPCError], None],
    ) -> None:
        self.device_uuid = device_uuid
        self.unpinned_reason = unpinned_reason
        self.plans = plans
        self.floor_nbytes_per_s = 0.0
        self.ended: DevIPCError | None = None
        self.forgotten: deque[int] = deque()
        self._outlets = {direction: _Outlet(ring) for direction, ring in moves.items()}
        self._copies = {direction: RemoteCopies(self, outlet) for direction, outlet in self._outlets.items()}
        self._orders = _Outlet(orders)
        self._reports = reports
        self._broken = broken
        self._numbers = itertools.count(1)
        self._open: dict[int, RemoteJob | _Watched | tuple[RemotePool, Opener]] = {}
        self._closing: dict[int, Callable[[], None]] = {}
        self._thread = threading.Thread(target=self._take_all, name="devipc-hicache-reports", daemon=True)
        start_thread(self._thread, "hear of copies")

    # --- for lanes and operations ---

    def copies(self, direction: Direction) -> RemoteCopies:
        """See :class:`~devipc.hicache.engine.copies.Carrier`."""
        return self._copies[direction]

    def open_pool(self, owner: bytes, request: RegisterPool, done: Opener) -> None:
        """See :class:`~devipc.hicache.engine.copies.Carrier`. The request's addresses are not looked at."""
        key = (request.pool, request.generation)
        number = self.next_number()
        self._open[number] = RemotePool(owner, key, number), done
        self.order(j.OpenPool(number, owner, *key, encode_layout(request.layout)))
        if self.ended is not None:
            self._finish_open(number, self.ended)

    def close_pool(self, opened: OpenedPool, done: Callable[[], None]) -> None:
        """See :class:`~devipc.hicache.engine.copies.Carrier`; the end of the process unmaps everything."""
        assert isinstance(opened, RemotePool)
        number = self.next_number()
        self._closing[number] = done
        self.order(j.ClosePool(number, opened.client, *opened.key, opened.number))
        if isinstance(self.ended, DeviceLostError):
            self._finish_close(number)

    def next_number(self) -> int:
        """Return a number larger than those of all orders so far."""
        return next(self._numbers)

    def number(self, thing: RemoteJob | _Watched) -> int:
        """Return a number under which reports about ``thing`` will come."""
        number = next(self._numbers)
        self._open[number] = thing
        return number

    def order(self, order: j.Order) -> None:
        """Send an order that is no copy."""
        self._orders.send(j.encode(order))

    def wake_all(self) -> None:
        """Have both lanes look."""
        for copies in self._copies.values():
            copies.wake()

    # --- reports ---

    def _take_all(self) -> None:
        while True:
            try:
                report = j.decode_report(self._reports.take(timeout_s=_TICK_S))
            except CompletionTimeout:
                self._tick()
                continue
            except DevIPCError as error:
                if self.ended is None:
                    self._broken(error)
                return
            try:
                self._heard(report)
            except BaseException as error:  # whatever it is: nobody would hear of copies any more
                _log.exception("a defect in what follows the end of copies")
                self._broken(defect(error))
                return
            if self.forgotten:
                self._tick()

    def _tick(self) -> None:
        while self.forgotten:
            number = self.forgotten.popleft()
            if self._open.pop(number, None) is not None:
                self.order(j.Forget(number))
        for outlet in (*self._outlets.values(), self._orders):
            outlet.flush()

    def _heard(self, report: j.Report) -> None:
        thing = self._open.get(report.job)
        error: DevIPCError | None = None
        if not isinstance(report, j.Reached | j.Closed) and report.error is not None:
            error = decode_error(report.error, _WHO)
        if isinstance(thing, RemoteJob) and isinstance(report, j.Done):
            del self._open[report.job]
            thing.error, thing.done = error, True
            for outlet in self._outlets.values():
                outlet.flush()
            thing.wake()
        elif isinstance(thing, _Watched) and isinstance(report, j.Reached | j.Poisoned):
            self._open.pop(report.job, None)
            if isinstance(report, j.Poisoned):
                thing.error = error or FencePoisoned("the ready point failed", remedy="discard what waited for it")
            thing.reached = thing.error is None
            thing.wake()
        elif isinstance(report, j.Opened):
            self._finish_open(report.job, error)
        elif isinstance(report, j.Closed):
            self._finish_close(report.job)

    def _finish_open(self, number: int, error: DevIPCError | None) -> None:
        entry = self._open.pop(number, None)
        if isinstance(entry, tuple):
            opened, done = entry
            done(opened if error is None else fresh(error))

    def _finish_close(self, number: int) -> None:
        done = self._closing.pop(number, None)
        if done is not None:
            done()

    # --- the end ---

    def end(self, error: DevIPCError) -> None:
        """Let everything that is open hear of the process's end; a DeviceLostError says that nothing moves any more.

        May be called twice: first for a process that is dying, then for one that is gone.
        """
        if self.ended is None or isinstance(error, DeviceLostError):
            self.ended = error
        self._reports.end(error)
        for number, entry in list(self._open.items()):
            if isinstance(entry, tuple):
                self._finish_open(number, error)
        for number in list(self._closing) if isinstance(error, DeviceLostError) else ():
            self._finish_close(number)
        self.wake_all()

    def close(self) -> None:
        """See :class:`~devipc.hicache.engine.copies.Carrier`: what the device holds ends with the process."""

    def close_rings(self) -> None:
        """Give the rings back; when the process has ended. Calling it again does nothing."""
        self._reports.end(ClosedError("the engine process was closed", remedy="start another one"))
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        for outlet in (*self._outlets.values(), self._orders):
            outlet.close()
        self._reports.close()
