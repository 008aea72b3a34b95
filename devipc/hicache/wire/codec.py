"""Requests and answers as frames, and back.

Owns the step between the values that clients and engines use and what travels. What cannot travel (ready points,
fences, cancel words, memory) is named by numbers; who knows the numbers is handed in.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np

from devipc.channel.hello import decode_error, encode_error
from devipc.errors import UsageError
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
    Ping,
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
from devipc.hicache.wire import protocol as p
from devipc.wire import Reader

__all__ = ["Named", "Numbers", "answer_of", "frame_of", "frame_of_answer", "request_of"]

_PAGE = np.dtype("<i8")


class Numbers(Protocol):
    """The client's side: what stands for the things that it shares."""

    @property
    def device_uuid(self) -> str:
        """Identity of the device that its pools are on."""
        ...

    def slot(self, fence: CompletionFence) -> int:
        """Return the slot of an operation, by its completion fence."""
        ...

    def ready(self, point: ReadyPoint, slot: int) -> p.ReadyForm:
        """Return the shared value that ``point`` is; True when it is reached, False when the slot's word will tell."""
        ...


class Named(Protocol):
    """The engine's side: what a client's numbers stand for. Each raises HandleError for a number that it never gave."""

    def ready(self, point: p.ReadyForm, slot: int) -> ReadyPoint:
        """Return the ready point."""
        ...

    def fence(self, slot: int) -> CompletionFence:
        """Return the completion fence of the operation in a slot."""
        ...

    def cancel(self, slot: int) -> CancelWord:
        """Return the cancel word of the operation in a slot."""
        ...


def frame_of(request: Request, numbers: Numbers) -> p.RequestFrame:
    """Return ``request`` as a frame that is within the limits.

    Raises
    ------
    UsageError
        For more pages than an operation may have, and for what does not travel.
    """
    if isinstance(request, Ping):
        return p.PingFrame(op=request.op)
    if isinstance(request, StatusRequest):
        return p.StatusFrame(op=request.op)
    assert isinstance(request, PoolRequest | RegisterPool)
    op, pool, generation = request.op, request.pool, request.generation
    match request:
        case RegisterPool():
            return p.RegisterPoolFrame(
                op=op,
                pool=pool,
                generation=generation,
                device_uuid=numbers.device_uuid,
                layout=encode_layout(request.layout),
                namespace=request.namespace,
            )
        case Backup():
            slot = numbers.slot(request.fence)
            return p.BackupFrame(
                op=op,
                pool=pool,
                generation=generation,
                pages=_page_bytes(request.pages),
                keys=_key_bytes(request.keys),
                ready=numbers.ready(request.ready, slot),
                slot=slot,
                timeout_s=request.timeout_s,
                confirmed=request.confirmed,
                partial=request.partial,
            )
        case Restore():
            slot = numbers.slot(request.fence)
            return p.RestoreFrame(
                op=op,
                pool=pool,
                generation=generation,
                pages=_page_bytes(request.pages),
                keys=_key_bytes(request.keys),
                ready=numbers.ready(request.ready, slot),
                slot=slot,
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
        For a number that stands for nothing, or a layout that is none.
    UsageError
        For a :class:`~devipc.hicache.wire.protocol.TellFrame`, which is no request.
    """
    if isinstance(frame, p.PingFrame):
        return Ping(op=frame.op)
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
            return RegisterPool(
                op=op,
                pool=pool,
                generation=generation,
                layout=layout,
                addresses=(),
                namespace=frame.namespace,
            )
        case p.BackupFrame():
            return Backup(
                op=op,
                pool=pool,
                generation=generation,
                pages=_pages(frame.pages),
                keys=_keys(frame.keys),
                ready=named.ready(frame.ready, frame.slot),
                fence=named.fence(frame.slot),
                cancel=named.cancel(frame.slot),
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
                ready=named.ready(frame.ready, frame.slot),
                fence=named.fence(frame.slot),
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


def frame_of_answer(op: int, event: Event, answer: Answer, passed: tuple[Event, ...] = ()) -> p.AnswerFrame:
    """Return what an engine tells as a frame."""
    return p.AnswerFrame(
        op=op,
        event=event,
        results=None if answer.results is None else answer.results.tobytes(),
        error=None if answer.error is None else encode_error(answer.error),
        detail=None if answer.detail is None else _json(answer.detail),
        passed=passed,
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
    _check_count(len(pages))
    return pages.astype(_PAGE, copy=False).tobytes()


def _key_bytes(keys: Keys) -> bytes:
    _check_count(len(keys))
    return keys.tobytes()


def _check_count(count: int) -> None:
    if count > p.MAX_PAGES:
        raise UsageError(
            f"{count} pages in one operation", code="pages", remedy=f"split it: at most {p.MAX_PAGES} travel together"
        )


def _pages(form: bytes) -> PageIds:
    return np.frombuffer(form, _PAGE).astype(np.int64, copy=False)


def _keys(form: bytes) -> Keys:
    return np.frombuffer(form, np.uint8).reshape(-1, KEY_NBYTES)
