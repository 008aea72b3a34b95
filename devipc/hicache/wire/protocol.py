"""Frames between a client and a daemon, to bytes and back: and the refusal of whatever is no frame.

Owns that refusal: a frame that was decoded is whole, of the right types
and within every limit that does not depend on a pool. Whether pages and keys fit a pool is the engine's to say, with a
refusal of one operation; a :class:`~devipc.errors.WireError` from here ends the connection. It does no I/O.

A frame is a MessagePack map with its ``type``. Fields that are not known here are ignored, so that a newer side may add
some; what must not be ignored is sent only to a side that has the feature. Descriptors travel beside a frame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from devipc.errors import WireError
from devipc.hicache.keys import KEY_NBYTES
from devipc.hicache.operations import ANSWERS, REQUESTS
from devipc.hicache.results import PageResult
from devipc.hicache.wire.frames import (
    FEATURE_PASSED,
    MAGIC,
    MAX_FRAME_NBYTES,
    MAX_PAGES,
    AnswerFrame,
    AnyFrame,
    BackupFrame,
    Blob,
    Count63,
    Digest,
    FlushFrame,
    HelloFrame,
    InvalidateFrame,
    LeaveFrame,
    LookupFrame,
    Number,
    Op,
    PingFrame,
    Point,
    PoolNumber,
    PrefetchFrame,
    ReadyForm,
    RegisterPoolFrame,
    RequestFrame,
    RestoreFrame,
    StatusFrame,
    TellFrame,
    UnregisterFrame,
    WelcomeFrame,
)

__all__ = [
    "FEATURE_PASSED",
    "MAGIC",
    "MAX_FRAME_NBYTES",
    "MAX_PAGES",
    "AnswerFrame",
    "AnyFrame",
    "BackupFrame",
    "Blob",
    "Count63",
    "Digest",
    "FlushFrame",
    "HelloFrame",
    "InvalidateFrame",
    "LeaveFrame",
    "LookupFrame",
    "Number",
    "Op",
    "PingFrame",
    "Point",
    "PoolNumber",
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

_SHOWN = 160

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
    check = _CHECKS.get(type(frame))
    if check is not None:
        check(frame)
    return frame


def _not_a_frame(error: Exception) -> WireError:
    text = "".join(character if character.isprintable() else "?" for character in str(error)[:_SHOWN])
    return WireError(
        f"no frame of this protocol: {text}",
        code="frame",
        remedy="close the connection; run devipc versions that have a protocol in common",
    )


# What the types of the fields do not say, by the type of the frame: every operation comes through here, both ways.


def _check_lists(frame: BackupFrame | RestoreFrame) -> None:
    if len(frame.pages) % 8:
        raise WireError("a list of pages ends inside an entry", code="shape")
    _check_keys(frame)


def _check_keys(frame: BackupFrame | RestoreFrame | LookupFrame | PrefetchFrame | InvalidateFrame) -> None:
    if len(frame.keys) % KEY_NBYTES:
        raise WireError("a list of keys ends inside an entry", code="shape")


def _check_magic(frame: HelloFrame | WelcomeFrame) -> None:
    if frame.magic != MAGIC:
        raise WireError("greeting without the magic", code="magic", remedy="the peer speaks another protocol")


def _check_told(frame: TellFrame) -> None:
    if frame.event not in REQUESTS:
        raise WireError(f"a client does not tell {frame.event.value!r}", code="event")


def _check_answer(frame: AnswerFrame) -> None:
    for event in (frame.event, *frame.passed):
        if event not in ANSWERS:
            raise WireError(f"an engine does not tell {event.value!r}", code="event")
    if frame.results and max(frame.results) > _LAST_RESULT:
        raise WireError(f"unknown result {max(frame.results)} of a page", code="result")
    if frame.detail is not None:
        decode_detail(frame.detail)


_CHECKS: dict[type[Struct], Callable[[Any], None]] = {
    BackupFrame: _check_lists,
    RestoreFrame: _check_lists,
    LookupFrame: _check_keys,
    PrefetchFrame: _check_keys,
    InvalidateFrame: _check_keys,
    HelloFrame: _check_magic,
    WelcomeFrame: _check_magic,
    TellFrame: _check_told,
    AnswerFrame: _check_answer,
}


def decode_detail(detail: bytes) -> dict[str, object]:
    """Return the values of an answer's detail; raises WireError."""
    try:
        return _details.decode(detail)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _not_a_frame(error) from error
