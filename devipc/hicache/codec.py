"""Requests and answers as frames, and back.

Owns the step between the values that clients and engines use and what travels. What cannot travel (ready points,
fences, cancel words, memory) is named by numbers; who knows the numbers is handed in.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np

from devipc.channel.hello import decode_error, encode_error
from devipc.errors import UsageError, WireError
from devipc.hicache import protocol as p
from devipc.hicache.keys import KEY_NBYTES
from devipc.hicache.layout import decode_layout, encode_layout
from devipc.hicache.operations import Event
from devipc.hicache.requests import (
    Backup,
    CancelWord,
    CompletionFence,
    Flush,
    Invalidate,
    Keys,
    Lookup,
    PageIds,
    PoolRequest,
    Prefetch,
    ReadyPoint,
    RegisterPool,
    Request,
    Restore,
    StatusRequest,
    UnregisterPool,
)
from devipc.hicache.results import Answer
from devipc.wire import Reader

__all__ = ["Named", "Numbers", "answer_of", "frame_of", "frame_of_answer", "request_of"]


class Numbers(Protocol):
    """The client's side: the number of each thing that it shares with the engine."""

    def ready(self, point: ReadyPoint) -> p.Point | None:
        """Return the shared value that ``point`` is; None when it is unfenced."""
        ...

    def fence(self, fence: CompletionFence) -> int:
        """Return the number of a completion fence."""
        ...

    def cancel(self, word: CancelWord) -> int:
        """Return the number of a cancel word."""
        ...

    def memory(self, request: RegisterPool) -> tuple[bytes, str, tuple[p.HandleForm, ...]]:
        """Return instance, device UUID and a handle for each chunk; their descriptors are sent beside the frame."""
        ...


class Named(Protocol):
    """The engine's side: what a client's numbers stand for. Each raises HandleError for a number that it never gave."""

    def ready(self, point: p.Point | None) -> ReadyPoint:
        """Return the ready point."""
        ...

    def fence(self, number: int) -> CompletionFence:
        """Return the completion fence."""
        ...

    def cancel(self, number: int) -> CancelWord:
        """Return the cancel word."""
        ...

    def memory(self, frame: p.RegisterPoolFrame) -> tuple[int, ...]:
        """Map the pool's memory, and return the address of each chunk."""
        ...


def frame_of(request: Request, numbers: Numbers) -> p.RequestFrame:
    """Return ``request`` as a frame, not checked yet: :func:`~devipc.hicache.protocol.encode` does."""
    if isinstance(request, StatusRequest):
        return p.StatusFrame(op=request.op)
    assert isinstance(request, PoolRequest | RegisterPool)
    op, pool, generation = request.op, request.pool, request.generation
    match request:
        case RegisterPool():
            instance, device_uuid, handles = numbers.memory(request)
            return p.RegisterPoolFrame(
                op=op,
                pool=pool,
                generation=generation,
                instance=instance,
                device_uuid=device_uuid,
                layout=encode_layout(request.layout),
                handles=handles,
                namespace=request.namespace,
            )
        case Backup():
            return p.BackupFrame(
                op=op,
                pool=pool,
                generation=generation,
                pages=_page_bytes(request.pages),
                keys=_key_bytes(request.keys),
                ready=numbers.ready(request.ready),
                fence=numbers.fence(request.fence),
                cancel=numbers.cancel(request.cancel),
                timeout_s=request.timeout_s,
                confirmed=request.confirmed,
                partial=request.partial,
            )
        case Restore():
            return p.RestoreFrame(
                op=op,
                pool=pool,
                generation=generation,
                pages=_page_bytes(request.pages),
                keys=_key_bytes(request.keys),
                ready=numbers.ready(request.ready),
                fence=numbers.fence(request.fence),
                timeout_s=request.timeout_s,
                partial=request.partial,
            )
        case Lookup():
            keys = _key_bytes(request.keys)
            return p.LookupFrame(op=op, pool=pool, generation=generation, keys=keys, lease_s=request.lease_s)
        case Prefetch():
            return p.PrefetchFrame(op=op, pool=pool, generation=generation, keys=_key_bytes(request.keys))
        case Invalidate():
            return p.InvalidateFrame(op=op, pool=pool, generation=generation, keys=_key_bytes(request.keys))
        case UnregisterPool():
            return p.UnregisterFrame(op=op, pool=pool, generation=generation)
        case Flush():
            return p.FlushFrame(op=op, pool=pool, generation=generation)
    raise UsageError(f"{type(request).__name__} does not travel", remedy="pass a request of devipc.hicache.requests")


def request_of(frame: p.RequestFrame, named: Named) -> Request:
    """Return the request that a decoded frame stands for; its arrays are read-only.

    Raises
    ------
    HandleError
        For a number that stands for nothing, memory that cannot be mapped, or a layout that is none.
    UsageError
        For a :class:`~devipc.hicache.protocol.TellFrame`, which is no request.
    """
    if isinstance(frame, p.StatusFrame):
        return StatusRequest(op=frame.op)
    if isinstance(frame, p.TellFrame):
        raise UsageError("what is told about an operation is no request", remedy="look at its event")
    op, pool, generation = frame.op, frame.pool, frame.generation
    match frame:
        case p.RegisterPoolFrame():
            reader = Reader(frame.layout)
            layout = decode_layout(reader)
            reader.end()
            if len(layout.chunks) != len(frame.handles):
                raise WireError(f"{len(frame.handles)} handles for {len(layout.chunks)} chunks", code="count")
            return RegisterPool(
                op=op,
                pool=pool,
                generation=generation,
                layout=layout,
                addresses=named.memory(frame),
                namespace=frame.namespace,
            )
        case p.BackupFrame():
            return Backup(
                op=op,
                pool=pool,
                generation=generation,
                pages=_pages(frame.pages),
                keys=_keys(frame.keys),
                ready=named.ready(frame.ready),
                fence=named.fence(frame.fence),
                cancel=named.cancel(frame.cancel),
                timeout_s=frame.timeout_s,
                confirmed=frame.confirmed,
                partial=frame.partial,
            )
        case p.RestoreFrame():
            return Restore(
                op=op,
                pool=pool,
                generation=generation,
                pages=_pages(frame.pages),
                keys=_keys(frame.keys),
                ready=named.ready(frame.ready),
                fence=named.fence(frame.fence),
                timeout_s=frame.timeout_s,
                partial=frame.partial,
            )
        case p.LookupFrame():
            return Lookup(op=op, pool=pool, generation=generation, keys=_keys(frame.keys), lease_s=frame.lease_s)
        case p.PrefetchFrame():
            return Prefetch(op=op, pool=pool, generation=generation, keys=_keys(frame.keys))
        case p.InvalidateFrame():
            return Invalidate(op=op, pool=pool, generation=generation, keys=_keys(frame.keys))
        case p.UnregisterFrame():
            return UnregisterPool(op=op, pool=pool, generation=generation)
        case p.FlushFrame():
            return Flush(op=op, pool=pool, generation=generation)


def frame_of_answer(op: int, event: Event, answer: Answer) -> p.AnswerFrame:
    """Return what an engine tells as a frame."""
    return p.AnswerFrame(
        op=op,
        event=event,
        results=None if answer.results is None else answer.results.tobytes(),
        error=None if answer.error is None else encode_error(answer.error),
        detail=None if answer.detail is None else _json(answer.detail),
    )


def answer_of(frame: p.AnswerFrame, *, who: str) -> Answer:
    """Return what a decoded frame tells; raises WireError for an error that is none. ``who`` is named in errors."""
    return Answer(
        None if frame.results is None else np.frombuffer(frame.results, np.uint8),
        None if frame.error is None else decode_error(frame.error, who),
        None if frame.detail is None else p.decode_detail(frame.detail),
    )


def _json(detail: dict[str, object]) -> bytes:
    try:
        return msgspec.json.encode(detail)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise UsageError(f"a detail is not JSON-ready ({error})", remedy="answer with plain values") from error


def _page_bytes(pages: PageIds) -> bytes:
    return pages.astype("<i8", copy=False).tobytes()


def _key_bytes(keys: Keys) -> bytes:
    return keys.tobytes()


def _pages(form: bytes) -> PageIds:
    return np.frombuffer(form, "<i8").astype(np.int64, copy=False)


def _keys(form: bytes) -> Keys:
    return np.frombuffer(form, np.uint8).reshape(-1, KEY_NBYTES)
