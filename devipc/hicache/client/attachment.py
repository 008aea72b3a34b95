"""One attachment of a client to a supervisor and its engine process, from the greeting until nothing of it is left.

Owns both connections, the transport, the slots and the fences of that attachment, and the moment in which it is over:
at once when either process is dying. How it is made, and what the client does afterwards, is not decided here.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from devipc.channel.link import Link, PeerState
from devipc.completion import Fence
from devipc.deadline import deadline_after, remaining
from devipc.errors import CompletionTimeout, DevIPCError, HandleError, PeerGone, UsageError
from devipc.hicache.client.links import PoolMemory
from devipc.hicache.client.pump import Pump
from devipc.hicache.client.readypoints import Forwarder, StreamPoint, StreamPoints
from devipc.hicache.client.slotuse import SlotFence, SlotTable
from devipc.hicache.operations import Event, Kind
from devipc.hicache.requests import Backup, CompletionFence, ReadyPoint, Request, Restore
from devipc.hicache.results import Answer
from devipc.hicache.tier.index import IndexReader
from devipc.hicache.wire import protocol as p
from devipc.hicache.wire.codec import Numbers, answer_of, frame_of
from devipc.hicache.wire.slots import Readiness, Slots
from devipc.hicache.wire.transport import LinkKind, Transport
from devipc.hicache.wire.waiting import Waiters, wake
from devipc.interfaces.transfer import Stream
from devipc.session import Importer
from devipc.session.events import PeerEvent
from devipc.turns import take_turn
from devipc.types import PoisonReason

__all__ = ["Attachment"]

_SUBMIT_S = 0.05
_TURN_S = 1e-3
_NO_SLOT = -1
_NOTHING = Answer()
_TRANSFERS = (Backup, Restore)  # a union would be made anew for each operation


class Attachment(Numbers):
    """See the module; made by :func:`devipc.hicache.client.attach.attach`. Any thread.

    Attributes
    ----------
    welcome : WelcomeFrame
        What the supervisor said.
    reader : IndexReader
        Of its index; the caller's.
    ops : dict
        Operations that have no status, and the slot of each (-1: none).
    """

    def __init__(
        self,
        link: Link,
        welcome: p.WelcomeFrame,
        transport: Transport,
        slots: Slots,
        reader: IndexReader,
        session: Importer,
        timelines: dict[Kind, Fence],
        forwarder: Forwarder,
    ) -> None:
        self.welcome = welcome
        self.reader = reader
        self.session = session
        self.ops: dict[int, int] = {}
        self._link, self._transport, self._slots = link, transport, slots
        self._timelines = timelines
        self._table = SlotTable(slots, timelines)
        transfer = session.device.transfer
        assert transfer is not None  # an engine copies
        self._points = StreamPoints(
            lambda name: session.create_fence(name, strategy=session.decision.strategy),
            partial(forwarder.point, transfer),
        )
        self._forwarder = forwarder
        self._answer: Callable[[int, Event, Answer, tuple[Event, ...]], None]
        self._on_over: Callable[[Attachment, DevIPCError], None] = lambda *_: None
        self._on_gone: Callable[[Attachment], None] = lambda _: None
        self._pump: Pump | None = None  # until it is started
        self._ending = threading.Lock()
        self._over: DevIPCError | None = None
        self._closed = False
        self._untold: deque[bytes] = deque()
        self._telling = threading.Lock()
        self._reasons: dict[int, DevIPCError] = {}  # of ready points that failed here
        self._own: dict[int, Callable[[Event, Answer], None]] = {}

    def start(
        self,
        answer: Callable[[int, Event, Answer, tuple[Event, ...]], None],
        *,
        on_over: Callable[[Attachment, DevIPCError], None],
        on_gone: Callable[[Attachment], None],
    ) -> None:
        """Begin to take answers, and to watch both processes.

        Parameters
        ----------
        answer : callable
            Takes what is told about an operation.
        on_over : callable
            Called once, at the first sign that either process is dying; must not block.
        on_gone : callable
            Called after that, perhaps again, when nothing of the engine can touch a page any more; must not block.

        Raises
        ------
        ResourceExhausted
            When no thread is to be had.
        """
        self._answer, self._on_over, self._on_gone = answer, on_over, on_gone
        self._pump = Pump(self._transport, self._deliver, is_open=lambda: bool(self.ops), on_end=self.end)
        self._link.on_state(self._on_link)
        self.session.on_event(self._on_session)
        if self._link.state is not PeerState.CONNECTED:
            self._on_link(self._link.state)
        if self.session.state is not PeerState.CONNECTED:
            self._engine_is(self.session.state)

    @property
    def pump(self) -> Pump:
        """Takes its answers, once it is started."""
        assert self._pump is not None
        return self._pump

    # --- Numbers -----------------------------------------------------------------------------------------------------

    @property
    def device_uuid(self) -> str:
        """See :class:`~devipc.hicache.wire.codec.Numbers`."""
        return self.welcome.device_uuid

    def slot(self, fence: CompletionFence) -> int:
        """See :class:`~devipc.hicache.wire.codec.Numbers`."""
        assert isinstance(fence, SlotFence)
        return fence.slot

    def ready(self, point: ReadyPoint, slot: int) -> p.ReadyForm:
        """See :class:`~devipc.hicache.wire.codec.Numbers`."""
        if isinstance(point, StreamPoint) and point.owner is not self._points:
            point = self._points.mark(point.stream)  # its attachment is over: what the stream has now is behind it
        if isinstance(point, StreamPoint):
            return True if point.reached() else p.Point(fence=point.number, n=point.n)
        op = self._slots.op(slot)
        self._forwarder.watch(self._slots, slot, point, lambda error: self._reasons.update({op: error}))
        # What is reached already needs nobody to look at it.
        return self._slots.readiness(slot) is Readiness.REACHED

    def mark(self, stream: Stream) -> ReadyPoint:
        """Return a point behind all work of a stream so far; see :mod:`~devipc.hicache.client.readypoints`."""
        return self._points.mark(stream)

    def status(self) -> dict[str, object]:
        """Return the completion strategy that client and engine process agreed on; JSON-ready."""
        return {"strategy": str(self.session.decision.strategy)}

    # --- pools -------------------------------------------------------------------------------------------------------

    def share(self, pool: PoolMemory) -> None:
        """Let the engine open the pool's memory. Raises CapabilityError for memory that cannot be shared."""
        for chunk, (ptr, nbytes) in enumerate(pool.exports):
            self.session.share(pool.share_name(chunk), (ptr, nbytes))

    def unshare(self, pool: PoolMemory, timeout_s: float) -> None:
        """Take it back; raises CompletionTimeout while the engine has it mapped. Again goes on waiting."""
        deadline = deadline_after(timeout_s)
        for chunk in range(len(pool.exports)):
            with contextlib.suppress(HandleError):  # taken back before
                self.session.unshare(pool.share_name(chunk), timeout_s=remaining(deadline))

    def register(self, pool: PoolMemory, op: int, timeout_s: float) -> None:
        """Register a pool that an older attachment had, under the number that it had there. Blocks.

        Raises
        ------
        DevIPCError
            What it is refused with.
        CompletionTimeout
            When no answer came in time.
        """
        told: list[tuple[Event, Answer]] = []
        waiters: Waiters = []

        def take(event: Event, answer: Answer) -> None:
            told.append((event, answer))
            wake(waiters)

        self._own[op] = take
        self.submit(pool.request(op))
        if not self.pump.wait(lambda: bool(told) or self._over is not None, waiters, deadline_after(timeout_s)):
            raise CompletionTimeout(f"pool {pool.number} was not registered again within {timeout_s:g} s")
        self.ops.pop(op, None)
        if self._over is not None:
            raise self._over
        event, answer = told[0]
        if event is not Event.COMPLETED:
            raise answer.error or DevIPCError(f"pool {pool.number} is {event.value}", code=event.value)

    # --- asking ------------------------------------------------------------------------------------------------------

    @property
    def over(self) -> DevIPCError | None:
        """Why it is over; None while it is not."""
        return self._over

    def announce(self) -> None:
        """Wake the supervisor for a request that is about to be submitted."""
        self._transport.announce()

    def submit(self, request: Request) -> None:
        """Send a request. Blocks for a moment at most, while the supervisor does not keep up.

        When the attachment ends meanwhile, the end is told of this operation, too, as of any other. An interrupt ends
        it: nobody knows then whether the request was sent.

        Raises
        ------
        ResourceExhausted
            With code ``busy``; nothing was sent.
        UsageError
            For what does not travel.
        DevIPCError
            When the attachment is over.
        """
        op, slot, noted = request.op, _NO_SLOT, False
        try:
            if isinstance(request, _TRANSFERS):
                assert isinstance(request.fence, SlotFence)
                slot = self._table.begin(op, request.kind, request.fence)
            frame = p.pack(frame_of(request, self))
            with self._ending:  # the end is told of what is in here, and of nothing else
                if self._over is not None:
                    raise self._over
                self.ops[op], noted = slot, True
            self._transport.push(frame, timeout_s=_SUBMIT_S)
        except BaseException as error:
            if noted and not isinstance(error, DevIPCError):
                # It may have been sent, and would be published, and end a slot that is another operation's by then.
                self.end(PeerGone("an interrupt left unknown what was sent", code="interrupted", retryable=True))
            with self._ending:
                told = noted and self._over is not None
                if not told:
                    self.ops.pop(op, None)
            if told:
                if isinstance(error, DevIPCError):
                    return
                raise
            if slot != _NO_SLOT:
                self._forwarder.forget(self._slots, slot)
            if isinstance(request, _TRANSFERS) and isinstance(request.fence, SlotFence):
                self._table.unused(request.fence)  # an interrupt may have kept the number from here
            raise
        self.pump.submitted()
        if self._untold:
            self._tell_rest()

    def tell(self, op: int, event: Event) -> None:
        """Say something about an operation that was submitted here; others are passed over.

        What finds no room is sent behind the next submission, or answer. Blocks only while another thread submits.
        """
        if op in self.ops:
            self._untold.append(p.pack(p.TellFrame(op=op, event=event)))
            self._tell_rest()

    def _tell_rest(self) -> None:
        while self._untold and self._over is None:
            mine: list[bool] = []
            try:
                if not take_turn(self._telling, mine):  # whoever has it looks
                    return
                self._transport.push(self._untold[0], timeout_s=_TURN_S)
                self._untold.popleft()
            except CompletionTimeout:
                continue
            except DevIPCError:  # no room, or over
                return
            finally:
                if mine and mine[0]:
                    self._telling.release()

    def ended(self, op: int) -> None:
        """Note that an operation has its status on this side; those of other attachments are passed over."""
        slot = self.ops.pop(op, _NO_SLOT)
        self._reasons.pop(op, None)
        if slot != _NO_SLOT:
            self._forwarder.forget(self._slots, slot)
            self._table.leave(slot)

    def _deliver(self, body: bytes) -> None:
        frame = p.decode_answer(body)
        if self._own and (own := self._own.pop(frame.op, None)) is not None:
            own(frame.event, answer_of(frame, who="the cache daemon"))
            return
        plain = frame.results is None and frame.error is None and frame.detail is None
        answer = _NOTHING if plain else answer_of(frame, who="the cache daemon")
        if self._reasons and frame.event is Event.DISCARDED and (reason := self._reasons.get(frame.op)) is not None:
            answer = replace(answer, error=reason)
        self._answer(frame.op, frame.event, answer, frame.passed)
        if self._untold:
            self._tell_rest()

    # --- the end -----------------------------------------------------------------------------------------------------

    @property
    def gone(self) -> bool:
        """True once nothing of the engine can touch a page any more."""
        return self.session.state in (PeerState.CLOSED, PeerState.GONE)

    def _on_link(self, state: PeerState) -> None:
        self.end(PeerGone(f"the cache daemon's connection is {state.value}", remedy="wait until it is back"))

    def _on_session(self, event: PeerEvent) -> None:
        self._engine_is(event.state)

    def _engine_is(self, state: PeerState) -> None:
        if state is PeerState.CONNECTED:
            return
        self.end(PeerGone(f"the cache's engine process is {state.value}", remedy="wait until it is back"))
        if self.gone:
            self._on_gone(self)

    def end(self, error: DevIPCError) -> None:
        """Begin the end: fences are poisoned, nothing more is sent or taken. The first cause stays. Never blocks."""
        with self._ending:
            if self._over is not None:
                return
            self._over = error
        if self._pump is not None:
            self._pump.end(error)
        self._table.end(PoisonReason.PEER_DIED)
        for timeline in self._timelines.values():
            with contextlib.suppress(UsageError):  # closed
                timeline.poison(PoisonReason.PEER_DIED, writer_gone=lambda: self.gone)
        self._on_over(self, error)

    def leave(self, timeout_s: float) -> None:
        """Let the supervisor and the engine let go of everything. Blocks; may be called again.

        Raises
        ------
        CompletionTimeout
            With code ``stalled_stream`` while copies still run on the client's pages.
        PeerGone
            When the supervisor went meanwhile.
        """
        body = p.pack(p.LeaveFrame(timeout_s=timeout_s))
        self._link.call(LinkKind.LEAVE, body, timeout_s=timeout_s + _SUBMIT_S + 1.0).close_fds()

    def close(self, timeout_s: float) -> None:
        """Give everything back; only when nothing of it is used by the engine any more. Blocks."""
        if self._closed:
            return
        self._closed = True
        self.end(PeerGone("the client has left", code="closed"))
        self._link.close()
        # A connection that is lost brings no word of what is unmapped; that the engine let go was learnt elsewhere.
        self.session.close(timeout_s=0.0 if self.session.state is PeerState.DYING else timeout_s)
        self._transport.close()
        if self._pump is not None:
            self._pump.join(1.0)
        self._slots.close()
