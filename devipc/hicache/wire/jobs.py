"""Frames between a supervisor and its engine process: orders and reports in rings, a few calls on a link.

Owns what travels, and the refusal of everything that is no frame. Neither side trusts the other's numbers: the engine
checks pages and places again before a copy, the supervisor passes over reports of jobs that it does not know.

Orders go through one ring for each direction of copies, and one for everything else, so that each is taken by the very
thread that carries it out. Reports come back through one ring. Calls on the link are those that move descriptors.
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from devipc.channel.link import FIRST_FREE_KIND
from devipc.errors import BoundsError, WireError
from devipc.hicache.keys import KEY_NBYTES
from devipc.hicache.requests import PageIds
from devipc.hicache.tier.records import Places
from devipc.hicache.wire.protocol import MAX_FRAME_NBYTES, MAX_PAGES, Blob, Digest, Number, Op, Point, PoolNumber

__all__ = [
    "MAX_JOB_NBYTES",
    "ClientOpened",
    "CloseClient",
    "ClosePool",
    "Closed",
    "Done",
    "EngineCall",
    "Forget",
    "Move",
    "OpenClient",
    "OpenPool",
    "Opened",
    "Order",
    "Poisoned",
    "Reached",
    "Ready",
    "Report",
    "Start",
    "Stop",
    "Watch",
    "decode_call",
    "decode_move",
    "decode_order",
    "decode_report",
    "encode",
    "lists_of",
    "move_of",
]


class EngineCall(enum.IntEnum):
    """Messages on the link between a supervisor and its engine."""

    START = FIRST_FREE_KIND
    """:class:`Start`, the arena and three rings of orders; answered by :class:`Ready`, a ring of reports, the pulse."""
    OPEN_CLIENT = FIRST_FREE_KIND + 1
    """:class:`OpenClient` and the slots; answered by :class:`ClientOpened`."""
    CLOSE_CLIENT = FIRST_FREE_KIND + 2
    """:class:`CloseClient`; answered when nothing of it is mapped, refused with ``still_mapped`` until then."""
    STATUS = FIRST_FREE_KIND + 3
    """No body; answered by a JSON object."""
    STOP = FIRST_FREE_KIND + 4
    """:class:`Stop`; answered when everything was given back, just before the process ends."""
    LOST = FIRST_FREE_KIND + 5
    """The engine's: the error that ends it, as the channel's errors travel; it does not live to see an answer."""


MAX_JOB_NBYTES = MAX_FRAME_NBYTES + 4096
"""Size of the largest entry of a ring in bytes: a layout is the largest thing in one."""

_SHOWN = 160
_WORDS = 8 * MAX_PAGES
_WORD = np.dtype("<i8")

Job = Annotated[int, Meta(ge=1, le=2**63 - 1)]
ErrorForm = Annotated[bytes, Meta(max_length=8 * 1024)]
Text = Annotated[str, Meta(max_length=4096)]
Nbytes = Annotated[int, Meta(ge=1, le=2**50)]
Groups = Annotated[tuple[Annotated[int, Meta(ge=1, le=2**16)], ...], Meta(max_length=64)]
WordsForm = Annotated[bytes, Meta(max_length=_WORDS)]


class Move(Struct, frozen=True, array_like=True, tag=True):
    """Copy pages of a client's pool; the ring says which way.

    ``pages``, ``offsets``, ``spans`` and ``indexes`` are little-endian int64, one a page: the page, its extent's
    distance from the start of the arena in bytes, pages in the extent, and which of them it is. ``slot`` takes the
    first value of the client's timeline; ``op`` is the client's number for it. Without ``spans`` and ``indexes`` every
    extent has one page.
    """

    job: Job
    client: Digest
    pool: PoolNumber
    generation: Op
    pages: WordsForm
    offsets: WordsForm
    spans: WordsForm
    indexes: WordsForm
    slot: Number
    op: Op


class Watch(Struct, frozen=True, array_like=True, tag=True):
    """Report when a ready point is reached: a value of a fence of the client's, or what it says in a slot."""

    job: Job
    client: Digest
    point: Point | None
    slot: Number


class Forget(Struct, frozen=True, array_like=True, tag=True):
    """Report nothing more of a ready point."""

    job: Job


class OpenPool(Struct, frozen=True, array_like=True, tag=True):
    """Map the chunks that a client shares as ``pool/<pool>/<generation>/<chunk>``; ``layout`` says how many."""

    job: Job
    client: Digest
    pool: PoolNumber
    generation: Op
    layout: Blob


class ClosePool(Struct, frozen=True, array_like=True, tag=True):
    """Unmap a pool, and report when nothing of it is mapped. ``opened`` is the job of its :class:`OpenPool`."""

    job: Job
    client: Digest
    pool: PoolNumber
    generation: Op
    opened: Job


class Done(Struct, frozen=True, array_like=True, tag=True):
    """Nothing of a job moves any more. With an error, what it wrote is unknown."""

    job: Job
    error: ErrorForm | None


class Reached(Struct, frozen=True, array_like=True, tag=True):
    """A ready point is reached."""

    job: Job


class Poisoned(Struct, frozen=True, array_like=True, tag=True):
    """A ready point never will be."""

    job: Job
    error: ErrorForm


class Opened(Struct, frozen=True, array_like=True, tag=True):
    """A pool is mapped, or why not."""

    job: Job
    error: ErrorForm | None


class Closed(Struct, frozen=True, array_like=True, tag=True):
    """Nothing of a pool is mapped any more."""

    job: Job


class Start(Struct, frozen=True, kw_only=True, tag="start"):
    """What an engine process is told first, with the arena's descriptor and those of the three rings of orders.

    ``groups`` are the sizes of a restore's first layer groups; ``folder`` is where clients' sockets are made.
    """

    backend: Text
    device: Text
    strategy: Text
    arena_nbytes: Nbytes
    chunk_nbytes: Nbytes
    pin_required: bool
    bounce_nbytes: Nbytes
    groups: Groups
    folder: Text


class Ready(Struct, frozen=True, kw_only=True, tag="ready"):
    """What it answers, with the descriptors of the ring of reports and of the pulse's memory.

    ``unpinned_reason`` is empty when the arena is pinned. ``facts`` is a JSON object of what was found.
    """

    device_uuid: Text
    unpinned_reason: Text
    facts: Annotated[bytes, Meta(max_length=256 * 1024)]


class OpenClient(Struct, frozen=True, kw_only=True, tag="open_client"):
    """Listen for a client's session; comes with the descriptor of its slots.

    Orders of a number below ``since`` are for an older attachment of the same client.
    """

    client: Digest
    since: Job
    uid: Annotated[int, Meta(ge=0, le=2**32 - 1)]


class ClientOpened(Struct, frozen=True, kw_only=True, tag="client_opened"):
    """Where the client connects."""

    path: Text


class CloseClient(Struct, frozen=True, kw_only=True, tag="close_client"):
    """Forget a client of which nothing is in flight: unmap its pools, hang up. May be asked again."""

    client: Digest


class Stop(Struct, frozen=True, kw_only=True, tag="stop"):
    """Finish what is in flight within ``timeout_s`` seconds, give everything back, and exit."""

    timeout_s: Annotated[float, Meta(ge=0.0, le=86400.0)]


Order = Watch | Forget | OpenPool | ClosePool
"""Whatever is no copy."""
Report = Done | Reached | Poisoned | Opened | Closed
"""What an engine tells."""
Call = Start | Ready | OpenClient | ClientOpened | CloseClient | Stop

_F = TypeVar("_F")
_encoder = msgspec.msgpack.Encoder()
_moves: msgspec.msgpack.Decoder[Move] = msgspec.msgpack.Decoder(Move)
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
_calls: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)


def encode(frame: Move | Order | Report | Call) -> bytes:
    """Return the bytes of ``frame``; what is in it was made here, and is checked by whoever reads it."""
    return _encoder.encode(frame)


def decode_move(body: bytes) -> Move:
    """Return an order to copy; raises WireError."""
    return _decode(_moves, body)


def decode_order(body: bytes) -> Order:
    """Return another order; raises WireError."""
    return _decode(_orders, body)


def decode_report(body: bytes) -> Report:
    """Return a report; raises WireError."""
    return _decode(_reports, body)


def decode_call(body: bytes, kind: type[_F]) -> _F:
    """Return a call of one kind; raises WireError."""
    frame = _decode(_calls, body)
    if not isinstance(frame, kind):
        raise WireError(f"{type(frame).__name__} where {kind.__name__} belongs", code="out_of_place")
    return frame


def _decode(decoder: msgspec.msgpack.Decoder[_F], body: bytes) -> _F:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # a ValueError is text that is not UTF-8
        text = "".join(character if character.isprintable() else "?" for character in str(error)[:_SHOWN])
        raise WireError(f"no frame of an engine: {text}", code="frame", remedy="restart the engine") from error


def move_of(
    job: int, client: bytes, pool: tuple[int, int], pages: PageIds, places: Places, *, slot: int, op: int
) -> bytes:
    """Return the bytes of a :class:`Move`; ``pool`` is number and generation."""
    assert len(client) == KEY_NBYTES
    number, generation = pool
    move = Move(
        job,
        client,
        number,
        generation,
        _words(pages),
        _words(places.offset),
        b"" if places.span is None else _words(places.span),
        b"" if places.index is None else _words(places.index),
        slot,
        op,
    )
    return _encoder.encode(move)


def _words(values: PageIds) -> bytes:
    return values.astype(_WORD, copy=False).tobytes()


def lists_of(move: Move) -> tuple[PageIds, Places]:
    """Return pages and places of an order, as read-only arrays; raises BoundsError for lists of unequal length."""
    extents = bool(move.spans or move.indexes)
    lists = (move.pages, move.offsets, move.spans, move.indexes) if extents else (move.pages, move.offsets)
    if len(move.pages) % 8 or len(set(map(len, lists))) > 1:
        raise BoundsError("lists of pages and places of unequal length", code="shape", remedy="send one entry a page")
    pages, *columns = (np.frombuffer(form, _WORD).astype(np.int64, copy=False) for form in lists)
    return pages, Places(*columns)
