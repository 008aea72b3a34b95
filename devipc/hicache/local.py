"""The deployment within one process: an engine in the caller's own, fences on local markers, no memory operations.

Owns the fences of that deployment, and the engine that a client may have for itself. A stream of this
process waits for a stream of this process; there is nothing that could die on its own.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

from devipc.deadline import bounded, deadline_after, pause_after, remaining
from devipc.errors import CompletionTimeout, FencePoisoned, UsageError
from devipc.hicache.client.links import LinkFence, PoolMemory
from devipc.hicache.client.readypoints import MarkerPoint
from devipc.hicache.client.ticket import CancelFlag
from devipc.hicache.engine.lane import Lane
from devipc.hicache.engine.localcopies import LocalCarrier
from devipc.hicache.engine.session import Session
from devipc.hicache.engine.transferengine import Engine, EngineConfig
from devipc.hicache.handles import check_exports
from devipc.hicache.moving.arena import HostArena
from devipc.hicache.moving.mover import MarkerPool
from devipc.hicache.operations import Event
from devipc.hicache.planning.planner import Direction
from devipc.hicache.policy import WritePolicy
from devipc.hicache.requests import Answers, Ping, Request
from devipc.hicache.results import Answer
from devipc.hicache.tier.hosttier import HostTier
from devipc.hicache.tier.index import IndexReader, IndexWriter
from devipc.hicache.wire.waiting import Waiters, park
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import DeviceTransfer, Marker, Stream
from devipc.turns import take_turn
from devipc.types import PoisonReason

__all__ = ["LocalEngine", "LocalFence", "LocalLink"]

_LONGEST_PAUSE_S = 1e-3


class LocalFence:
    """A timeline whose values stand for markers. Fulfils both ends of a completion fence."""

    def __init__(self, markers: MarkerPool, transfer: DeviceTransfer) -> None:
        self._markers = markers
        self._transfer = transfer
        self._changed = threading.Condition()
        self._values: list[int] = []
        self._recorded: list[Marker] = []
        self._settled = False
        self._reason: PoisonReason | None = None

    # --- the engine's end ---

    def signal(self, stream: Stream, n: int) -> None:
        """See :class:`~devipc.hicache.requests.SignalledFence`."""
        marker = self._markers.record(stream)
        with self._changed:
            self._values.append(n)
            self._recorded.append(marker)
            self._changed.notify_all()

    def settle(self) -> None:
        """See :class:`~devipc.hicache.requests.CompletionFence`."""
        self._end(None)

    def poison(self, reason: PoisonReason) -> None:
        """See :class:`~devipc.hicache.requests.CompletionFence`."""
        self._end(reason)

    def _end(self, reason: PoisonReason | None) -> None:
        with self._changed:
            if self._settled or self._reason is not None:
                return
            self._settled, self._reason = reason is None, reason
            markers, self._recorded = self._recorded, []
            self._changed.notify_all()
        for marker in markers:
            self._markers.give_back(marker)

    # --- the client's end ---

    def query(self, n: int) -> bool:
        """See :class:`~devipc.hicache.client.ticket.WaitFence`."""
        with self._changed:
            if (marker := self._marker(n)) is None:
                return self._settled
            return self._transfer.query_marker(marker)

    def _marker(self, n: int) -> Marker | None:
        if self._reason is not None:
            raise FencePoisoned(
                f"the operation ended without its copies: {self._reason.name.lower()}",
                code=self._reason.name.lower(),
                remedy="discard what waited for it; the ticket says why",
            )
        at = bisect_left(self._values, n)
        return self._recorded[at] if not self._settled and at < len(self._values) else None

    def synchronize(self, n: int, timeout_s: float) -> None:
        """See :class:`~devipc.hicache.client.ticket.WaitFence`."""
        began, deadline = time.monotonic(), deadline_after(timeout_s)
        while not self.query(n):
            if not remaining(deadline):
                raise CompletionTimeout(
                    f"the copies are not done after {timeout_s:g} s", remedy="wait again, or cancel the operation"
                )
            pause = pause_after(time.monotonic() - began, _LONGEST_PAUSE_S)
            time.sleep(min(pause, remaining(deadline)))

    def wait(self, stream: Stream, n: int, *, timeout_s: float = 0.0) -> None:
        """See :class:`~devipc.hicache.client.ticket.WaitFence`."""
        if self._transfer.is_capturing(stream):
            raise UsageError("wait on a capturing stream", code="capturing", remedy="wait first, then launch the graph")
        with self._changed:
            if not self._changed.wait_for(lambda: self._settled or self._marker(n) is not None, bounded(timeout_s)):
                raise CompletionTimeout(
                    f"the copies were not submitted within {timeout_s:g} s",
                    remedy="the operation still waits for its ready point, for room, or for those before it",
                )
            if (marker := self._marker(n)) is not None:
                self._transfer.wait_marker(stream, marker)


class LocalEngine:
    """An engine with all that it needs, in this process. Several clients may share it.

    Parameters
    ----------
    device : Device
        Stays the caller's, and open until :meth:`close` has returned.
    config : EngineConfig, optional
        Sizes and limits.
    """

    def __init__(self, device: Device, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        self.config = config
        self._arena = HostArena(config.tier_nbytes)
        try:
            self.index = IndexWriter(max_entries=config.index_entries or max(4096, config.tier_nbytes // 2**15))
        except BaseException:
            self._arena.close()
            raise
        try:
            self.tier = HostTier(
                self._arena.chunks(config.chunk_nbytes),
                self.index,
                slab_nbytes=config.slab_nbytes,
                extent_pages=config.extent_pages,
            )
            self.carrier = LocalCarrier(
                device,
                self._arena,
                chunk_nbytes=config.chunk_nbytes,
                pin_required=config.pin_required,
                bounce_nbytes=config.bounce_nbytes,
                groups=config.layer_groups,
            )
            self.engine = Engine(self.carrier, self.tier, config)
        except BaseException:
            self.index.close()
            self._arena.close()
            raise
        for lane, direction in ((self.engine.backups, Direction.BACKUP), (self.engine.restores, Direction.RESTORE)):
            self.carrier.copies(direction).stopped = _stopping(lane)
        self.carrier.lose = self.engine.lose
        self.markers = MarkerPool(self.carrier.transfer)
        self._pid = os.getpid()
        self._closing = threading.RLock()  # no memory goes while another thread gives it back

    def close(self, timeout_s: float = 30.0) -> None:
        """End everything. Raises CompletionTimeout, and keeps the memory, while a stream does not let go."""
        if os.getpid() != self._pid:
            return  # after a fork: threads, streams and registrations are the parent's
        deadline = deadline_after(timeout_s)
        mine: list[bool] = []
        try:
            if not take_turn(self._closing, mine, remaining(deadline)):
                raise CompletionTimeout(
                    f"another thread has not closed the cache engine after {timeout_s:g} s", remedy="close it again"
                )
            self.engine.close(remaining(deadline))
            self.markers.close()
            self.index.close()
            self._arena.close()
        finally:
            if mine and mine[0]:
                self._closing.release()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def _stopping(lane: Lane) -> Callable[[], bool]:
    return lambda: lane.stopping


class LocalLink:
    """How a client of this process reaches its engine. Fulfils :class:`~devipc.hicache.client.links.EngineLink`.

    Parameters
    ----------
    local : LocalEngine
        The engine.
    owned : bool
        True to close it with the link.
    """

    def __init__(self, local: LocalEngine, *, owned: bool) -> None:
        self.instance = secrets.token_bytes(16)
        self._local = local
        self._engine = local.engine
        self._owned = owned
        self._session: Session | None = None

    @property
    def layer_groups(self) -> Sequence[int]:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        return self._local.config.layer_groups

    @property
    def write_policy(self) -> WritePolicy:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        return WritePolicy.WRITE_THROUGH

    def attach(self, answers: Answers) -> None:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        self._session = self._engine.attach(self.instance, answers)

    @property
    def session(self) -> Session:
        """The engine's side."""
        assert self._session is not None
        return self._session

    def reader(self) -> IndexReader:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        return IndexReader(self._local.index.fileno(), epoch=self._local.index.epoch)

    def reach(self, pool: PoolMemory) -> tuple[int, ...]:
        """See :class:`~devipc.hicache.client.links.EngineLink`: in this process the addresses are the caller's own."""
        check_exports(self._local.carrier.device.memory, pool.exports)
        return tuple(ptr for ptr, _ in pool.exports)

    def unreach(self, pool: int, timeout_s: float) -> None:
        """See :class:`~devipc.hicache.client.links.EngineLink`: there is nothing to take back."""

    def ready(self, stream: Stream) -> MarkerPoint:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        return MarkerPoint(self._local.markers, self._local.carrier.transfer, stream)

    def fence(self) -> LocalFence:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        return LocalFence(self._local.markers, self._local.carrier.transfer)

    def word(self, fence: LinkFence) -> CancelFlag:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        return CancelFlag()

    def submit(self, request: Request) -> None:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        if isinstance(request, Ping):
            self.session.answers.answer(request.op, Event.COMPLETED, Answer())
            return
        self.session.submit(request)

    def tell(self, op: int, event: Event) -> None:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        self.session.tell(op, event)

    def ended(self, op: int) -> None:
        """See :class:`~devipc.hicache.client.links.EngineLink`: nothing of it is kept here."""

    def wait(self, done: Callable[[], bool], waiters: Waiters, deadline: float) -> bool:
        """See :class:`~devipc.hicache.client.links.EngineLink`: the engine's threads bring the answers."""
        return park(done, waiters, deadline)

    def attend(self) -> None:
        """See :class:`~devipc.hicache.client.links.EngineLink`: the engine's threads call."""

    def status(self) -> dict[str, object]:
        """See :class:`~devipc.hicache.client.links.EngineLink`: nothing can be missing, and nothing is handed over."""
        return {"degraded": "", "strategy": "in_process"}

    def close(self, timeout_s: float) -> None:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        deadline = deadline_after(timeout_s)
        if self._session is not None:
            self._session.dying()
            if not self._session.wait_idle(timeout_s=remaining(deadline)):
                raise CompletionTimeout(
                    f"operations of this client still use its pages after {timeout_s:g} s",
                    code="stalled_stream",
                    remedy="free no pool yet; find out what the engine's stream waits for, then close again",
                )
            self._engine.detach(self._session)
        if self._owned:
            self._local.close(remaining(deadline))
