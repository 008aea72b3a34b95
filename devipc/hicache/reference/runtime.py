"""The boundary: what control asks of a runtime, and what it learns.

Owns the shape of plans and completions. Nothing here can name memory, a stream, an event or a tensor, and nothing is
sent for a single token: a batch is announced, executed, and answered as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from devipc.errors import ProtocolError
from devipc.hicache.keys import KEY_NBYTES
from devipc.hicache.reference.handles import CacheExtentRef, RequestRuntimeHandle

__all__ = [
    "BackUp",
    "BatchCompletion",
    "BatchPlan",
    "Decode",
    "Keep",
    "OpenRequest",
    "Prefill",
    "PreparedBatchHandle",
    "RestorePages",
    "RuntimeInterface",
    "RuntimeLimits",
    "RuntimeStats",
    "check_completion",
    "check_limits",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeLimits:
    """What a plan may ask for.

    Parameters
    ----------
    page_tokens : int
        Tokens in a page; prefill goes in chunks of ``chunk_tokens``, at multiples of it.
    chunk_tokens : int
        Tokens of a prefill chunk, a multiple of ``page_tokens``.
    max_requests : int
        Requests that are open at a time.
    pages : int
        Pages for all requests and kept extents together.
    namespace : bytes
        Parent of the first page's key.
    """

    page_tokens: int
    chunk_tokens: int
    max_requests: int
    pages: int
    namespace: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """Begin a request whose first tokens are in ``prefix`` already, page by page."""

    handle: RequestRuntimeHandle
    prefix: tuple[CacheExtentRef, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePages:
    """Bring pages of a request from the cache below, one behind the other from its page ``first_page`` on."""

    handle: RequestRuntimeHandle
    first_page: int
    keys: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Compute ``tokens`` at position ``start``; ``sample`` when the next token is wanted."""

    handle: RequestRuntimeHandle
    start: int
    tokens: tuple[int, ...]
    sample: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Compute the token behind the one that was sampled last."""

    handle: RequestRuntimeHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Keep pages of a request beyond its end; answered with an extent."""

    handle: RequestRuntimeHandle
    first_page: int
    page_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackUp:
    """Copy an extent to the cache below, in the background; ``keys`` of 16 bytes a page."""

    extent: CacheExtentRef
    keys: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """One batch. Its parts are carried out in the order of the fields; ``number`` counts up by one.

    What stands before ``restore`` is carried out even when the batch is discarded. ``ask`` holds keys, 16 bytes a page,
    of each prompt of which control wants to know what the cache below has.
    """

    number: int
    ask: tuple[bytes, ...] = ()
    back_up: tuple[BackUp, ...] = ()
    close: tuple[RequestRuntimeHandle, ...] = ()
    release: tuple[CacheExtentRef, ...] = ()
    open: tuple[OpenRequest, ...] = ()
    restore: tuple[RestorePages, ...] = ()
    prefill: tuple[Prefill, ...] = ()
    decode: tuple[Decode, ...] = ()
    keep: tuple[Keep, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedBatchHandle:
    """A batch that was announced; to be executed once, in order."""

    runtime_id: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCompletion:
    """How a batch went.

    Parameters
    ----------
    number : int
        Of the batch.
    discarded : bool
        A restore that the batch waited for failed, here or in the batch before: no token left, no page was kept.
    sampled : tuple of (RequestRuntimeHandle, int)
        The next token of each request that wanted one.
    kept : tuple of CacheExtentRef
        An extent for each ``keep`` of the plan, in order.
    found : tuple of bytes
        For each ``ask`` of the plan a byte a page, 1 where the cache below has it; a hint.
    failed : tuple of (RequestRuntimeHandle, str)
        Requests whose restore failed, and why. Open them again, and compute what is missing.
    compute_s : float
        Time of the computation.
    restored_pages : int
        Pages that came from the cache below.
    """

    number: int
    discarded: bool = False
    sampled: tuple[tuple[RequestRuntimeHandle, int], ...] = ()
    kept: tuple[CacheExtentRef, ...] = ()
    found: tuple[bytes, ...] = ()
    failed: tuple[tuple[RequestRuntimeHandle, str], ...] = ()
    compute_s: float = 0.0
    restored_pages: int = 0


def check_limits(limits: RuntimeLimits) -> None:
    """Hold what another process says of itself against what can be planned with; raises ProtocolError."""
    sizes = (limits.page_tokens, limits.chunk_tokens, limits.max_requests, limits.pages)
    if min(sizes) < 1 or limits.chunk_tokens % limits.page_tokens or len(limits.namespace) != KEY_NBYTES:
        raise ProtocolError(f"{limits} cannot be")


def check_completion(plan: BatchPlan, completion: BatchCompletion, runtime_id: str) -> None:
    """Hold what another process says of a batch against the plan: control believes no more than was asked for.

    Raises
    ------
    ProtocolError
        When it is the answer to something else, or to nothing.
    """
    if completion.number != plan.number:
        raise ProtocolError(f"batch {completion.number} in place of {plan.number}")
    if [len(one) for one in completion.found] != [len(one) // KEY_NBYTES for one in plan.ask]:
        raise ProtocolError("it was asked for other pages than it found")
    if completion.discarded:
        return
    wanted = [one.handle for one in plan.prefill if one.sample] + [one.handle for one in plan.decode]
    if [handle for handle, _ in completion.sampled] != wanted or any(token < 0 for _, token in completion.sampled):
        raise ProtocolError("tokens of other requests than wanted one")
    for extent, keep in zip(completion.kept, plan.keep, strict=False):
        runs = extent.page_runs
        if extent.runtime_id != runtime_id or min((run.page_count for run in runs), default=0) < 1:
            raise ProtocolError(f"{extent} is none of its own")
        if extent.page_count != keep.page_count:
            raise ProtocolError(f"{extent.page_count} pages were kept, not {keep.page_count}")
    if len(completion.kept) != len(plan.keep):
        raise ProtocolError(f"{len(completion.kept)} extents for {len(plan.keep)} orders to keep one")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeStats:
    """What a runtime did so far, and what it has; numbers only."""

    free_pages: int
    restored_pages: int
    computed_tokens: int
    decoded_tokens: int
    backed_up_pages: int
    backups_open: int
    cache: dict[str, object] = field(default_factory=dict)


class RuntimeInterface(Protocol):
    """One accelerator that computes batches. One thread.

    A runtime that is lost raises :class:`~devipc.errors.PeerGone`: all of its handles and extents are void. After
    :meth:`restart` it is there again, empty, under another ``runtime_id``.
    """

    @property
    def runtime_id(self) -> str:
        """Identity of this life of the runtime."""
        ...

    @property
    def limits(self) -> RuntimeLimits:
        """What a plan may ask for."""
        ...

    def open_request(self) -> RequestRuntimeHandle:
        """Return a handle for a request that a plan will open; raises ResourceExhausted when all are in use."""
        ...

    def prepare_batch(self, plan: BatchPlan) -> PreparedBatchHandle:
        """Announce a batch while the one before is computed, so that its restores hide behind that one."""
        ...

    def execute_batch(self, handle: PreparedBatchHandle) -> BatchCompletion:
        """Compute the batch that was announced first, and return what became of it. Blocks."""
        ...

    def stats(self) -> RuntimeStats:
        """Return what it did so far."""
        ...

    def restart(self) -> None:
        """Bring a lost runtime back, empty."""
        ...

    def close(self) -> None:
        """Give everything back; backups that run are waited for."""
        ...
