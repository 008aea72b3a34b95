"""The engine's side of one client: its pools, its operations, and their admission.

Owns what a client has open, and what becomes of it when the client dies. Admission runs on the thread that brings the
request; after it, a transfer belongs to its lane. It knows no socket.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from devipc.errors import CapabilityError, ClosedError, DevIPCError, ResourceExhausted, StaleError, UsageError
from devipc.hicache.engine.copies import OpenedPool
from devipc.hicache.engine.engineop import EngineOp
from devipc.hicache.engine.lane import Lane
from devipc.hicache.engine.pools import Pool
from devipc.hicache.engine.transfers import BackupOp, RestoreOp
from devipc.hicache.operations import Event, Kind
from devipc.hicache.requests import (
    Answers,
    Backup,
    Flush,
    Invalidate,
    Lookup,
    PoolRequest,
    Prefetch,
    RegisterPool,
    Request,
    Restore,
    StatusRequest,
    UnregisterPool,
)
from devipc.hicache.results import Answer, PageResult, fresh
from devipc.types import PoisonReason

if TYPE_CHECKING:
    from devipc.hicache.engine.transferengine import Engine

__all__ = ["Session"]

MAX_POOLS = 64
MAX_OPEN = 16 * 1024  # operations, leases among them, which cost their client nothing
_TRANSFERS = (Kind.BACKUP, Kind.RESTORE)
_TRANSFER_REQUESTS = (Backup, Restore)  # a union would be made anew for each operation
_STILL_SERVED = (Kind.UNREGISTER, Kind.INVALIDATE, Kind.FLUSH, Kind.STATUS)


class _ShortOp(EngineOp):
    """An operation that is answered at once, or that only waits for a word: everything but a transfer."""

    given = Answer()

    def answer(self) -> Answer:
        return self.given

    def say(self, event: Event, answer: Answer) -> None:
        """Step with the answer to be told."""
        self.given = answer
        self.step(event)


class Session:
    """See the module. Any thread.

    Parameters
    ----------
    engine : Engine
        Serves it.
    owner : bytes
        The client's instance.
    answers : Answers
        Where its answers go.
    """

    def __init__(self, engine: Engine, owner: bytes, answers: Answers) -> None:
        self.owner = owner
        self.answers = answers
        self._engine = engine
        self._tier = engine.tier
        self._lock = threading.RLock()  # of what is below; admission and the steps of short operations run under it
        self._idle = threading.Condition(self._lock)
        self._pools: dict[int, Pool] = {}
        # By pool: its generation, and its UNREGISTER, where its client gave up on it.
        self._opening: dict[int, tuple[int, _ShortOp | None]] = {}
        self._leaving: dict[int, _ShortOp] = {}  # by pool: its UNREGISTER, which waits for the users
        self._unmapping = 0  # pools whose memory is still reached, and that nothing uses
        self._ops: dict[int, EngineOp] = {}
        self._transfers = 0
        self._last_op = 0
        self._dying = False
        self._short: dict[type[Request], Callable[[_ShortOp, Request], None]] = {
            RegisterPool: self._register,
            UnregisterPool: self._unregister,
            Lookup: self._lookup,
            Prefetch: self._prefetch,
            Invalidate: self._invalidate,
            Flush: self._flush,
            StatusRequest: self._status,
        }

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Begin an operation; what becomes of it is answered, a refusal too, perhaps before this returns.

        Raises
        ------
        UsageError
            When the number is not larger than all before: it could not be told from an older operation.
        """
        with self._lock:
            if request.op <= self._last_op:
                raise UsageError(
                    f"operation {request.op} after {self._last_op}", code="duplicate", remedy="count operations up"
                )
            self._last_op = request.op
            if not isinstance(request, _TRANSFER_REQUESTS):
                self._submit_short(request)
                return
            lane = self._submit_transfer(request)
        if lane is not None:
            lane.drive()

    def announce(self, *, backup: bool) -> None:
        """Let the lane of an operation that is about to be submitted get ready for it."""
        (self._engine.backups if backup else self._engine.restores).copies.announce()

    def _submit_short(self, request: Request) -> None:
        """Do it, with the lock."""
        operation = _ShortOp(request, self.owner, self.answers.answer, self._ended)
        self._ops[request.op] = operation
        try:
            self._refuse_when_over(request)
            self._short[type(request)](operation, request)
        except DevIPCError as error:
            operation.say(Event.REFUSE, Answer(error=error))

    def _submit_transfer(self, request: Backup | Restore) -> Lane | None:
        """Admit it, with the lock: until its lane has it, nobody else may take a step of it. Return that lane."""
        try:
            pool = self._check(request)
        except DevIPCError as error:
            # Refused before there is anything to keep: one step, of the right table.
            request.fence.poison(PoisonReason.CANCELLED)
            refused = _ShortOp(request, self.owner, self.answers.answer, lambda _op: None)
            refused.say(Event.REFUSE, Answer(np.full(len(request.pages), PageResult.NOT_DONE, np.uint8), error))
            return None
        operation: BackupOp | RestoreOp
        common = (self.owner, self.answers.answer, self._ended)
        if isinstance(request, Backup):
            lane = self._engine.backups
            operation = BackupOp(request, *common, pool=pool, tier=self._tier, lane=lane)
        else:
            lane = self._engine.restores
            operation = RestoreOp(request, *common, pool=pool, tier=self._tier, lane=lane)
        self._transfers += 1  # no call, hence no interrupt, comes between these: who counts it gives it back
        pool.users += 1
        self._ops[request.op] = operation
        try:
            operation.admit()
        except DevIPCError as error:
            operation.refuse(error)
            return None
        lane.add(operation)
        return lane

    def _check(self, request: Backup | Restore) -> Pool:
        """Check everything that needs no host tier; return the pool."""
        self._refuse_when_over(request)
        pool = self._pool(request)
        pool.check_pages(request.pages, distinct=isinstance(request, Restore))
        pool.check_keys(request.keys, len(request.pages))
        most = self._engine.config.max_ops
        # An operation is counted until its keeper knows that it ended, which its client may know a moment before.
        if self._transfers >= most and sum(not op.ended for op in self.open_ops() if op.kind in _TRANSFERS) >= most:
            raise ResourceExhausted(
                f"{most} transfers of this client are unfinished",
                code="busy",
                remedy="wait for one of them; or let the engine take more (max_ops)",
            )
        return pool

    def _refuse_when_over(self, request: Request) -> None:
        # Leaving, asking and forgetting must go on when nothing moves any more.
        if self._engine.lost is not None and request.kind not in _STILL_SERVED:
            raise fresh(self._engine.lost)
        if self._dying:
            raise ClosedError("the client is detached", remedy="connect again")

    def _pool(self, request: PoolRequest) -> Pool:
        pool = self._pools.get(request.pool)
        if pool is None:
            raise StaleError(f"pool {request.pool} is not registered", remedy="register it, and use what that returns")
        pool.check_generation(request.generation)
        return pool

    # --- short operations, with the lock -----------------------------------------------------------------------------

    def _register(self, operation: _ShortOp, request: Request) -> None:
        assert isinstance(request, RegisterPool)
        taken = len(self._pools) + len(self._opening)
        if request.pool in self._pools or request.pool in self._opening or taken >= MAX_POOLS:
            raise UsageError(
                f"pool {request.pool} is registered, or {MAX_POOLS} are",
                code="pools",
                remedy="unregister pools that are no longer used, and count their numbers up",
            )
        page_nbytes = request.layout.page_nbytes
        if not self._tier.capacity(self._tier.block_of(page_nbytes)):
            raise ResourceExhausted(
                f"a page has {page_nbytes} bytes, no slab of the host tier holds one",
                code="too_large",
                retryable=False,
                remedy="give the host tier larger slabs (slab_nbytes), and more memory",
            )
        self._opening[request.pool] = request.generation, None
        self._engine.carrier.open_pool(self.owner, request, lambda found: self._opened(operation, request, found))

    def _opened(self, operation: _ShortOp, request: RegisterPool, found: OpenedPool | DevIPCError) -> None:
        """Take a pool that the carrier has opened, perhaps long after; on any thread."""
        with self._lock:
            _, unwanted = self._opening.pop(request.pool)
            try:
                if isinstance(found, DevIPCError):
                    raise found
                self._refuse_when_over(request)
                if unwanted is not None:
                    raise ClosedError("the pool was unregistered meanwhile", remedy="register it again")
                pool = Pool(request.pool, request.generation, request.layout, found, request.namespace)
            except DevIPCError as error:
                if not operation.ended:  # nobody asks any more after the client's end
                    operation.say(Event.REFUSE, Answer(error=error))
                if not isinstance(found, DevIPCError):
                    self._unmap(found, unwanted)
                elif unwanted is not None:
                    unwanted.step(Event.DRAINED)
                return
            self._pools[request.pool] = pool
            advice: list[object] = [
                {"code": one.code, "message": one.message, "remedy": one.remedy} for one in request.layout.advice()
            ]
            operation.say(Event.FINISH, Answer(detail={"advice": advice}))

    def _unregister(self, operation: _ShortOp, request: Request) -> None:
        assert isinstance(request, UnregisterPool)
        if self._opening.get(request.pool) == (request.generation, None):
            operation.step(Event.ADMIT)
            self._opening[request.pool] = request.generation, operation
            return
        pool = self._pool(request)
        del self._pools[pool.number]
        operation.step(Event.ADMIT)
        self._leaving[id(pool)] = operation
        self._left(pool)

    def _left(self, pool: Pool) -> None:
        """Let a pool go that is not registered any more, once it has no users."""
        if pool.users or self._pools.get(pool.number) is pool:
            return
        self._unmap(pool.opened, self._leaving.pop(id(pool), None))

    def _unmap(self, opened: OpenedPool, leaving: _ShortOp | None) -> None:
        """Have memory let go; its UNREGISTER, if there is one, is answered when nobody reaches it any more."""
        self._unmapping += 1
        self._engine.carrier.close_pool(opened, lambda: self._unmapped(leaving))

    def _unmapped(self, leaving: _ShortOp | None) -> None:
        with self._lock:
            self._unmapping -= 1
            if leaving is not None:
                leaving.step(Event.DRAINED)
            self._tell_idle()

    def _lookup(self, operation: _ShortOp, request: Request) -> None:
        assert isinstance(request, Lookup)
        pool = self._pool(request)
        pool.check_keys(request.keys)
        if len(self._ops) > MAX_OPEN:
            raise ResourceExhausted(
                f"{MAX_OPEN} operations of this client are open, most of them leases",
                code="busy",
                remedy="release leases that are not needed, or let them end sooner (lease_s)",
            )
        names = pool.names(request.keys)
        hit, _ = self._tier.hold(operation.holder, names, page_nbytes=pool.page_nbytes, lease_s=request.lease_s)
        results = np.where(hit, PageResult.HIT, PageResult.MISSING).astype(np.uint8)
        operation.say(Event.FOUND if hit.any() else Event.FINISH, Answer(results))
        self._engine.restores.wake()  # which looks after leases

    def _prefetch(self, operation: _ShortOp, request: Request) -> None:
        assert isinstance(request, Prefetch)
        self._pool(request).check_keys(request.keys)
        raise CapabilityError(
            "there is no storage tier to fetch pages from",
            code="no_storage",
            remedy="recompute what the host tier does not hold",
        )

    def _invalidate(self, operation: _ShortOp, request: Request) -> None:
        assert isinstance(request, Invalidate)
        pool = self._pool(request)
        pool.check_keys(request.keys)
        gone = self._tier.invalidate(pool.names(request.keys))
        operation.say(Event.FINISH, Answer(detail={"pages": gone}))

    def _flush(self, operation: _ShortOp, request: Request) -> None:
        assert isinstance(request, Flush)
        gone = self._tier.flush(self._pool(request).namespace)
        operation.say(Event.FINISH, Answer(detail={"pages": gone}))

    def _status(self, operation: _ShortOp, request: Request) -> None:
        operation.say(Event.FINISH, Answer(detail=self._engine.status()))

    # --- what follows ------------------------------------------------------------------------------------------------

    def tell(self, op: int, event: Event) -> None:
        """Take what the client says about an operation. What comes after its end changes nothing."""
        with self._lock:
            operation = self._ops.get(op)
            if isinstance(operation, _ShortOp):
                if operation.allows(event):
                    self._tier.release(operation.holder)
                    operation.step(event)
                return
        if operation is not None:
            self._on_lane(operation, event)

    def expired(self, op: int) -> None:
        """Note that the lease of a lookup is over; its pages are released already."""
        with self._lock:
            operation = self._ops.get(op)
            if operation is not None and operation.allows(Event.EXPIRE):
                operation.step(Event.EXPIRE)

    def dying(self) -> None:
        """The client is dying or leaves: nothing more is begun, leases end, and what moves is drained."""
        with self._lock:
            self._dying = True
            pools = list(self._pools.values())
            self._pools.clear()
            for pool in pools:
                self._left(pool)
            operations = list(self._ops.values())
            for operation in operations:
                if isinstance(operation, _ShortOp) and operation.allows(Event.CLIENT_DYING):
                    self._tier.release(operation.holder)
                    operation.step(Event.CLIENT_DYING)
        for operation in operations:
            if not isinstance(operation, _ShortOp):
                self._on_lane(operation, Event.CLIENT_DYING)

    def wait_idle(self, *, timeout_s: float) -> bool:
        """Block until nothing of this client is open, no memory of its pools included; False when the time is up."""
        with self._lock:
            return self._idle.wait_for(lambda: not (self._ops or self._unmapping), timeout_s)

    def _tell_idle(self) -> None:
        if not (self._ops or self._unmapping):
            self._idle.notify_all()

    @property
    def pool_count(self) -> int:
        """Pools that are registered."""
        return len(self._pools)

    def open_ops(self) -> list[EngineOp]:
        """Return what has not ended."""
        # Without the lock: whoever asks has that of another session, which may be asking here. A list is made at once.
        return list(self._ops.values())

    def _on_lane(self, operation: EngineOp, event: Event) -> None:
        assert isinstance(operation, BackupOp | RestoreOp)
        lane = self._engine.backups if isinstance(operation, BackupOp) else self._engine.restores
        lane.post(lambda: operation.tell_from_client(event))
        lane.drive()

    def _ended(self, operation: EngineOp) -> None:
        with self._lock:
            self._ops.pop(operation.op, None)
            if operation.kind in _TRANSFERS:
                self._transfers -= 1
                pool = operation.pool  # type: ignore[attr-defined]
                pool.users -= 1
                self._left(pool)
            self._tell_idle()
