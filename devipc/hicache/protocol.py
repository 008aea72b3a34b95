"""Frames between a client and an engine in another process: their fields and their limits.

Owns what travels, and the refusal of everything that is no frame: a frame that was decoded is whole, of the right types
and within every limit that does not depend on a pool. Whether pages and keys fit a pool is the engine's to say, with a
refusal of one operation; a :class:`~devipc.errors.WireError` from here ends the connection. It does no I/O.

A frame is a MessagePack map with its ``type``. Fields that are not known here are ignored, so that a newer side may add
some; what must not be ignored is sent only to a side that has the feature. Descriptors travel beside a frame.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from devipc.errors import WireError
from devipc.hicache.keys import KEY_NBYTES
from devipc.hicache.operations import ANSWERS, REQUESTS, Event
from devipc.hicache.results import PageResult

__all__ = [
    "MAGIC",
    "MAX_FRAME_NBYTES",
    "MAX_PAGES",
    "AnswerFrame",
    "BackupFrame",
    "FlushFrame",
    "HelloFrame",
    "InvalidateFrame",
    "LeaveFrame",
    "LookupFrame",
    "PingFrame",
    "Point",
    "PrefetchFrame",
    "ReadyForm",
    "RegisterPoolFrame",
    "RequestFrame",
    "RestoreFrame",
    "StatusFrame",
    "TellFrame",
    "UnregisterFrame",
    "WelcomeFrame",
    "decode_answer",
    "decode_detail",
    "decode_hello",
    "decode_leave",
    "decode_request",
    "decode_welcome",
    "encode",
    "pack",
]

MAX_FRAME_NBYTES = 4 * 1024 * 1024
"""Size of the largest frame in bytes."""
MAX_PAGES = 64 * 1024
"""Most pages of one operation."""

MAGIC = b"dIPChica"
"""What a greeting begins with; the same in all versions."""

_LONGEST_S = 86400.0 * 365  # what devipc.deadline.bounded() makes of infinity
_MAX_GROUPS = 64
_MAX_ERROR_NBYTES = 8 * 1024
_MAX_DETAIL_NBYTES = 1024 * 1024
_SHOWN = 160

Op = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Count63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Number = Annotated[int, Meta(ge=0, le=2**32 - 1)]
PoolNumber = Annotated[int, Meta(ge=1, le=2**32 - 1)]
Version = Annotated[int, Meta(ge=0, le=2**16 - 1)]
# What is not a number is refused by the bounds, too.
Seconds = Annotated[float, Meta(ge=0.0, le=_LONGEST_S)]
Digest = Annotated[bytes, Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]
PagesForm = Annotated[bytes, Meta(max_length=8 * MAX_PAGES)]
KeysForm = Annotated[bytes, Meta(max_length=KEY_NBYTES * MAX_PAGES)]
Name = Annotated[str, Meta(max_length=128)]
Blob = Annotated[bytes, Meta(max_length=MAX_FRAME_NBYTES)]


class HelloFrame(Struct, frozen=True, kw_only=True, tag="hello"):
    """What a client says first; its fields and their meaning stay for all versions.

    ``features`` are bits. ``self_test`` is the key that this side computes for a known page. ``client`` is one life of
    one client object, the same when it attaches again. ``way`` says how it wants frames to travel; the descriptors of
    that come behind the one of its slots.
    """

    magic: Annotated[bytes, Meta(min_length=len(MAGIC), max_length=len(MAGIC))]
    min_version: Version
    max_version: Version
    features: Count63
    key_version: Version
    self_test: Digest
    client: Digest
    way: Literal["rings", "messages"]


class WelcomeFrame(Struct, frozen=True, kw_only=True, tag="welcome"):
    """What is answered: version and features of the connection, the index's epoch, and where the engine is.

    ``engine_path`` is where the engine process listens, ``engine_instance`` that process's own: nobody else will do.
    ``device_uuid`` and ``backend`` are what a client has to open, too. ``write_policy`` is when pages should be backed
    up where the client has no opinion of its own; one that it does not know means the first.
    """

    magic: Annotated[bytes, Meta(min_length=len(MAGIC), max_length=len(MAGIC))]
    version: Version
    features: Count63
    key_version: Version
    self_test: Digest
    epoch: Count63
    layer_groups: Annotated[tuple[Annotated[int, Meta(ge=1, le=2**16)], ...], Meta(max_length=_MAX_GROUPS)]
    engine_path: Annotated[str, Meta(min_length=1, max_length=107)]
    engine_instance: Digest
    device_uuid: Name
    backend: Name
    write_policy: Name


class LeaveFrame(Struct, frozen=True, kw_only=True, tag="leave"):
    """How long to wait for what is open: of this client, or of all."""

    timeout_s: Seconds


class Point(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value of the client's fence ``ready/<fence>`` in its session with the engine: when pages may be touched."""

    fence: Number
    n: Annotated[int, Meta(ge=1, le=2**62 - 1)]


ReadyForm = Point | bool
"""When pages may be touched: at a shared value; True: now; False: when the ready word of the slot says so."""


class OpFrame(Struct, frozen=True, kw_only=True):
    """What every request carries: the client's number for it."""

    op: Op


class PoolFrame(OpFrame, frozen=True, kw_only=True):
    """A request about one generation of a pool."""

    pool: PoolNumber
    generation: Op


class RegisterPoolFrame(PoolFrame, frozen=True, kw_only=True, tag="register_pool"):
    """Make a pool known: ``layout`` as :func:`~devipc.hicache.layout.encode_layout` writes it.

    The client shares chunk ``i`` of it in its session with the engine, as ``pool/<pool>/<generation>/<i>``.
    """

    device_uuid: Name
    layout: Blob
    namespace: Digest


class UnregisterFrame(PoolFrame, frozen=True, kw_only=True, tag="unregister"):
    """Forget a pool once no copy touches it any more."""


class BackupFrame(PoolFrame, frozen=True, kw_only=True, tag="backup"):
    """Copy pages to the host tier. ``slot`` is the operation's own until it has ended."""

    pages: PagesForm
    keys: KeysForm
    ready: ReadyForm
    slot: Number
    timeout_s: Seconds
    confirmed: bool
    partial: bool


class RestoreFrame(PoolFrame, frozen=True, kw_only=True, tag="restore"):
    """Copy pages to the device; fields as :class:`BackupFrame`."""

    pages: PagesForm
    keys: KeysForm
    ready: ReadyForm
    slot: Number
    timeout_s: Seconds
    partial: bool


class LookupFrame(PoolFrame, frozen=True, kw_only=True, tag="lookup"):
    """Find pages and keep what was found for ``lease_s`` seconds at most."""

    keys: KeysForm
    lease_s: Seconds


class PrefetchFrame(PoolFrame, frozen=True, kw_only=True, tag="prefetch"):
    """Bring pages from the storage tier to the host tier."""

    keys: KeysForm


class InvalidateFrame(PoolFrame, frozen=True, kw_only=True, tag="invalidate"):
    """Forget pages."""

    keys: KeysForm


class FlushFrame(PoolFrame, frozen=True, kw_only=True, tag="flush"):
    """Forget all pages of the pool's namespace."""


class StatusFrame(OpFrame, frozen=True, kw_only=True, tag="status"):
    """Ask what the engine does."""


class PingFrame(OpFrame, frozen=True, kw_only=True, tag="ping"):
    """Ask whether anybody is there; answered by whoever takes frames, before any engine."""


class TellFrame(OpFrame, frozen=True, kw_only=True, tag="tell"):
    """Say something about an operation that was submitted: cancel, confirmed, discard, use or release."""

    event: Event


class AnswerFrame(OpFrame, frozen=True, kw_only=True, tag="answer"):
    """What the engine tells about an operation.

    Parameters
    ----------
    event : Event
        Progress or a status.
    results : bytes or None
        A :class:`~devipc.hicache.results.PageResult` a page.
    error : bytes or None
        As the channel's errors travel.
    detail : bytes or None
        A JSON object.
    """

    event: Event
    results: Annotated[bytes, Meta(max_length=MAX_PAGES)] | None = None
    error: Annotated[bytes, Meta(max_length=_MAX_ERROR_NBYTES)] | None = None
    detail: Annotated[bytes, Meta(max_length=_MAX_DETAIL_NBYTES)] | None = None


RequestFrame = (
    RegisterPoolFrame
    | UnregisterFrame
    | BackupFrame
    | RestoreFrame
    | LookupFrame
    | PrefetchFrame
    | InvalidateFrame
    | FlushFrame
    | StatusFrame
    | PingFrame
    | TellFrame
)
"""Everything that a client sends after its greeting."""
AnyFrame = RequestFrame | AnswerFrame | HelloFrame | WelcomeFrame | LeaveFrame

_F = TypeVar("_F", bound=Struct)
_encoder = msgspec.msgpack.Encoder()
# Unions throughout: a struct by itself would be taken without its type.
_from_client: msgspec.msgpack.Decoder[RequestFrame | HelloFrame] = msgspec.msgpack.Decoder(RequestFrame | HelloFrame)
_from_engine: msgspec.msgpack.Decoder[AnswerFrame | WelcomeFrame] = msgspec.msgpack.Decoder(AnswerFrame | WelcomeFrame)
_leaves = msgspec.msgpack.Decoder(LeaveFrame | HelloFrame)
_details = msgspec.json.Decoder(dict[str, object])
_LAST_RESULT = max(PageResult)


def encode(frame: AnyFrame) -> bytes:
    """Return the bytes of ``frame``.

    Raises
    ------
    WireError
        For whatever the other side would refuse; nothing was sent.
    """
    body = pack(frame)
    if isinstance(frame, AnswerFrame | WelcomeFrame):
        _decode(_from_engine, body)
    elif isinstance(frame, LeaveFrame):
        _decode(_leaves, body)
    else:
        _decode(_from_client, body)
    return body


def pack(frame: AnyFrame) -> bytes:
    """Return the bytes of ``frame``, which the caller knows to be within the limits: for half the cost of both."""
    try:
        return _encoder.encode(frame)
    except (msgspec.MsgspecError, OverflowError, TypeError, UnicodeEncodeError) as error:
        raise _not_a_frame(error) from error


def decode_request(body: bytes) -> RequestFrame:
    """Return the request that a client sent; raises WireError."""
    frame = _decode(_from_client, body)
    if isinstance(frame, HelloFrame):
        raise _out_of_place(frame)
    return frame


def decode_answer(body: bytes) -> AnswerFrame:
    """Return what an engine told about an operation; raises WireError."""
    frame = _decode(_from_engine, body)
    if not isinstance(frame, AnswerFrame):
        raise _out_of_place(frame)
    return frame


def decode_hello(body: bytes) -> HelloFrame:
    """Return a client's greeting; raises WireError, as do all of these, also when it is another frame."""
    frame = _decode(_from_client, body)
    if not isinstance(frame, HelloFrame):
        raise _out_of_place(frame)
    return frame


def decode_welcome(body: bytes) -> WelcomeFrame:
    """Return the answer to a greeting."""
    frame = _decode(_from_engine, body)
    if not isinstance(frame, WelcomeFrame):
        raise _out_of_place(frame)
    return frame


def decode_leave(body: bytes) -> LeaveFrame:
    """Return what a client, or an administrator, asks."""
    frame = _decode(_leaves, body)
    if not isinstance(frame, LeaveFrame):
        raise _out_of_place(frame)
    return frame


def _out_of_place(frame: Struct) -> WireError:
    return WireError(
        f"a frame of type {frame.__struct_config__.tag!r} does not belong here",
        code="out_of_place",
        remedy="the greeting comes first, and once; close the connection",
    )


def _decode(decoder: msgspec.msgpack.Decoder[_F], body: bytes) -> _F:
    if len(body) > MAX_FRAME_NBYTES:
        raise WireError(
            f"frame of {len(body)} bytes, at most {MAX_FRAME_NBYTES} are allowed",
            code="length",
            remedy=f"ask for fewer pages at once; {MAX_PAGES} always fit",
        )
    try:
        frame = decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # a ValueError is text that is not UTF-8
        raise _not_a_frame(error) from error
    _check(frame)
    return frame


def _not_a_frame(error: Exception) -> WireError:
    text = "".join(character if character.isprintable() else "?" for character in str(error)[:_SHOWN])
    return WireError(
        f"no frame of this protocol: {text}",
        code="frame",
        remedy="close the connection; run devipc versions that have a protocol in common",
    )


def _check(frame: Struct) -> None:
    """Check what the types of the fields do not say."""
    if len(getattr(frame, "pages", b"")) % 8 or len(getattr(frame, "keys", b"")) % KEY_NBYTES:
        raise WireError("a list of pages or keys ends inside an entry", code="shape")
    if isinstance(frame, HelloFrame | WelcomeFrame) and frame.magic != MAGIC:
        raise WireError("greeting without the magic", code="magic", remedy="the peer speaks another protocol")
    if isinstance(frame, TellFrame) and frame.event not in REQUESTS:
        raise WireError(f"a client does not tell {frame.event.value!r}", code="event")
    if isinstance(frame, AnswerFrame):
        if frame.event not in ANSWERS:
            raise WireError(f"an engine does not tell {frame.event.value!r}", code="event")
        if frame.results and max(frame.results) > _LAST_RESULT:
            raise WireError(f"unknown result {max(frame.results)} of a page", code="result")
        if frame.detail is not None:
            decode_detail(frame.detail)


def decode_detail(detail: bytes) -> dict[str, object]:
    """Return the values of an answer's detail; raises WireError."""
    try:
        return _details.decode(detail)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _not_a_frame(error) from error
