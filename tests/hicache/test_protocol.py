"""Frames: what goes in comes out, recorded ones stay readable, and what is malformed ends in a typed error."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from devipc.errors import DevIPCError, HandleError, ProtocolError, ResourceExhausted, UsageError, WireError
from devipc.hicache.operations import ANSWERS, REQUESTS, Event, Kind
from devipc.hicache.requests import (
    Backup,
    CancelWord,
    CompletionFence,
    Flush,
    Invalidate,
    Lookup,
    Ping,
    Prefetch,
    ReadyPoint,
    RegisterPool,
    Request,
    Restore,
    StatusRequest,
    UnregisterPool,
)
from devipc.hicache.results import Answer
from devipc.hicache.wire import codec
from devipc.hicache.wire import protocol as p
from devipc.hicache.wire.greeting import accept_welcome
from tests.hicache.frames import DIGEST, FOLDER, LAYOUT, decoded, greeting, samples, welcome
from tests.hicache.resident import resident_nbytes

SEED = 20261129
NAMES = sorted(samples())


@pytest.mark.parametrize("name", NAMES)
def test_what_goes_in_comes_out(name: str) -> None:
    frame = samples()[name]
    assert decoded(name, p.encode(frame)) == frame


def test_there_is_a_recorded_frame_of_every_kind() -> None:
    recorded = json.loads((FOLDER / "v1.json").read_text())
    kinds = {msgspec.msgpack.decode(bytes.fromhex(body))["type"] for body in recorded.values()}
    assert kinds == {kind.value for kind in Kind} - {"release"} | {"hello", "welcome", "leave", "tell", "answer"}


@pytest.mark.parametrize("name", NAMES)
def test_recorded_frames_of_version_1_still_mean_the_same(name: str) -> None:
    recorded = json.loads((FOLDER / "v1.json").read_text())
    assert decoded(name, bytes.fromhex(recorded[name])) == samples()[name]


@pytest.mark.parametrize("name", NAMES)
def test_fields_of_a_newer_side_are_ignored(name: str) -> None:
    recorded = json.loads((FOLDER / "v1.json").read_text())
    fields = msgspec.msgpack.decode(bytes.fromhex(recorded[name]))
    fields = {"before": [1, {"a": b"b"}], **fields, "after": None, "deep": [[[[{}]]]]}
    assert decoded(name, msgspec.msgpack.encode(fields)) == samples()[name]


@pytest.mark.parametrize("name", NAMES)
def test_every_field_that_has_no_default_is_needed(name: str) -> None:
    fields = msgspec.msgpack.decode(p.encode(samples()[name]))
    optional = {"results", "error", "detail"}
    for field in set(fields) - optional:
        with pytest.raises(WireError):
            decoded(name, msgspec.msgpack.encode({key: value for key, value in fields.items() if key != field}))


REQUEST = {"op": 1, "pool": 1, "generation": 1}
COPY = {**REQUEST, "pages": b"", "keys": b"", "ready": True, "slot": 0, "timeout_s": 1.0, "partial": False}
WRONG = {
    "no operation": {"type": "flush", **REQUEST, "op": 0},
    "operation beyond": {"type": "flush", **REQUEST, "op": 2**63},
    "operation is true": {"type": "flush", **REQUEST, "op": True},
    "operation is text": {"type": "flush", **REQUEST, "op": "1"},
    "pool 0": {"type": "flush", **REQUEST, "pool": 0},
    "pool beyond": {"type": "flush", **REQUEST, "pool": 2**32},
    "negative generation": {"type": "flush", **REQUEST, "generation": -1},
    "unknown kind": {"type": "restart", **REQUEST},
    "answer to an engine": {"type": "answer", "op": 1, "event": "completed"},
    "hello again": {"type": "hello"},
    "half a key": {"type": "prefetch", **REQUEST, "keys": bytes(24)},
    "half a page": {"type": "restore", **COPY, "pages": bytes(12)},
    "keys are text": {"type": "prefetch", **REQUEST, "keys": "0123456789abcdef"},
    "too many pages": {"type": "restore", **COPY, "pages": bytes(8 * (p.MAX_PAGES + 1))},
    "too many keys": {"type": "prefetch", **REQUEST, "keys": bytes(16 * (p.MAX_PAGES + 1))},
    "negative deadline": {"type": "restore", **COPY, "timeout_s": -1.0},
    "no number": {"type": "restore", **COPY, "timeout_s": math.nan},
    "endless": {"type": "lookup", **REQUEST, "keys": b"", "lease_s": math.inf},
    "negative slot": {"type": "restore", **COPY, "slot": -1},
    "slot beyond": {"type": "restore", **COPY, "slot": 2**32},
    "ready is nothing": {"type": "restore", **COPY, "ready": None},
    "ready at 0": {"type": "restore", **COPY, "ready": {"fence": 0, "n": 0}},
    "ready beyond": {"type": "restore", **COPY, "ready": {"fence": 0, "n": 2**62}},
    "ready with more": {"type": "restore", **COPY, "ready": {"fence": 0, "n": 1, "until": 2}},
    "tells what engines tell": {"type": "tell", "op": 1, "event": "visible"},
    "tells what nobody tells": {"type": "tell", "op": 1, "event": "admit"},
    "tells nonsense": {"type": "tell", "op": 1, "event": "x"},
}
WRONG_ANSWERS = {
    "tells what clients tell": {"type": "answer", "op": 1, "event": "cancel"},
    "unknown result": {"type": "answer", "op": 1, "event": "completed", "results": b"\0\x09"},
    "detail is no object": {"type": "answer", "op": 1, "event": "completed", "detail": b"[]"},
    "detail is no JSON": {"type": "answer", "op": 1, "event": "completed", "detail": b"{"},
    "detail is deep": {"type": "answer", "op": 1, "event": "completed", "detail": b'{"a":' + b"[" * 100_000},
    "error too long": {"type": "answer", "op": 1, "event": "failed", "error": bytes(8193)},
    "a request": {"type": "status", "op": 1},
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_requests(what: str) -> None:
    with pytest.raises(WireError) as caught:
        p.decode_request(msgspec.msgpack.encode(WRONG[what]))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("what", WRONG_ANSWERS)
def test_wrong_answers(what: str) -> None:
    with pytest.raises(WireError):
        p.decode_answer(msgspec.msgpack.encode(WRONG_ANSWERS[what]))


DECODERS = (p.decode_request, p.decode_answer, p.decode_hello, p.decode_welcome, p.decode_leave)
HOSTILE = {
    "nothing": b"",
    "array of 4 Gi entries": b"\xdd\xff\xff\xff\xff",
    "map of 4 Gi entries": b"\xdf\xff\xff\xff\xff",
    "bytes of 4 GiB": b"\x82\xa4type\xa8prefetch\xa4keys\xc6\xff\xff\xff\xff",
    "deep nest": b"\x82\xa4type\xa6status\xa1x" + b"\x91" * 1_000_000,
    "deep maps": b"\x82\xa4type\xa6status\xa1x" + b"\x81\xa1x" * 1_000_000,
    "text that is not UTF-8": b"\x82\xa4type\xa6status\xa2\xff\xfe\x01",
    "type that is not UTF-8": b"\x81\xa4type\xa2\xff\xfe",
    "pickle": b"\x80\x04\x95\x1b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",
    "two frames": b"\x82\xa4type\xa6status\xa2op\x01" * 2,
    "beyond the limit": bytes(p.MAX_FRAME_NBYTES + 1),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_frames(what: str) -> None:
    for decode in DECODERS:
        with pytest.raises(WireError):
            decode(HOSTILE[what])


def test_nothing_is_sent_that_would_be_refused() -> None:
    lookup = p.LookupFrame(op=1, pool=1, generation=1, keys=b"", lease_s=1.0)
    for change in ({"op": 0}, {"op": 2**70}, {"keys": bytes(8)}, {"lease_s": math.nan}, {"pool": 2**32}, {"op": "1"}):
        with pytest.raises(WireError):
            p.encode(msgspec.structs.replace(lookup, **change))
    with pytest.raises(WireError):
        p.encode(p.TellFrame(op=1, event=Event.VISIBLE))
    most = {**COPY, "pages": bytes(8 * p.MAX_PAGES), "keys": bytes(16 * p.MAX_PAGES)}
    p.encode(p.BackupFrame(**most, confirmed=True))  # type: ignore[arg-type]
    shared = Shared()
    keys = np.zeros((p.MAX_PAGES + 1, 16), np.uint8)
    with pytest.raises(UsageError, match="in one operation"):
        codec.frame_of(Prefetch(op=1, pool=1, generation=1, keys=keys), shared)
    for request in every_request(shared):
        frame = codec.frame_of(request, shared)
        assert p.pack(frame) == p.encode(frame)


def mutated(random: Random, seeds: list[bytes]) -> bytes:
    body = bytearray(random.choice(seeds))
    for _ in range(random.choice((1, 1, 1, 2, 4, 16))):
        at = random.randrange(len(body) + 1)
        match random.randrange(6):
            case 0:
                del body[at:]
            case 1:
                body[at:at] = random.randbytes(random.choice((1, 4, 64)))
            case 2:
                body[at : at + 1] = bytes([random.choice((0xC0, 0xC6, 0xDB, 0xDD, 0xDF, 0x80, 0x90, 0xFF, 0xCB, 0xC1))])
            case 3:
                del body[at : at + random.randrange(1, 9)]
            case 4:
                other = random.choice(seeds)
                cut = random.randrange(len(other))
                body[at : at + 32] = other[cut : cut + 32]
            case _:
                if body:
                    body[at % len(body)] ^= 1 << random.randrange(8)
    return bytes(body)


@pytest.mark.once
def test_100_000_malformed_frames() -> None:
    """Each is decoded by every side and, where it is a request after all, taken apart; only typed errors come out."""
    random, seeds = Random(SEED), [p.encode(frame) for frame in samples().values()]
    refused = accepted = before = 0
    named = Shared()
    for number in range(100_000):
        if number == 20_000:
            before = resident_nbytes()
        body = random.randbytes(random.randrange(200)) if number % 4 == 0 else mutated(random, seeds)
        whole = False
        for decode in DECODERS:
            try:
                frame = decode(body)
                whole = True
                p.encode(frame)
                if isinstance(frame, p.AnswerFrame):
                    codec.answer_of(frame, who="peer")
                elif isinstance(frame, p.HelloFrame):
                    welcome(frame, features=1)
                elif isinstance(frame, p.WelcomeFrame):
                    accept_welcome(frame, features=1)
                elif not isinstance(frame, p.TellFrame | p.LeaveFrame):
                    codec.request_of(frame, named)
            except (HandleError, ProtocolError):
                pass
        refused, accepted = refused + (not whole), accepted + whole
    print(f"{refused} refused, {accepted} are frames after all")
    assert refused > 70_000
    assert resident_nbytes() - before < 8 * 2**20


# --- greeting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lowest", "highest", "version"),
    [(1, 1, 1), (1, 9999, 1), (0, 1, 1), (0, 0, 0), (2, 9999, 0), (9999, 9999, 0), (3, 1, 0)],
)
def test_versions(lowest: int, highest: int, version: int) -> None:
    theirs = msgspec.structs.replace(greeting(features=6), min_version=lowest, max_version=highest)
    theirs = p.decode_hello(p.encode(theirs))
    if version:
        answer = welcome(theirs, features=3)
        assert (answer.version, answer.features) == (version, 2)
        accept_welcome(p.decode_welcome(p.encode(answer)), features=6)
        return
    with pytest.raises(ProtocolError) as caught:
        welcome(theirs, features=3)
    assert caught.value.code == "version"
    assert caught.value.remedy


@pytest.mark.parametrize(
    "change", [{"magic": b"garbage!"}, {"magic": b""}, {"self_test": b"short"}, {"client": b""}, {"way": "x"}]
)
def test_greetings_of_another_protocol(change: dict[str, object]) -> None:
    fields = msgspec.msgpack.decode(p.encode(greeting()))
    with pytest.raises(WireError):
        p.decode_hello(msgspec.msgpack.encode({**fields, **change}))


def test_who_makes_other_keys_is_refused_by_both() -> None:
    for change in ({"self_test": bytes(16)}, {"key_version": 2}):
        with pytest.raises(ProtocolError, match="other page keys"):
            welcome(msgspec.structs.replace(greeting(), **change))
        with pytest.raises(ProtocolError, match="other page keys"):
            accept_welcome(msgspec.structs.replace(welcome(greeting()), **change), features=0)


@pytest.mark.parametrize("change", [{"version": 2}, {"version": 0}, {"features": 4}])
def test_what_was_not_offered_is_refused(change: dict[str, int]) -> None:
    answer = welcome(greeting(features=3), features=3)
    with pytest.raises(ProtocolError) as caught:
        accept_welcome(msgspec.structs.replace(answer, **change), features=3)
    assert caught.value.code == "version"


# --- requests and answers -------------------------------------------------------------------------------------------


class Shared:
    """Both sides of the numbers: things of one client, by number."""

    device_uuid = "GPU-1"

    def __init__(self) -> None:
        self.things: list[object] = [object() for _ in range(4)]

    def ready(self, point: Any, slot: int) -> Any:
        if isinstance(point, p.Point):
            return self._named(point.fence)
        return point if isinstance(point, bool) else p.Point(fence=self.things.index(point), n=1)

    def slot(self, fence: Any) -> int:
        return self.things.index(fence)

    def fence(self, slot: int) -> Any:
        return self._named(slot)

    def cancel(self, slot: int) -> Any:
        return self._named(slot + 1)

    def _named(self, number: int) -> object:
        if number >= len(self.things):
            raise HandleError(f"nothing has number {number}")
        return self.things[number]


PAGES = np.array([3, -1, 2**40], np.int64)
KEYS = np.arange(48, dtype=np.uint8).reshape(3, 16)


def every_request(shared: Shared) -> list[Request]:
    point, fence = cast(ReadyPoint, shared.things[1]), cast(CompletionFence, shared.things[2])
    word, pool = cast(CancelWord, shared.things[3]), {"pool": 7, "generation": 9}
    copy = {"pages": PAGES, "keys": KEYS, "fence": fence, "timeout_s": 2.5, "partial": True}
    return [
        RegisterPool(op=1, **pool, layout=LAYOUT, addresses=(), namespace=DIGEST),
        Backup(op=2, **pool, **copy, ready=point, cancel=word, confirmed=False),  # type: ignore[arg-type]
        Restore(op=3, **pool, **copy, ready=point),  # type: ignore[arg-type]
        Lookup(op=4, **pool, keys=KEYS, lease_s=1.0),
        Prefetch(op=5, **pool, keys=KEYS[:0]),
        Invalidate(op=6, **pool, keys=KEYS),
        Flush(op=7, **pool),
        UnregisterPool(op=8, **pool),
        StatusRequest(op=9),
        Ping(op=10),
    ]


def test_requests_travel_as_they_are() -> None:
    shared = Shared()
    for request in every_request(shared):
        back = codec.request_of(p.decode_request(p.encode(codec.frame_of(request, shared))), shared)
        assert type(back) is type(request)
        for field in type(request).__dataclass_fields__:
            if field == "kind":
                continue
            ours, theirs = getattr(request, field), getattr(back, field)
            if isinstance(ours, np.ndarray):
                assert (theirs.dtype, theirs.shape, theirs.flags.writeable) == (ours.dtype, ours.shape, False)
                assert np.array_equal(ours, theirs)
            else:
                assert ours == theirs


def test_every_request_that_an_engine_knows_travels() -> None:
    assert {request.kind for request in every_request(Shared())} == set(Kind) - {Kind.RELEASE}


def test_numbers_that_stand_for_nothing_and_layouts_that_are_none() -> None:
    shared = Shared()
    register, backup = (codec.frame_of(request, shared) for request in every_request(shared)[:2])
    for frame in (
        msgspec.structs.replace(backup, slot=9),
        msgspec.structs.replace(backup, slot=3),
        msgspec.structs.replace(backup, ready=p.Point(fence=9, n=1)),
        msgspec.structs.replace(register, layout=b"no layout"),
        msgspec.structs.replace(register, layout=register.layout + b"x"),  # type: ignore[union-attr]
    ):
        with pytest.raises(HandleError):
            codec.request_of(p.decode_request(p.encode(frame)), shared)
    with pytest.raises(UsageError):
        codec.request_of(p.TellFrame(op=1, event=Event.CANCEL), shared)


def test_answers_travel_as_they_are() -> None:
    error: DevIPCError = ResourceExhausted("full", code="busy", remedy="wait")
    answer = Answer(np.array([1, 8], np.uint8), error, {"pages": 3, "nested": [{"a": None}]})
    for event in ANSWERS:
        frame = p.decode_answer(p.encode(codec.frame_of_answer(5, event, answer)))
        back = codec.answer_of(frame, who="the engine")
        assert (frame.op, frame.event) == (5, event)
        assert back.results is not None
        assert back.results.tolist() == [1, 8]
        assert isinstance(back.error, ResourceExhausted)
        assert (back.error.code, back.error.remedy, back.error.retryable) == ("busy", "wait", True)
        assert back.detail == answer.detail
    assert codec.answer_of(codec.frame_of_answer(5, Event.VISIBLE, Answer()), who="the engine") == Answer()
    with pytest.raises(UsageError):
        codec.frame_of_answer(5, Event.COMPLETED, Answer(detail={"a": object()}))


def test_whatever_a_client_tells_travels() -> None:
    for event in REQUESTS:
        assert p.decode_request(p.encode(p.TellFrame(op=1, event=event))) == p.TellFrame(op=1, event=event)
