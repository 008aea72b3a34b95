"""A hundred thousand malformed inputs: each ends in the right kind of error, and no descriptor stays behind.

Seeded, so that a failure can be repeated; the shapes are lying lengths and counts, foreign heads, mixed messages,
truncation, noise, and damage to frames that were whole.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable

import pytest

from devipc.channel import Channel, channel_pair
from devipc.channel.hello import Kind, decode_error, encode_error, greet
from devipc.channel.identity import local_facts, process_instance
from devipc.channel.link import Link, PeerState
from devipc.channel.liveness import own_life
from devipc.errors import (
    BoundsError,
    CompletionTimeout,
    DevIPCError,
    DriverError,
    HandleError,
    PeerError,
    PeerGone,
    VendorStatus,
    WireError,
)
from devipc.undoing import note_left
from devipc.wire import HEADER_NBYTES, MAX_FRAME_NBYTES, Header, Writer, encode_header
from tests.channel.processes import eventually, holdings

SEED = 20261129
FRAMES = 80_000
ERRORS = 15_000
GREETINGS = 5_000

Random = random.Random
Frame = tuple[bytes, int]
"""A datagram and the number of descriptors to send with it."""


def head(random: Random, **changes: object) -> bytes:
    fields = {"kind": random.randint(1, 2**16 - 1), "request": random.getrandbits(64), "body_nbytes": 0, "fd_count": 0}
    return encode_header(Header(**{**fields, **changes}))  # type: ignore[arg-type]


def noise(random: Random) -> list[Frame]:
    return [(random.randbytes(random.randint(1, 200)), random.randint(0, 3))]


def short(random: Random) -> list[Frame]:
    return [(head(random)[: random.randint(1, HEADER_NBYTES - 1)], random.randint(0, 2))]


def lying_length(random: Random) -> list[Frame]:
    real = random.randint(0, 64)
    told = random.choice([real + 1, real + 8, 2**16 - 25, random.randint(65, 60_000)])
    return [(head(random, body_nbytes=told) + bytes(real), 0)]


def padding(random: Random) -> list[Frame]:
    return [(head(random) + bytes(random.randint(1, 64)), 0)]


def wrong_magic(random: Random) -> list[Frame]:
    frame = bytearray(head(random))
    frame[random.randint(0, 3)] ^= random.randint(1, 255)
    return [(bytes(frame), random.randint(0, 2))]


def wrong_version(random: Random) -> list[Frame]:
    frame = bytearray(head(random))
    frame[4:6] = random.choice([0, 2, 9999, 2**16 - 1]).to_bytes(2, "little")
    return [(bytes(frame), 0)]


def unknown_flags(random: Random) -> list[Frame]:
    frame = bytearray(head(random))
    frame[22:24] = random.randint(2, 2**16 - 1).to_bytes(2, "little")
    return [(bytes(frame), 0)]


def lying_fds(random: Random) -> list[Frame]:
    real, told = random.sample([0, 1, 2, 3, 4, 250, 65_535], 2)
    return [(head(random, fd_count=told), min(real, 4) if told != 4 else 0)]


def oversized(random: Random) -> list[Frame]:
    nbytes = MAX_FRAME_NBYTES + random.randint(1, 4096)
    return [(head(random, body_nbytes=1) + bytes(nbytes - HEADER_NBYTES), random.randint(0, 2))]


def interleaved(random: Random) -> list[Frame]:
    request = random.getrandbits(63)
    kinds = random.choice([(70, 71), (70, 70)])
    first = head(random, kind=kinds[0], request=request, body_nbytes=1, fd_count=1, more=True) + b"x"
    other = head(random, kind=kinds[1], request=request + 1, body_nbytes=1, fd_count=1, more=random.random() < 0.5)
    return [(first, 1), (other + b"y", 1)]


def endless(random: Random) -> list[Frame]:
    return [(head(random, more=True), 0)]


def abandoned(random: Random) -> list[Frame]:
    return [(head(random, kind=0, request=random.randint(0, 1), fd_count=1), random.randint(0, 1))]


def empty(_: Random) -> list[Frame]:
    return [(b"", 0)]


REFUSED: tuple[Callable[[Random], list[Frame]], ...] = (
    noise, short, lying_length, padding, wrong_magic, wrong_version, unknown_flags, lying_fds, oversized, interleaved,
    endless, abandoned, empty,
)  # fmt: skip


def push(sock: socket.socket, frame: Frame) -> None:
    data, count = frame
    fds = b"".join(fd.to_bytes(4, "little") for fd in (0, 1, 2, 0)[:count])
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else [])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shape", REFUSED)
def test_every_shape_of_malformed_frame_is_refused(shape: Callable[[Random], list[Frame]]) -> None:
    random = Random(f"{SEED} {shape.__name__}")
    raw, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    held = holdings()
    with raw, Channel(end) as channel:
        for _ in range(FRAMES // (len(REFUSED) + 1)):
            frames = shape(random)
            for frame in frames[:-1]:
                push(raw, frame)
                with pytest.raises(CompletionTimeout):
                    channel.receive(0)
            push(raw, frames[-1])
            with pytest.raises(PeerGone if shape is empty else WireError):
                channel.receive(0)
            if shape is interleaved:
                assert holdings() == held
        assert holdings() == held
        push(raw, (head(random, kind=70, fd_count=1), 1))
        message = channel.receive(0)
        assert (message.kind, len(message.fds)) == (70, 1)
        message.close_fds()


@pytest.mark.timeout(120)
def test_damage_to_whole_frames_is_refused_or_harmless() -> None:
    """One to three flipped bits anywhere: where the checks cannot notice (kind, request, body), a message arrives."""
    random = Random(SEED)
    raw, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    held = holdings()
    outcomes = {"message": 0, "refused": 0, "waiting": 0}
    with raw, Channel(end) as channel:
        for _ in range(FRAMES // (len(REFUSED) + 1) + 1):
            body, count = random.randbytes(random.randint(0, 40)), random.randint(0, 3)
            frame = bytearray(head(random, body_nbytes=len(body), fd_count=count) + body)
            for _ in range(random.randint(1, 3)):
                bit = random.randrange(len(frame) * 8)
                frame[bit // 8] ^= 1 << bit % 8
            push(raw, (bytes(frame), count))
            try:
                message = channel.receive(0)
                assert (len(message.body), len(message.fds)) == (len(body), count)
                message.close_fds()
                outcomes["message"] += 1
            except WireError:
                outcomes["refused"] += 1
            except CompletionTimeout:  # the flag "more follows" was flipped
                outcomes["waiting"] += 1
        held_back = holdings()[0] - held[0]
        assert held_back <= 3
    assert all(outcomes.values()), outcomes
    assert holdings()[0] == held[0] - 2


def mutate(random: Random, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(random.randint(1, 4)):
        what = random.randrange(4)
        at = random.randrange(len(changed) + 1)
        if what == 0:
            del changed[at:]
        elif what == 1:
            changed[at:at] = random.randbytes(random.randint(1, 8))
        elif what == 2:
            changed[at : at + 4] = random.choice([b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\0\0\0\0"])
        elif changed:
            changed[at % len(changed)] ^= 1 << random.randrange(8)
    return bytes(changed)


def test_damaged_errors_decode_to_an_error_or_are_refused() -> None:
    random = Random(SEED)
    body = encode_error(PeerGone("a message", code="c", remedy="r", retryable=True))
    refused = 0
    for _ in range(ERRORS):
        try:
            error = decode_error(mutate(random, body), "peer 1")
            assert isinstance(error, DevIPCError)
            assert str(error).isprintable()
        except WireError:
            refused += 1
    assert refused > ERRORS // 2


@pytest.mark.parametrize("length", [8, 4000])
def test_what_was_not_undone_travels_with_the_error(length: int) -> None:
    """Also with one that was made from another, and behind a message that is cut."""
    cause, error = DriverError("map failed"), BoundsError("x" * length, retryable=True)
    note_left(cause, DriverError("refused", status=VendorStatus("vendorUnmap", 7, "BUSY")))
    note_left(cause, OSError("no close"))
    error.__cause__ = cause
    heard = decode_error(encode_error(error), "peer 1")
    assert heard.message.startswith("peer 1 answers: xxxxxxxx")
    assert heard.message.endswith("; not undone until that process ends: vendorUnmap -> 7 BUSY, no close")
    assert not heard.retryable


def greeting(lowest: int = 1, highest: int = 1, flags: int = 3, facts: dict[str, str] | None = None) -> bytes:
    facts = local_facts() if facts is None else facts
    writer = Writer().u16(lowest).u16(highest).raw(process_instance(), 16).u8(flags).u32(len(facts))
    for key, value in facts.items():
        writer.text(key).text(value)
    return writer.done()


@pytest.mark.timeout(120)
def test_damaged_greetings_are_refused_or_understood() -> None:
    random = Random(SEED)
    life = own_life()
    real = [fd for fd in (life.pidfd, life.memfd) if fd is not None]
    body, held, refused = greeting(), holdings(), 0
    for _ in range(GREETINGS):
        left, right = channel_pair()
        with left, right:
            fds = random.choice([real, real, real[::-1], real[:1], [], [0, 1], [*real, 0], [real[0]] * 2])
            kind = random.choice([Kind.HELLO] * 6 + [Kind.HELLO_ACK, 64])
            left.send(kind, mutate(random, body), fds=fds, timeout_s=1)
            try:
                greeted = greet(right, first=False, facts={}, timeout_s=0.5)
                os.close(greeted.life_fd) if greeted.life_fd is not None else None
                os.close(greeted.pidfd) if greeted.pidfd is not None else None
                left.receive(0).close_fds()
            except (HandleError, PeerError):
                refused += 1
                assert right.closed
    assert refused > GREETINGS // 2
    assert holdings() == held


def unsealed(nbytes: int) -> int:
    fd = os.memfd_create("life", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    return fd


@pytest.mark.parametrize("what", ["unsealed life", "pidfd is a file", "pidfd of another", "swapped", "old", "new"])
def test_greetings_that_lie_are_refused_and_their_sender_is_told(what: str) -> None:
    held = holdings()
    life = own_life()
    assert life.pidfd is not None
    assert life.memfd is not None
    other = os.pidfd_open(os.getppid())
    bad = unsealed(4096)
    body, fds = {
        "unsealed life": (greeting(), [life.pidfd, bad]),
        "pidfd is a file": (greeting(), [bad, life.memfd]),
        "pidfd of another": (greeting(), [other, life.memfd]),
        "swapped": (greeting(), [life.memfd, life.pidfd]),
        "old": (greeting(0, 0), [life.pidfd, life.memfd]),
        "new": (greeting(2, 9999), [life.pidfd, life.memfd]),
    }[what]
    left, right = channel_pair()
    with left:
        left.send(Kind.HELLO, body, fds=fds, timeout_s=1)
        if what == "pidfd of another":  # a pair that one process made: its child may hold the other end
            greeted = greet(right, first=False, facts={}, timeout_s=1)
            assert greeted.peer.pid == os.getppid()
            os.close(greeted.life_fd or -1)
            os.close(greeted.pidfd or -1)
            right.close()
        else:
            with pytest.raises((HandleError, PeerError)) as caught:
                greet(right, first=False, facts={}, timeout_s=1)
            assert caught.value.remedy
            answer = left.receive(1)
            assert answer.kind == Kind.ERROR
            assert caught.value.message in str(decode_error(answer.body, "peer"))
    os.close(other)
    os.close(bad)
    assert holdings() == held


def test_a_newer_peer_may_say_more_than_we_know() -> None:
    left, right = channel_pair()
    with left, right:
        left.send(Kind.HELLO, greeting(1, 7, 0, {"future": "1"}) + b"more fields", timeout_s=1)
        greeted = greet(right, first=False, facts={}, timeout_s=1)
        assert (greeted.version, greeted.peer.facts) == (1, {"future": "1"})
        assert (greeted.life_fd, greeted.pidfd) == (None, None)


@pytest.mark.parametrize("shape", [*REFUSED, "hello again", "unknown link kind", "complaint", "noise in an error"])
def test_a_link_ends_when_its_peer_sends_rubbish(shape: object) -> None:
    held = holdings()
    random = Random(f"{SEED} {shape}")
    raw, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told: list[PeerState] = []
    with raw:
        with Channel(socket.socket(fileno=os.dup(raw.fileno()))) as speaker:
            speaker.send(Kind.HELLO, greeting(flags=0), timeout_s=1)
            link = Link.accept(Channel(end), facts={}, timeout_s=1)
            speaker.receive(1).close_fds()
            link.on_state(told.append)
            link.start()
            failures: list[DevIPCError] = []
            asking = threading.Thread(target=lambda: failures.append(call_fails(link)))
            asking.start()
            assert speaker.receive(1).kind == 64
            if callable(shape):
                for frame in shape(random):
                    push(raw, frame)
            elif shape == "hello again":
                speaker.send(Kind.HELLO, greeting(flags=0), fds=[0], timeout_s=1)
            elif shape == "unknown link kind":
                speaker.send(63, fds=[0], timeout_s=1)
            elif shape == "complaint":
                speaker.send(65, timeout_s=1)  # who was never heard could not greet, and leaves in good order
                speaker.send(Kind.ERROR, encode_error(WireError("your frame", code="x")), timeout_s=1)
            else:
                speaker.send(Kind.ERROR, b"noise", request=1, timeout_s=1)
            asking.join(5)
            assert failures
            assert eventually(lambda: told == [PeerState.DYING])
            assert isinstance(failures[0], (HandleError, PeerError))
        link.close()
    assert holdings() == held


def call_fails(link: Link) -> DevIPCError:
    with pytest.raises(DevIPCError) as caught:
        link.call(64, timeout_s=20)
    return caught.value
