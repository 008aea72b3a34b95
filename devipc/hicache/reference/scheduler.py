"""Control: requests, continuous batching, and what is computed, restored, kept and backed up.

Owns every decision and no memory: it sees identifiers, token ids and counts. A batch is planned and announced while
the one before it is computed, so a plan never depends on tokens that are not known yet; what turns out to be needless
(a decode behind the end of an answer) is ignored.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from devipc.errors import CompletionTimeout, PeerGone, UsageError
from devipc.hicache.keys import KEY_NBYTES, page_keys
from devipc.hicache.reference.handles import CacheExtentRef, RequestRuntimeHandle
from devipc.hicache.reference.prefixtree import Node, PrefixTree
from devipc.hicache.reference.request import BackupPolicy, Finished, Request
from devipc.hicache.reference.runtime import (
    BackUp,
    BatchCompletion,
    BatchPlan,
    Decode,
    Keep,
    OpenRequest,
    Prefill,
    PreparedBatchHandle,
    RestorePages,
    RuntimeInterface,
)

__all__ = ["BackupPolicy", "Finished", "Scheduler"]

_ON_ITS_WAY = 16  # batches
_MOST_BARREN_LIVES = 3  # of a runtime, one behind the other, that completed no batch


@dataclass(slots=True)
class _Planned:
    """A plan that was announced, with what its completion will be matched with."""

    handle: PreparedBatchHandle
    plan: BatchPlan
    by_handle: dict[RequestRuntimeHandle, Request]
    keepers: list[Request]
    askers: list[Request]


class Scheduler:
    """See the module. One thread.

    Parameters
    ----------
    runtime : RuntimeInterface
        Computes.
    policy : BackupPolicy
        When pages are backed up.
    stop_tokens : iterable of int
        End an answer.
    restore : bool
        False never asks the cache below.
    prefix_cache : bool
        False keeps nothing on the device either.
    on_token : callable
        Told name and token of each token, as it becomes known.
    trace : callable
        Told each plan, for tests and for those who want to look.
    """

    def __init__(
        self,
        runtime: RuntimeInterface,
        *,
        policy: BackupPolicy = BackupPolicy.WRITE_THROUGH,
        stop_tokens: Iterable[int] = (),
        restore: bool = True,
        prefix_cache: bool = True,
        on_token: Callable[[str, int], None] = lambda _name, _token: None,
        trace: Callable[[BatchPlan], None] = lambda _plan: None,
    ) -> None:
        self._runtime = runtime
        self._restore = restore
        self._policy = policy
        self._stop = frozenset(stop_tokens)
        self._prefix_cache = prefix_cache
        self._on_token = on_token
        self._trace = trace
        self._limits = runtime.limits
        self._tree = PrefixTree()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._announced: _Planned | None = None
        self._number = 0
        self._used_pages = 0
        self._close: list[RequestRuntimeHandle] = []
        self._release: list[CacheExtentRef] = []
        self._back_up: list[BackUp] = []
        self._ordered: dict[bytes, int] = {}  # key of a page: number of the batch that was told to back it up
        self.finished: dict[str, Finished] = {}
        self.batches = 0
        self.discarded = 0
        self.lost = 0
        self._barren = 0

    def submit(self, name: str, prompt: Sequence[int], *, max_tokens: int) -> None:
        """Queue a request.

        Raises
        ------
        UsageError
            When it never fits the runtime, or the name is in use.
        """
        if any(name == one.name for one in (*self._waiting, *self._running)):
            raise UsageError(f"request {name!r} is not finished", remedy="give each its own name")
        pages = self._pages(len(prompt) + max_tokens)
        if not prompt or max_tokens < 1 or pages > self._limits.pages:
            raise UsageError(
                f"{len(prompt)} tokens and {max_tokens} more need {pages} pages, the runtime has {self._limits.pages}",
                remedy="shorten the prompt, or give the runtime more pages",
            )
        raw = page_keys(list(prompt), page_tokens=self._limits.page_tokens, parent=self._limits.namespace).tobytes()
        keys = [raw[at : at + KEY_NBYTES] for at in range(0, len(raw), KEY_NBYTES)]
        request = Request(name, tuple(prompt), keys, max_tokens, time.monotonic(), may_restore=self._restore)
        self._waiting.append(request)

    @property
    def busy(self) -> bool:
        """True while a request is not finished, or something is to be told the runtime."""
        owed = self._close or self._release or self._back_up
        return bool(self._waiting or self._running or self._announced or owed)

    def run(self) -> dict[str, Finished]:
        """Step until everything is finished; return the answers by name. Blocks."""
        while self.busy:
            self.step()
        return self.finished

    def release_all(self) -> None:
        """Let everything go that the tree keeps and no request uses; steps until the runtime has done so. Blocks."""
        for extent in self._tree.evict(self._limits.pages, before=self._before_eviction):
            self._release.append(extent)
            self._used_pages -= extent.page_count
        self.run()

    def step(self) -> None:
        """Announce the next batch, then wait for the one before it. Blocks for that one.

        Raises
        ------
        PeerGone
            When the runtime was lost several times without having completed a batch.
        """
        try:
            following = self._plan()
            announced, self._announced = self._announced, following
            if announced is not None:
                self._apply(announced, self._runtime.execute_batch(announced.handle))
        except PeerGone:
            self._barren += 1
            if self._barren > _MOST_BARREN_LIVES:
                raise  # it dies of what it is asked, or cannot be had at all
            self._runtime_lost()

    # --- planning ----------------------------------------------------------------------------------------------------

    def _plan(self) -> _Planned | None:
        opens: list[OpenRequest] = []
        restores: list[RestorePages] = []
        self._admit(opens, restores)
        askers = [one for one in self._waiting if not one.asked and one.may_restore][: self._limits.max_requests]
        prefills, decodes = [], []
        keeps: list[Keep] = []
        keepers: list[Request] = []
        for request in self._running:
            assert request.handle is not None
            if request.planned < len(request.prompt):
                prefills.append(self._chunk(request))
                if self._is_kept_now(request):
                    first = request.from_device
                    keeps.append(Keep(handle=request.handle, first_page=first, page_count=len(request.keys) - first))
                    keepers.append(request)
            elif request.decodes < request.max_tokens - 1:
                decodes.append(Decode(handle=request.handle))
                request.decodes += 1
        plan = BatchPlan(
            number=self._number + 1,
            ask=tuple(b"".join(one.keys[: self._usable(one)]) for one in askers),
            close=tuple(self._close),
            release=tuple(self._release),
            open=tuple(opens),
            restore=tuple(restores),
            prefill=tuple(prefills),
            decode=tuple(decodes),
            keep=tuple(keeps),
            back_up=tuple(self._back_up),
        )
        if not any((plan.ask, plan.back_up, plan.close, plan.release, plan.prefill, plan.decode)):
            return None
        self._number += 1
        for one in askers:
            one.asked = True
        self._close, self._release, self._back_up = [], [], []
        self._trace(plan)
        by_handle = {one.handle: one for one in self._running if one.handle is not None}
        return _Planned(self._runtime.prepare_batch(plan), plan, by_handle, keepers, askers)

    def _chunk(self, request: Request) -> Prefill:
        """Return the next chunk: it ends at a multiple of the chunk's size, whatever was cached before it."""
        assert request.handle is not None
        start, step = request.planned, self._limits.chunk_tokens
        end = min(len(request.prompt), (start // step + 1) * step)
        request.planned = end
        tokens = request.prompt[start:end]
        return Prefill(handle=request.handle, start=start, tokens=tokens, sample=end == len(request.prompt))

    def _is_kept_now(self, request: Request) -> bool:
        done = request.planned == len(request.prompt)
        if not (self._prefix_cache and done and not request.kept and len(request.keys) > request.from_device):
            return False
        request.kept = True
        return True

    def _admit(self, opens: list[OpenRequest], restores: list[RestorePages]) -> None:
        while self._waiting and len(self._running) < self._limits.max_requests:
            request = self._waiting[0]
            if not request.admissible:
                return
            node, matched = self._tree.match(request.keys[: self._usable(request)])
            self._tree.lock(node)
            needed = self._pages(len(request.prompt) + request.max_tokens) - matched
            if not self._make_room(needed):
                self._tree.unlock(node)
                if not self._running and not self._announced:
                    raise UsageError("no request runs, and there is still no room", remedy="a defect: report it")
                return
            self._waiting.popleft()
            self._used_pages += needed
            request.handle = self._runtime.open_request()
            request.node, request.from_device = node, matched
            opens.append(OpenRequest(handle=request.handle, prefix=self._tree.extents(node)))
            restores.extend(self._restores(request))
            request.planned = (request.from_device + request.restored) * self._limits.page_tokens
            self._note_use(request)
            self._running.append(request)

    def _usable(self, request: Request) -> int:
        """Pages that may come from a cache: at least one token is computed, for the next one's sake."""
        return (len(request.prompt) - 1) // self._limits.page_tokens

    def _restores(self, request: Request) -> list[RestorePages]:
        wanted = request.keys[request.from_device : self._usable(request)]
        if not (request.may_restore and wanted):
            return []
        assert request.handle is not None
        below = (request.below or b"")[request.from_device :]
        request.restored = len(below) - len(below.lstrip(b"\x01"))
        if not request.restored:
            return []
        keys = b"".join(wanted[: request.restored])
        return [RestorePages(handle=request.handle, first_page=request.from_device, keys=keys)]

    def _make_room(self, pages: int) -> bool:
        free = self._limits.pages - self._used_pages
        if pages > free:
            for extent in self._tree.evict(pages - free, before=self._before_eviction):
                self._release.append(extent)
                self._used_pages -= extent.page_count
        return pages <= self._limits.pages - self._used_pages

    def _before_eviction(self, node: Node) -> None:
        if self._policy is BackupPolicy.WRITE_BACK and node.extent is not None:
            self._save(node.keys, node.extent)

    def _save(self, keys: list[bytes], extent: CacheExtentRef) -> None:
        """Order a backup, unless one is on its way; what was ordered long ago may have been evicted since."""
        on_its_way = all(self._number - self._ordered.get(key, -_ON_ITS_WAY) < _ON_ITS_WAY for key in keys)
        if not on_its_way:  # what the cache below has already, it does not copy again
            self._ordered.update(dict.fromkeys(keys, self._number))
            self._back_up.append(BackUp(extent=extent, keys=b"".join(keys)))

    def _note_use(self, request: Request) -> None:
        if self._policy is not BackupPolicy.SELECTIVE or request.node is None:
            return
        for node in request.node.path():
            if node.extent is not None:
                self._save(node.keys, node.extent)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._limits.page_tokens)

    # --- what became of a batch --------------------------------------------------------------------------------------

    def _apply(self, planned: _Planned, completion: BatchCompletion) -> None:
        self.batches += 1
        self._barren = 0
        for request, below in zip(planned.askers, completion.found, strict=True):
            request.below = below
        if completion.discarded:
            self.discarded += 1
            self._rewind(planned, completion)
            return
        for request, extent in zip(planned.keepers, completion.kept, strict=True):
            self._insert(request, extent)
        for handle, token in completion.sampled:
            request = planned.by_handle[handle]
            if request in self._running:
                self._take(request, token)

    def _take(self, request: Request, token: int) -> None:
        if not request.answer:
            request.first_token_s = time.monotonic() - request.submitted
        if token not in self._stop:
            request.answer.append(token)
            if len(request.answer) > request.told:  # what begins anew comes to the same tokens, and is told once
                request.told += 1
                self._on_token(request.name, token)
        if token in self._stop or len(request.answer) == request.max_tokens:
            self._finish(request)

    def _insert(self, request: Request, extent: CacheExtentRef) -> None:
        """Move pages of a request, which were counted as its own, into the tree."""
        assert request.node is not None
        keys = request.keys[request.from_device :]
        node, double = self._tree.insert(keys, extent, behind=request.node)
        self._used_pages += extent.page_count - (double.page_count if double else 0)
        if double is not None:
            self._release.append(double)
        if self._policy is BackupPolicy.WRITE_THROUGH and node.extent is not None:
            for one in node.path():
                if one.extent is not None:
                    self._save(one.keys, one.extent)

    def _finish(self, request: Request) -> None:
        self._leave(request)
        page = self._limits.page_tokens
        self.finished[request.name] = Finished(
            name=request.name,
            tokens=tuple(request.answer),
            prompt_tokens=len(request.prompt),
            from_device=request.from_device * page,
            restored=request.restored * page,
            computed=len(request.prompt) - (request.from_device + request.restored) * page,
            first_token_s=request.first_token_s,
            restarts=request.restarts,
        )

    def _leave(self, request: Request) -> None:
        assert request.handle is not None
        assert request.node is not None
        self._running.remove(request)
        self._close.append(request.handle)
        self._tree.unlock(request.node)
        self._used_pages -= self._pages(len(request.prompt) + request.max_tokens) - request.from_device

    def _rewind(self, planned: _Planned, completion: BatchCompletion) -> None:
        """Begin all requests of a discarded batch again; those whose restore failed compute what is missing."""
        failed = {handle for handle, _ in completion.failed}
        for request in list(self._running):
            if request.handle in planned.by_handle:
                self._leave(request)
                request.may_restore = request.may_restore and request.handle not in failed
                request.begin_again()
                self._waiting.appendleft(request)

    def _runtime_lost(self) -> None:
        """All handles and extents are void: begin everything again in the runtime's next life."""
        self.lost += 1
        self._announced = None
        for request in self._running:
            request.begin_again()
        for request in self._waiting:  # what it was asked may have been lost with it
            request.asked, request.below = False, None
        self._waiting.extendleft(reversed(self._running))
        self._running, self._close, self._release, self._back_up = [], [], [], []
        self._tree.clear()
        self._ordered.clear()
        self._used_pages = 0
        self._number = 0
        self._restart()
        self._limits = self._runtime.limits

    def _restart(self) -> None:
        """Bring the runtime back; one that dies while it starts is tried as often as one that dies at work."""
        while True:
            try:
                return self._runtime.restart()
            except (PeerGone, CompletionTimeout):
                self._barren += 1
                if self._barren > _MOST_BARREN_LIVES:
                    raise
