"""The deployment with a daemon: a client's attachments to it, one after the other, and what holds between them.

Owns the client's identity, its pools, and the thread that attaches again. While nobody serves, operations are refused
at once; what a dying engine may still write to stays quarantined until nothing of that engine is left.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence

from devipc.deadline import deadline_after, remaining, start_thread
from devipc.errors import CompletionTimeout, DevIPCError, PeerGone, StaleError, UsageError
from devipc.hicache.client.attach import FIRST_PAUSE_S, LONGEST_PAUSE_S, Target, attach, attach_first
from devipc.hicache.client.attachment import Attachment
from devipc.hicache.client.links import LinkAnswers, LinkFence, PoolMemory
from devipc.hicache.client.poolbook import PoolBook
from devipc.hicache.client.readypoints import Forwarder
from devipc.hicache.client.slotuse import SlotFence, SlotWord
from devipc.hicache.handles import NeverReady, check_exports
from devipc.hicache.operations import Event
from devipc.hicache.policy import WritePolicy, policy_named
from devipc.hicache.requests import Backup, ReadyPoint, RegisterPool, Request, Restore, UnregisterPool
from devipc.hicache.results import Answer, defect
from devipc.hicache.tier.index import IndexReader
from devipc.hicache.wire.transport import Way
from devipc.hicache.wire.waiting import Waiters, park
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import Stream
from devipc.types import PoisonReason

__all__ = ["DaemonLink"]

_REGISTER_S, _TIDY_S = 10.0, 2.0
_log = logging.getLogger("devipc.hicache")


class DaemonLink:
    """See the module. Fulfils :class:`~devipc.hicache.client.links.EngineLink`. Any thread.

    Parameters
    ----------
    path : str
        The daemon's socket.
    device : Device, optional
        Where the pools are; None takes the daemon's device.
    wait_s : float
        How long to wait for somebody to listen.
    way : Way
        How frames shall travel, where the daemon lets them.
    allow_uids : collection of int
        Other users whose daemon is trusted.

    Raises
    ------
    PeerGone
        When nobody listens.
    DevIPCError
        What the daemon refuses with.
    """

    def __init__(
        self,
        path: str,
        *,
        device: Device | None = None,
        wait_s: float = 0.0,
        way: Way = Way.RINGS,
        allow_uids: Collection[int] = (),
    ) -> None:
        uuid = None if device is None else device.info.uuid
        self._target = Target(
            path=path, client=secrets.token_bytes(16), device_uuid=uuid, way=way, allow_uids=tuple(allow_uids)
        )
        self._pid = os.getpid()
        self._forwarder = Forwarder()
        self._words = threading.Lock()
        self._changed = threading.Condition(threading.RLock())
        self._telling = threading.RLock()  # held before the others: gone is told behind dying
        self._pools = PoolBook()
        self._leaving: list[Attachment] = []  # over or not used yet, and perhaps writing
        self._spent: list[Attachment] = []  # to be closed
        self._answers: LinkAnswers
        self._why: DevIPCError | None = None
        self._since, self._attempts, self._losses = 0.0, 0, 0
        self._closing = self._closed = False
        self._thread: threading.Thread | None = None
        self._current: Attachment | None = attach_first(self._target, self._forwarder, wait_s=wait_s)
        welcome = self._current.welcome
        self._layer_groups, self._write_policy = welcome.layer_groups, policy_named(welcome.write_policy)
        self._device = self._current.session.device

    # --- what the client asks ----------------------------------------------------------------------------------------

    @property
    def layer_groups(self) -> Sequence[int]:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        return self._layer_groups

    @property
    def write_policy(self) -> WritePolicy:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        return self._write_policy

    def attach(self, answers: LinkAnswers) -> None:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        self._answers = answers
        thread = threading.Thread(target=self._run, name="devipc-hicache-attach", daemon=True)
        start_thread(thread, "attach to a cache daemon again")
        self._thread = thread
        assert self._current is not None
        self._start(self._current)

    def _start(self, attachment: Attachment) -> None:
        attachment.start(self._answers.answer, on_over=self._on_over, on_gone=self._on_gone)

    def reader(self) -> IndexReader:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        assert self._current is not None
        return self._current.reader

    def reach(self, pool: PoolMemory) -> tuple[int, ...]:
        """See :class:`~devipc.hicache.client.links.EngineLink`: the engine opens the memory by its names."""
        check_exports(self._device.memory, pool.exports)
        self._pools.add(pool)
        return ()

    def unreach(self, pool: int, timeout_s: float) -> None:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        deadline = deadline_after(timeout_s)
        memory = self._pools.leave(pool)
        with self._changed:
            if memory is not None and not self._changed.wait_for(lambda: not self._leaving, remaining(deadline)):
                raise self._stalled(timeout_s)
            current = self._current
        if memory is not None and current is not None:
            current.unshare(memory, remaining(deadline))
        self._pools.remove(pool)

    def ready(self, stream: Stream) -> ReadyPoint:
        """See :class:`~devipc.hicache.client.links.EngineLink`; while nobody serves, what waits for the point fails."""
        current = self._current
        try:
            return NeverReady(self._degraded()) if current is None else current.mark(stream)
        except DevIPCError as error:
            if current is None or current.over is None:
                raise
            return NeverReady(error)

    def fence(self) -> SlotFence:
        """See :class:`~devipc.hicache.client.links.EngineLink`; the operation that has it is submitted next."""
        if (current := self._current) is not None:
            current.announce()
        return SlotFence(SlotWord(self._words))

    def word(self, fence: LinkFence) -> SlotWord:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        assert isinstance(fence, SlotFence)
        return fence.word

    def submit(self, request: Request) -> None:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        current = self._current
        try:
            if isinstance(request, UnregisterPool):
                self._pools.leave(request.pool)
            if current is None:
                raise self._degraded()
            if isinstance(request, RegisterPool):
                current.share(self._pools.numbered(request))
            current.submit(request)
        except UsageError:
            raise
        except DevIPCError as error:
            over = None if current is None else current.over
            self._refuse(request, error if over is None else self._degraded(over))

    def _refuse(self, request: Request, error: DevIPCError) -> None:
        if isinstance(request, Backup | Restore):
            request.fence.poison(PoisonReason.CANCELLED)
        self._answers.answer(request.op, Event.REFUSED, Answer(error=error))

    def tell(self, op: int, event: Event) -> None:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        if (current := self._current) is not None:
            current.tell(op, event)

    def ended(self, op: int) -> None:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        current = self._current
        if current is not None and op in current.ops:
            current.ended(op)
            return
        for attachment in tuple(self._leaving):
            attachment.ended(op)

    def wait(self, done: Callable[[], bool], waiters: Waiters, deadline: float) -> bool:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        current = self._current
        return park(done, waiters, deadline) if current is None else current.pump.wait(done, waiters, deadline)

    def attend(self) -> None:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        if (current := self._current) is not None:
            current.pump.attend()

    def status(self) -> dict[str, object]:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        with self._changed:
            current = self._current
            return {
                "degraded": "" if current else str(self._why),
                "degraded_s": 0.0 if current else time.monotonic() - self._since,
                "attempts": self._attempts,
                "losses": self._losses,
                "dying_engines": sum(one.over is not None for one in self._leaving),
            } | (current.status() if current else {})

    def _degraded(self, why: DevIPCError | None = None) -> DevIPCError:
        why = why or self._why
        return PeerGone(
            f"no cache engine serves this client now: {'it attaches' if why is None else why.message}",
            code="degraded",
            retryable=True,
            remedy="go on without the cache; the client attaches again by itself, see its status",
        )

    # --- losing, and attaching again ---------------------------------------------------------------------------------

    def _on_over(self, attachment: Attachment, error: DevIPCError) -> None:
        with self._telling:
            with self._changed:
                if attachment is self._current:
                    self._current = None
                    self._leaving.append(attachment)
                    self._why, self._since, self._attempts = error, time.monotonic(), 0
                    self._losses += 1
                self._changed.notify_all()
            if not self._closed:
                _log.warning("cache client without an engine: %s", error)
            self._answers.attachment_dying(list(attachment.ops))
        if attachment.gone:
            self._on_gone(attachment)

    def _on_gone(self, attachment: Attachment) -> None:
        with self._telling:
            if attachment not in self._leaving:
                return
            # Told first: what is waited for below is that nobody's page is quarantined any more.
            self._answers.attachment_gone(list(attachment.ops))
            with self._changed:
                if attachment in self._leaving:
                    self._leaving.remove(attachment)
                    self._spent.append(attachment)
                self._changed.notify_all()

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._attaches() or self._spent)
                attaches, closing = self._attaches(), self._closing
            if attaches:
                done = self._attach_again()
                with self._changed:  # the next attempt is not put off any longer when somebody begins to close
                    self._changed.wait_for(lambda: done or self._closed or self._closing is not closing, pause)  # noqa: B023
                pause = FIRST_PAUSE_S if done else min(2 * pause, LONGEST_PAUSE_S)
            self._tidy()

    def _attaches(self) -> bool:
        """Who closes attaches, too, while an engine that cannot be heard any more may still write: to be told of it."""
        return self._current is None and (not self._closing or bool(self._leaving))

    def _tidy(self) -> None:
        """Close what is spent; an attachment more than once takes part in nothing."""
        with self._changed:
            spent, self._spent = self._spent, []
        for attachment in spent:
            try:
                attachment.close(_TIDY_S)
            except Exception:
                _log.exception("an old attachment could not be given back")

    def _attach_again(self) -> bool:
        """Try once; the daemon answers a client that it knows only when nothing of its old operations moves."""
        with self._changed:
            self._attempts += 1
        new: Attachment | None = None
        try:
            new = attach(self._target, self._forwarder)
            if new.welcome.layer_groups != self._layer_groups:
                raise StaleError(
                    f"the daemon's layer groups are {new.welcome.layer_groups}, they were {self._layer_groups}",
                    code="layer_groups",
                    remedy="start the daemon with the groups that it had, or connect anew",
                )
            for old in tuple(self._leaving):
                if old.welcome.engine_instance == new.welcome.engine_instance:
                    self._on_gone(old)
            if self._closing:  # nothing of an older one moves, which was the question
                raise self._degraded()
            self._start(new)
            return self._use(new, self._register_all(new))
        except DevIPCError as error:
            why = error
        except Exception as error:
            _log.exception("attaching to the cache daemon failed")
            why = defect(error)
        with self._changed:
            self._why = why
        if new is not None:
            self._discard(new)
        return False

    def _register_all(self, new: Attachment) -> set[int]:
        with self._changed:
            self._leaving.append(new)  # it has the pools from now on, and nobody may take one back unseen
        known = self._pools.registered()
        for op, pool in known:
            new.share(pool)
            new.register(pool, op, _REGISTER_S)
        return {pool.number for _, pool in known}

    def _use(self, new: Attachment, registered: set[int]) -> bool:
        """Serve by ``new`` from now on, unless pools came or went meanwhile."""
        with self._changed:
            same = registered == {pool.number for _, pool in self._pools.registered()}
            usable = same and new in self._leaving and new.over is None and not self._closing
            if usable:
                self._answers.attached_again(new.reader)
                self._leaving.remove(new)
                self._current = new
                self._changed.notify_all()
        if not usable:
            self._discard(new)
        elif new.over is not None:  # meanwhile
            self._on_over(new, new.over)
        return usable

    def _discard(self, new: Attachment) -> None:
        """Give an attachment back that was never used. If the engine does not say so, it is waited for as any other."""
        new.reader.close()
        try:
            new.leave(_TIDY_S)
        except DevIPCError as error:
            new.end(error)
            if new in self._leaving and not new.gone:  # perhaps before it was in there, and told to nobody
                return
        self._on_gone(new)
        self._spent.append(new)

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """See :class:`~devipc.hicache.client.links.EngineLink`."""
        if os.getpid() != self._pid or self._closed:
            return
        deadline = deadline_after(timeout_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            current = self._current
        if current is not None:
            self._leave(current, remaining(deadline))
        with self._changed:
            if not self._changed.wait_for(lambda: not self._leaving, remaining(deadline)):
                raise self._stalled(timeout_s)
            self._closed = True
            self._changed.notify_all()
            current, self._current = self._current, None
        self._forwarder.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_TIDY_S)
        if current is not None:
            self._spent.append(current)
        self._tidy()

    def _leave(self, current: Attachment, timeout_s: float) -> None:
        try:
            current.leave(timeout_s)
        except CompletionTimeout as error:
            if error.code == "stalled_stream":
                raise
            raise self._stalled(timeout_s) from error
        except DevIPCError as error:
            current.end(error)

    def _stalled(self, timeout_s: float) -> CompletionTimeout:
        return CompletionTimeout(
            f"the engine may still use pages of this client after {timeout_s:g} s",
            code="stalled_stream",
            remedy="free no pool yet; find out what keeps the engine's process, then try again",
        )
