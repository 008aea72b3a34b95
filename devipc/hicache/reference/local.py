"""A runtime in this process: pages, model, and transfers through the cache's client.

Owns all device ordering: one stream computes, the engine's two copy. Restores are started when a batch is announced;
the computation waits for a layer group's pages right before the layer that reads them. A batch that waited for a
restore which then fails is discarded whole, with the one announced behind it: no token leaves, and no page is kept.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from devipc.errors import ClosedError, DevIPCError, StaleError, UsageError
from devipc.hicache.api import UNFENCED, HiCacheClient, PoolHandle
from devipc.hicache.client.ticket import Ticket
from devipc.hicache.keys import KEY_NBYTES, Namespace
from devipc.hicache.operations import Status
from devipc.hicache.reference.backups import Backups, keys_of
from devipc.hicache.reference.config import RuntimeConfig
from devipc.hicache.reference.decoding import Decoder, Row
from devipc.hicache.reference.handles import CacheExtentRef, RequestRuntimeHandle
from devipc.hicache.reference.model import PagedModel, Weights
from devipc.hicache.reference.pagetable import PageTable, Slot, SlotBook
from devipc.hicache.reference.pool import KVPool
from devipc.hicache.reference.runtime import (
    BatchCompletion,
    BatchPlan,
    PreparedBatchHandle,
    RestorePages,
    RuntimeLimits,
    RuntimeStats,
)
from devipc.hicache.reference.throttle import BackupThrottle
from devipc.hicache.requests import ReadyPoint
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import Stream

__all__ = ["LocalGPURuntime"]

_log = logging.getLogger(__name__)
_RESTORE_TIMEOUT_S = 10.0


@dataclass(slots=True)
class _Restoring:
    handle: RequestRuntimeHandle
    pages: list[int]
    ticket: Ticket | None = None
    refused: str = ""  # why there is no ticket


@dataclass(slots=True)
class _Announced:
    plan: BatchPlan
    epoch: int
    restoring: list[_Restoring] = field(default_factory=list)
    late: list[RestorePages] = field(default_factory=list)  # there was no room for them yet


class LocalGPURuntime:
    """Fulfils :class:`~devipc.hicache.reference.runtime.RuntimeInterface` with a device of this process.

    One thread executes; another one may announce the next batch meanwhile.

    Parameters
    ----------
    device : Device
        Where keys and values are kept; stays the caller's.
    weights : Weights
        On the torch device that belongs to it.
    client : HiCacheClient or None
        The cache below, ``inproc:`` or ``unix:``; stays the caller's. None: there is none.
    config : RuntimeConfig
        Sizes.
    """

    def __init__(self, device: Device, weights: Weights, client: HiCacheClient | None, config: RuntimeConfig) -> None:
        self._client = client
        self._config = config
        self._lock = threading.RLock()  # of everything but tensors: not held while something is computed
        self.pool = KVPool(
            device, weights.shape, pages=config.pages + 1, page_tokens=config.page_tokens, dtype=weights.embed.dtype
        )
        self._model = PagedModel(weights, self.pool.k, self.pool.v, max_tokens=config.max_tokens)
        self._decoder = Decoder(self._model, max_requests=config.max_requests)
        self._torch_stream: torch.cuda.Stream | None = None
        self._stream: Stream | None = None
        if self.pool.k.device.type != "cpu":
            assert device.transfer is not None
            torch.cuda.synchronize(self.pool.k.device)  # weights and pool were made on another stream
            self._torch_stream = torch.cuda.Stream(self.pool.k.device)  # type: ignore[no-untyped-call]
            self._stream = device.transfer.wrap_stream(self._torch_stream)
        namespace = Namespace.of(
            self.pool.built.layout, model=config.model, revision=config.revision, dtype=str(weights.embed.dtype)
        )
        self._handle: PoolHandle | None = None
        if client is not None:
            self._handle = client.register_pool(self.pool.built, namespace=namespace)
        self.limits = RuntimeLimits(
            page_tokens=config.page_tokens,
            chunk_tokens=config.chunk_tokens,
            max_requests=config.max_requests,
            pages=config.pages,
            namespace=namespace.digest(),
        )
        self._throttle = BackupThrottle(
            config.itl_target_s,
            most_nbytes=config.pages * self.pool.page_nbytes,
            least_nbytes=self.pool.page_nbytes,
        )
        self._begin()

    def _computing(self) -> contextlib.AbstractContextManager[Any]:
        """Let torch use the stream that computes."""
        return contextlib.nullcontext() if self._torch_stream is None else torch.cuda.stream(self._torch_stream)

    def _begin(self) -> None:
        self.runtime_id = secrets.token_hex(8)
        self._table = PageTable(self.runtime_id, self._config.pages + 1, seed=self._config.shuffle)
        self._book = SlotBook(self.runtime_id, self._config.max_requests)
        self._slots: dict[RequestRuntimeHandle, Slot] = {}
        self._announced: deque[_Announced] = deque()
        self._backups = Backups(self._client, self._handle, self._table, self.pool.page_nbytes, ready=self._ready)
        self._epoch = 0
        self._free_since: ReadyPoint | None = None
        self._restored = self._computed = self._decoded = 0

    # --- identifiers -------------------------------------------------------------------------------------------------

    def open_request(self) -> RequestRuntimeHandle:
        """See :class:`~devipc.hicache.reference.runtime.RuntimeInterface`."""
        return self._book.take()

    # --- announcing --------------------------------------------------------------------------------------------------

    def prepare_batch(self, plan: BatchPlan) -> PreparedBatchHandle:
        """See the module, and :class:`~devipc.hicache.reference.runtime.RuntimeInterface`."""
        with self._lock:
            return self._prepare(plan)

    def _prepare(self, plan: BatchPlan) -> PreparedBatchHandle:
        announced = _Announced(plan, self._epoch)
        self._announced.append(announced)
        for one in plan.open:
            pages = [page for extent in one.prefix for page in self._table.pages_of(extent)]
            self._table.use(pages)
            if one.handle in self._slots or one.handle.runtime_id != self.runtime_id:
                raise StaleError(f"{one.handle} is open, or of another life", remedy="ask for a new handle")
            self._slots[one.handle] = Slot(pages, len(pages) * self._config.page_tokens)
        for order in plan.restore:
            count = len(order.keys) // KEY_NBYTES
            if self._table.free < count:  # what the batches before will free is not free yet
                announced.late.append(order)
            else:
                announced.restoring.append(self._restore(order))
        return PreparedBatchHandle(self.runtime_id, plan.number)

    def _restore(self, order: RestorePages) -> _Restoring:
        slot = self._slots[order.handle]
        count = len(order.keys) // KEY_NBYTES
        if len(slot.pages) != order.first_page:
            raise UsageError(f"restore at page {order.first_page} of a request with {len(slot.pages)}")
        pages = self._allocate(count)
        slot.pages.extend(pages)
        slot.length += count * self._config.page_tokens
        physical = self._table.physical(pages)
        restoring = _Restoring(order.handle, pages)
        try:
            restoring.ticket = self._start_restore(order, physical)
        except DevIPCError as error:
            restoring.refused = str(error)
        return restoring

    def _start_restore(self, order: RestorePages, physical: list[int]) -> Ticket:
        assert self._client is not None
        assert self._handle is not None
        # Free pages were free before the batch that computes now was begun: a restore need not wait for that one.
        ready = self._free_since
        if self._config.poison:
            with self._computing():
                self.pool.fill(physical, float("nan"))
            ready = None
        return self._client.restore(
            self._handle,
            keys_of(order.keys),
            physical,
            ready=self._ready() if ready is None else ready,
            timeout_s=_RESTORE_TIMEOUT_S,
        )

    def _ready(self) -> ReadyPoint:
        """Behind everything that was computed so far; on the host that is over when the call returns."""
        if self._stream is None or self._client is None:
            return UNFENCED
        return self._client.ready(self._stream)

    def _allocate(self, count: int) -> list[int]:
        """Return new pages; waits for backups, which keep released pages, when there are too few."""
        while self._table.free < count and self._backups.wait_for_one():
            pass
        return self._table.allocate(count)

    # --- executing ---------------------------------------------------------------------------------------------------

    def execute_batch(self, handle: PreparedBatchHandle) -> BatchCompletion:
        """See :class:`~devipc.hicache.reference.runtime.RuntimeInterface`."""
        with self._lock, self._computing():
            return self._execute(handle)

    def _execute(self, handle: PreparedBatchHandle) -> BatchCompletion:
        announced = self._announced.popleft()
        plan = announced.plan
        if handle.number != plan.number:
            raise UsageError(f"batch {handle.number} is not the next one, {plan.number} is")
        began = time.monotonic()
        found = tuple(self._find(keys) for keys in plan.ask)
        self._give_back(plan)
        if announced.epoch != self._epoch:
            self._settle(announced)
            return BatchCompletion(number=plan.number, discarded=True, found=found)
        announced.restoring += [self._restore(order) for order in announced.late]
        waiting = {one.handle: one.ticket for one in announced.restoring}
        self._free_since = self._ready()
        sampled = self._compute(plan, waiting)
        self._free_since = None
        compute_s = time.monotonic() - began
        failed = self._settle(announced)
        if failed:
            self._epoch += 1
            return BatchCompletion(
                number=plan.number, discarded=True, found=found, failed=tuple(failed), compute_s=compute_s
            )
        self._commit(plan, sampled)
        kept = tuple(self._kept(one.handle, one.first_page, one.page_count) for one in plan.keep)
        restored = sum(len(one.pages) for one in announced.restoring)
        self._restored += restored
        if plan.decode:
            self._throttle.decoded(compute_s)
        return BatchCompletion(
            number=plan.number,
            sampled=tuple(sampled.items()),
            kept=kept,
            found=found,
            compute_s=compute_s,
            restored_pages=restored,
        )

    def _find(self, keys: bytes) -> bytes:
        """Look for pages in the index of the cache below, without asking anybody."""
        if self._client is None or self._handle is None:
            return bytes(len(keys) // KEY_NBYTES)
        try:
            return self._client.find(self._handle, keys_of(keys)).tobytes()
        except DevIPCError as error:
            _log.warning("the cache below cannot be searched: %s", error)
            return bytes(len(keys) // KEY_NBYTES)

    def _give_back(self, plan: BatchPlan) -> None:
        """Do what a plan says beside the computation; also when that is discarded."""
        for order in plan.back_up:
            self._backups.order(order.extent, order.keys)
        for handle in plan.close:
            self._table.drop(self._slots.pop(handle).pages)
            self._book.give_back(handle)
        for extent in plan.release:
            self._table.drop(self._table.pages_of(extent))
        self._backups.collect()
        self._backups.start(self._throttle.nbytes)

    def _compute(
        self, plan: BatchPlan, waiting: dict[RequestRuntimeHandle, Ticket | None]
    ) -> dict[RequestRuntimeHandle, int]:
        sampled: dict[RequestRuntimeHandle, int] = {}
        for prefill in plan.prefill:
            slot = self._slots[prefill.handle]
            self._grow(slot, prefill.start + len(prefill.tokens))
            ticket = waiting.get(prefill.handle)
            physical = self._table.physical(slot.pages)
            with self._unlocked():
                logits = self._model.chunk(
                    prefill.tokens,
                    prefill.start,
                    physical,
                    chunk_tokens=self._config.chunk_tokens,
                    layer_ready=lambda layer, ticket=ticket: self._await_layer(ticket, layer),  # type: ignore[misc]
                )
                if prefill.sample:
                    sampled[prefill.handle] = self._model.likeliest(logits)
            self._computed += len(prefill.tokens)
        rows = [self._row(self._slots[decode.handle]) for decode in plan.decode]
        handles = [decode.handle for decode in plan.decode]
        with self._unlocked():
            tokens = self._decoder.decode(rows)
        sampled.update(zip(handles, tokens, strict=True))
        self._decoded += len(rows)
        return sampled

    @contextlib.contextmanager
    def _unlocked(self) -> Iterator[None]:
        """Let others announce meanwhile; only tensors may be touched here."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    def _row(self, slot: Slot) -> Row:
        self._grow(slot, slot.length + 1)
        pages = slot.pages[: slot.length // self._config.page_tokens + 1]
        return Row(slot.last_token, slot.length, self._table.physical(pages))

    def _await_layer(self, ticket: Ticket | None, layer: int) -> None:
        if ticket is None or ticket.fence is None:
            return
        try:
            if self._stream is None:
                ticket.fence.synchronize(layer=layer, timeout_s=_RESTORE_TIMEOUT_S)
            else:
                ticket.fence.wait(self._stream, layer=layer, timeout_s=_RESTORE_TIMEOUT_S)
        except DevIPCError:
            return  # what is computed now is discarded: the ticket says why

    def _grow(self, slot: Slot, tokens: int) -> None:
        missing = -(-tokens // self._config.page_tokens) - len(slot.pages)
        if missing > 0:
            slot.pages.extend(self._allocate(missing))

    def _settle(self, announced: _Announced) -> list[tuple[RequestRuntimeHandle, str]]:
        """Wait until every restore of a batch has its status: only then do its pages and its tokens mean something."""
        failed = []
        for one in announced.restoring:
            if one.ticket is None:
                failed.append((one.handle, one.refused))
                continue
            outcome = one.ticket.wait(2 * _RESTORE_TIMEOUT_S)
            if outcome.status is not Status.COMPLETED:
                failed.append((one.handle, str(outcome.error or outcome.status.value)))
        return failed

    def _commit(self, plan: BatchPlan, sampled: dict[RequestRuntimeHandle, int]) -> None:
        for prefill in plan.prefill:
            self._slots[prefill.handle].length = prefill.start + len(prefill.tokens)
        for decode in plan.decode:
            self._slots[decode.handle].length += 1
        for handle, token in sampled.items():
            self._slots[handle].last_token = token

    def _kept(self, handle: RequestRuntimeHandle, first: int, count: int) -> CacheExtentRef:
        return self._table.extent(self._slots[handle].pages[first : first + count])

    # --- looking and leaving -----------------------------------------------------------------------------------------

    def stats(self) -> RuntimeStats:
        """See :class:`~devipc.hicache.reference.runtime.RuntimeInterface`."""
        with self._lock:
            self._backups.collect()
            return self._stats()

    def _stats(self) -> RuntimeStats:
        return RuntimeStats(
            free_pages=self._table.free,
            restored_pages=self._restored,
            computed_tokens=self._computed,
            decoded_tokens=self._decoded,
            backed_up_pages=self._backups.done_pages,
            backups_open=self._backups.unfinished,
        )

    def restart(self) -> None:
        """Begin a new life: nothing that was given out before is known any more."""
        self._end_transfers()
        self._begin()

    def close(self) -> None:
        """Finish backups, leave the cache, and free the pool."""
        self._end_transfers()
        if self._client is not None and self._handle is not None:
            with contextlib.suppress(ClosedError):  # a client that was closed has let go of the pool
                self._client.unregister(self._handle)
            self._handle = None
        if self._torch_stream is not None:
            self._torch_stream.synchronize()  # chunks that no token was asked of may still be queued
        self._decoder.close()
        del self._model, self._decoder
        self.pool.close()

    def _end_transfers(self) -> None:
        for announced in self._announced:
            self._settle(announced)
        self._announced.clear()
        self._backups.finish()
