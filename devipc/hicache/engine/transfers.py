"""Backups and restores on the engine's side: what each waits for, and what it does next.

Owns the step from a table's state to an action, and the one place where an operation gives back what it holds. It
runs on its lane's thread, save for the admission. It knows neither other operations nor a client.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import compress

import numpy as np
import numpy.typing as npt

from devipc.errors import CompletionTimeout, DeviceLostError, DevIPCError, ResourceExhausted
from devipc.hicache.engine.copies import Job
from devipc.hicache.engine.engineop import EngineOp, Tell
from devipc.hicache.engine.lane import Lane
from devipc.hicache.engine.pools import Pool
from devipc.hicache.handles import ready_failure
from devipc.hicache.operations import Event, Status
from devipc.hicache.planning.planner import Direction, run_lengths
from devipc.hicache.requests import Backup, CompletionFence, PageIds, ReadyPoint, Restore
from devipc.hicache.results import Answer, PageResult, Results
from devipc.hicache.tier.hosttier import HostTier
from devipc.hicache.tier.records import Places, Reservation
from devipc.types import PoisonReason

__all__ = ["BackupOp", "RestoreOp"]

_WAITING = frozenset({"waiting", "waiting_confirmed", "admitted"})
_COPYING = frozenset({"copying", "copying_confirmed"})
_DRAINING = frozenset({"cancelling", "dropping", "expiring", "expiring_confirmed", "orphaned"})
_POISON = {Status.TIMED_OUT: PoisonReason.TIMEOUT, Status.FAILED: PoisonReason.DEVICE_LOST}


class _TransferOp(EngineOp, ABC):
    """What backups and restores have in common."""

    direction: Direction

    def __init__(
        self,
        request: Backup | Restore,
        owner: bytes,
        tell: Tell,
        on_end: Callable[[EngineOp], None],
        *,
        pool: Pool,
        tier: HostTier,
        lane: Lane,
    ) -> None:
        super().__init__(request, owner, self._say, on_end)
        self._tell_now = tell
        self._kept: list[tuple[Event, Answer]] | None = None
        self.pool = pool
        self.pages = request.pages
        self.names = pool.names(request.keys)
        self.results: Results = np.zeros(len(request.pages), np.uint8)  # not done
        self.error: DevIPCError | None = None
        self.fence: CompletionFence = request.fence
        self._ready: ReadyPoint = request.ready
        self._tier = tier
        self._lane = lane
        self._deadline = self.began + request.timeout_s
        self._timeout_s = request.timeout_s
        self._job: Job | None = None
        self._nbytes = 0
        self._released = False

    def overdue_s(self, now: float) -> float:
        """See :class:`~devipc.hicache.engine.engineop.EngineOp`."""
        return max(0.0, now - self._deadline)

    # --- what is told ---

    def answer(self) -> Answer:
        """Return what the client learns now."""
        return Answer(self.results.copy(), self.error)

    def _say(self, op: int, event: Event, answer: Answer, _passed: tuple[Event, ...] = (), /) -> None:
        if self._kept is None:
            self._tell_now(op, event, answer)
            return
        self._kept.append((event, answer))
        if self.ended:
            self._tell_kept()

    def _tell_kept(self) -> None:
        kept, self._kept = self._kept, None
        if kept:
            event, answer = kept[-1]
            self._tell_now(self.op, event, answer, tuple(before for before, _ in kept[:-1]))

    def refuse(self, error: DevIPCError) -> None:
        """End before anything began."""
        self.error = error
        self.step(Event.REFUSE)

    def tell_from_client(self, event: Event) -> None:
        """Take what the client says. What comes too late, or a second time, changes nothing."""
        if self.allows(event):
            self.step(event)
            self.settle()

    # --- what happens next, on the lane ---

    @property
    def waits(self) -> bool:
        """See :class:`~devipc.hicache.engine.lane.Work`."""
        return self.state in _WAITING

    def advance(self, now: float) -> bool:
        """See :class:`~devipc.hicache.engine.lane.Work`."""
        before = self.state
        if self.state in _WAITING:
            self._start_when_ready(now)
        if self.state in _COPYING or self.state in _DRAINING:
            self._look(now)
        elif now >= self._deadline and self.allows(Event.DEADLINE):
            self._time_out("waiting to be confirmed")
        return self.state != before

    def fail(self, error: DevIPCError) -> None:
        """See :class:`~devipc.hicache.engine.lane.Work`: what is on a lost device will not move again.

        When the engine ends for another reason, copies go on: their pages are in use until the stream has passed them.
        """
        waits = self.state in _WAITING
        if not (waits or isinstance(error, DeviceLostError)):
            return
        self.error = self.error or error
        if waits:
            self.step(Event.FENCE_POISONED)
        elif self.state in _COPYING:
            self.copies_failed()
            self.step(Event.COPY_FAILED)
        elif self.state in _DRAINING:
            self.step(Event.DRAINED)

    def _start_when_ready(self, now: float) -> None:
        if now >= self._deadline:
            self._time_out("waiting for its pages to be ready, or for room")
            return
        try:
            if not self._ready.reached():
                return
        except DeviceLostError as error:
            self._lane.lose(error)
            return
        except BaseException as error:  # poisoned, closed under us, or a caller's own trouble: it will never be reached
            self.error = ready_failure(error)
            self.step(Event.FENCE_POISONED)
            return
        if self._lane.blocks(self.owner):
            return
        moving = self.moving()
        pages = self.pages if moving is None else self.pages[moving]
        nbytes = len(pages) * self.pool.page_nbytes
        if not self._lane.takes(self.owner, nbytes):
            return
        places = self.places(moving, pages)
        if places is None:
            if not self.ended:
                self._lane.block(self.owner)
            return
        self.step(Event.FENCE_READY)
        self._nbytes = nbytes
        self._job = self._lane.copies.start(self.pool, self.direction, pages, places, self.fence)
        self._lane.took_off(self.owner, nbytes)
        self.while_copying()

    def _time_out(self, doing: str) -> None:
        """Begin the end, or end, because the deadline passed."""
        self.error = self.error or CompletionTimeout(
            f"{self.kind.value} has not finished within {self._timeout_s:g} s: {doing}",
            remedy="look at the engine's status: what its streams wait for, and who holds the host tier",
        )
        self.step(Event.DEADLINE)

    def _look(self, now: float) -> None:
        if self.state in _COPYING and now >= self._deadline:
            self._time_out("copying; it ends when the stream lets go of its pages")
        if self._job is None:  # a defect, which has ended the engine
            return
        try:
            if not self._job.poll():
                return
        except DevIPCError as error:  # whether the copies are done is not known, so the pages stay in use
            self._lose(error)
            return
        failed, self._job = self._job.error, None
        self._lane.landed(self.owner, self._nbytes)
        if failed is not None:
            self.error = self.error or failed
            self.copies_failed()
        else:
            self._released = True
            self.copied()
        if self.state in _DRAINING:
            self.step(Event.DRAINED)
        else:
            if failed is None and self.direction is Direction.BACKUP:
                self._kept = []  # others wait for the pages, and longer than their client for its own
            try:
                self.step(Event.COPIED if failed is None else Event.COPY_FAILED)
                self.settle()
            finally:
                self._tell_kept()

    def _lose(self, error: DevIPCError) -> None:
        self._lane.lose(self.error or error)
        if isinstance(error, DeviceLostError):  # also when the engine has ended before, for another reason
            self.fail(error)

    # --- what differs ---

    @abstractmethod
    def moving(self) -> npt.NDArray[np.bool_] | None:
        """Return which pages are to be copied, ``(n,)``; None for all of them."""

    @abstractmethod
    def places(self, moving: npt.NDArray[np.bool_] | None, pages: PageIds) -> Places | None:
        """Return where the host pages of those ``pages`` are; None while there is no room."""

    def while_copying(self) -> None:
        """Do what can be done while the copies run."""

    def copied(self) -> None:
        """Enter the results of copies that are done."""

    def copies_failed(self) -> None:
        """Enter the results of copies of which nothing is known."""

    def settle(self) -> None:
        """Do what follows the copies."""

    def give_back(self) -> None:
        """Release the waiters, then the host tier."""
        if self._released:
            self.fence.settle()
        else:
            self.fence.poison(_POISON.get(Status(self.state), PoisonReason.CANCELLED))


class BackupOp(_TransferOp):
    """Device to host. Parameters as the base's."""

    direction = Direction.BACKUP

    def __init__(self, request: Backup, *arguments: object, **options: object) -> None:
        super().__init__(request, *arguments, **options)  # type: ignore[arg-type]
        self._cancel = request.cancel
        self._partial = request.partial
        self._fitting = len(self.pages)
        self._reservation: Reservation | None = None
        if request.confirmed:
            self.step(Event.CONFIRMED)

    def admit(self) -> None:
        """Check what can be checked now, and wait for the rest. On the caller's thread."""
        self._fit()
        self.step(Event.ADMIT)

    def _fit(self) -> None:
        """Leave out what this client may never fill at a time, or raise ResourceExhausted."""
        capacity = self._tier.capacity_for(self.owner, self.pool.block_nbytes)
        if len(self.pages) > capacity:
            if not self._partial:
                raise ResourceExhausted(
                    f"{len(self.pages)} pages, this client may fill {capacity} of the host tier at a time",
                    code="too_large",
                    retryable=False,
                    remedy="back up fewer pages at once, ask for a partial backup, or give the host tier more memory",
                )
            self.results[capacity:] = PageResult.NO_ROOM
            self._fitting = capacity

    def moving(self) -> npt.NDArray[np.bool_] | None:
        """All pages but those that are there, or do not fit."""
        present = self._tier.present(self.names, self.pool.page_nbytes)
        self.results[: self._fitting] = PageResult.NOT_DONE
        if self._fitting == len(present) and not present.any():
            return None
        self.results[: self._fitting][present[: self._fitting]] = PageResult.PRESENT
        moving = ~present
        moving[self._fitting :] = False
        return moving

    def places(self, moving: npt.NDArray[np.bool_] | None, pages: PageIds) -> Places | None:
        """Reserve; the deadline limits how long that may be tried."""
        try:
            self._reservation = self._tier.reserve(
                self.holder,
                self.names if moving is None else list(compress(self.names, moving.tolist())),
                namespace=self.pool.namespace,
                page_nbytes=self.pool.page_nbytes,
                runs=run_lengths(pages) if self._tier.extent_pages > 1 else None,
            )
        except ResourceExhausted as error:
            self.error = error  # what a deadline will name as the cause
            if not error.retryable:  # there are more clients now than when it was admitted
                try:
                    self._fit()
                except ResourceExhausted as never:
                    self.refuse(never)
            return None
        self.error = None
        return self._reservation.places

    def while_copying(self) -> None:
        """Make what will be published."""
        if self._reservation is not None:
            self._tier.prepare(self._reservation)

    def settle(self) -> None:
        """Publish, unless the client gave up before it used its pages again."""
        if self.state != "copied":
            return
        if self._cancel.is_set():
            self.step(Event.WORD_SET)
            return
        self.step(Event.WORD_CLEAR)
        reservation, self._reservation = self._reservation, None
        assert reservation is not None
        self.results[self.results == PageResult.NOT_DONE] = self._tier.commit(reservation)
        self.step(Event.PUBLISH)
        self.step(Event.FINISH)

    def copies_failed(self) -> None:
        """What was to be copied has failed."""
        self.results[self.results == PageResult.NOT_DONE] = PageResult.FAILED

    def give_back(self) -> None:
        """Also the blocks that were reserved, if they were not published."""
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            self.results[self.results == PageResult.NOT_DONE] = PageResult.DROPPED
            self._tier.abort(reservation)
        super().give_back()


class RestoreOp(_TransferOp):
    """Host to device. Parameters as the base's."""

    direction = Direction.RESTORE

    def __init__(self, request: Restore, *arguments: object, **options: object) -> None:
        super().__init__(request, *arguments, **options)  # type: ignore[arg-type]
        self._partial = request.partial
        self._found: Places | None = None
        self._claimed = False

    def admit(self) -> None:
        """Hold the host pages, before the first byte moves, and say which are there. On the caller's thread."""
        hit, self._found = self._tier.hold(
            self.holder, self.names, page_nbytes=self.pool.page_nbytes, partial=self._partial
        )
        self.results[:] = PageResult.MISSING
        self.results[hit] = PageResult.HIT
        missing = len(hit) - int(np.count_nonzero(hit))
        if missing and (not self._partial or missing == len(hit)):
            raise DevIPCError(
                f"{missing} of {len(hit)} pages are not in the host tier",
                code="missing",
                remedy="recompute them, or ask for a partial restore of those that are there",
            )
        self.pool.claim(self.pages)
        self._claimed = True
        self.step(Event.ADMIT)

    def moving(self) -> npt.NDArray[np.bool_] | None:
        """The pages that are there."""
        hit = self.results == PageResult.HIT
        return None if np.count_nonzero(hit) == len(hit) else hit

    def places(self, moving: npt.NDArray[np.bool_] | None, pages: PageIds) -> Places | None:
        """Where they were found; they are held since."""
        return self._found

    def copied(self) -> None:
        """Hits are restored now."""
        self.results[self.results == PageResult.HIT] = PageResult.RESTORED

    def copies_failed(self) -> None:
        """What the hits' destinations hold is unknown."""
        self.results[self.results == PageResult.HIT] = PageResult.FAILED

    def give_back(self) -> None:
        """Also the host pages and the claim of the destinations."""
        self._tier.release(self.holder)
        if self._claimed:
            self.pool.unclaim(self.pages)
        super().give_back()
