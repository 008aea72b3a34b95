"""Both ways that frames travel: whole and in order, or an end that everybody sees; and what a hostile peer can send."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from array import array
from collections.abc import Iterator

import pytest

from devipc import turns
from devipc.channel.datagram import Deadline
from devipc.errors import CompletionTimeout, HandleError, PeerGone, ResourceExhausted, WireError
from devipc.hicache.wire import datagrams
from devipc.hicache.wire.datagrams import MessageTransport
from devipc.hicache.wire.protocol import MAX_FRAME_NBYTES
from devipc.hicache.wire.transport import Offer, Transport, Way, take_offer
from devipc.wire import MAX_BODY_NBYTES
from tests.host.test_interrupts import interrupt_at

SIZES = (0, 1, 100, MAX_BODY_NBYTES - 1, MAX_BODY_NBYTES, MAX_BODY_NBYTES + 1, 3 * MAX_BODY_NBYTES, MAX_FRAME_NBYTES)


def ends(way: Way) -> tuple[Transport, Transport]:
    with Offer(way) as offer:
        taken = take_offer(way, [os.dup(fd) for fd in offer.fds])
        return offer.complete([os.dup(fd) for fd in taken.fds]), taken.transport


@pytest.fixture(params=list(Way))
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Transport, Transport]]:
    client, server = ends(request.param)
    yield client, server
    client.close()
    server.close()
    client.close()


def test_frames_of_all_sizes_come_whole_and_in_order(pair: tuple[Transport, Transport]) -> None:
    client, server = pair
    frames = [os.urandom(nbytes) for nbytes in SIZES]

    def echo() -> None:
        for _ in frames:
            server.push(server.take(timeout_s=10), timeout_s=10)

    thread = threading.Thread(target=echo)
    thread.start()
    for number, frame in enumerate(frames):
        client.push(frame, timeout_s=10)
        assert client.take(timeout_s=10) == frame
        assert client.taken == number + 1
    thread.join(10)
    with pytest.raises(CompletionTimeout):
        client.take(timeout_s=0.03)


def test_who_does_not_read_is_busy_and_loses_nothing(pair: tuple[Transport, Transport]) -> None:
    client, server = pair
    sent = 0

    def fill() -> None:
        nonlocal sent
        for sent in range(10_000):
            client.push(sent.to_bytes(4, "little"), timeout_s=0.0)

    with pytest.raises(ResourceExhausted) as caught:
        fill()
    assert caught.value.code == "busy"
    assert sent > 20
    assert [int.from_bytes(server.take(timeout_s=1), "little") for _ in range(sent)] == list(range(sent))
    client.push(b"later", timeout_s=1)
    assert server.take(timeout_s=1) == b"later"


def test_a_peer_that_stands_still_in_the_middle_of_a_frame_ends_nothing(pair: tuple[Transport, Transport]) -> None:
    """What was handed over arrives whole once it goes on, what was refused does not, and all in order."""
    client, server = pair
    handed: list[bytes] = []
    with contextlib.suppress(ResourceExhausted):
        for number in range(40):
            frame = number.to_bytes(4, "little") * (3 * MAX_BODY_NBYTES // 4)
            client.push(frame, timeout_s=0.0)
            handed.append(frame)
    with contextlib.suppress(ResourceExhausted):  # nothing small goes into the middle
        client.push(b"small", timeout_s=0.0)
        handed.append(b"small")
    assert handed
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.extend(server.take(timeout_s=10) for _ in handed))
    thread.start()
    with pytest.raises(CompletionTimeout):  # whoever takes sends the rest meanwhile
        client.take(timeout_s=0.3)
    thread.join(10)
    assert got == handed
    client.push(b"later", timeout_s=1)
    assert server.take(timeout_s=1) == b"later"
    server.push(b"answer", timeout_s=1)
    assert client.take(timeout_s=1) == b"answer"


def test_an_end_wakes_whoever_waits(pair: tuple[Transport, Transport]) -> None:
    client, server = pair
    told: list[str] = []

    def wait() -> None:
        try:
            client.take(timeout_s=20)
        except PeerGone as error:
            told.append(error.message)

    thread = threading.Thread(target=wait)
    thread.start()
    client.end(PeerGone("it is dying"))
    client.end(PeerGone("too late"))
    thread.join(5)
    assert told == ["it is dying"]
    with pytest.raises(PeerGone, match="it is dying"):
        client.push(b"", timeout_s=0)
    server.close()


def test_what_was_sent_before_the_close_arrives(pair: tuple[Transport, Transport]) -> None:
    client, server = pair
    server.push(b"last words", timeout_s=1)
    server.close()
    assert client.take(timeout_s=1) == b"last words"
    with pytest.raises(PeerGone):
        client.take(timeout_s=1)


@pytest.mark.parametrize(
    "datagrams",
    [
        [b"\2x"],
        [bytes(MAX_BODY_NBYTES + 2)],
        [b"\1" + bytes(MAX_BODY_NBYTES)] * (MAX_FRAME_NBYTES // MAX_BODY_NBYTES + 2),
    ],
    ids=["unknown mark", "too long", "never ends"],
)
@pytest.mark.parametrize("own", [True, False])
def test_hostile_datagrams(datagrams: list[bytes], own: bool) -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    transport = MessageTransport(mine, own=own)

    def send() -> None:
        try:
            for datagram in datagrams:
                theirs.send(datagram)
        except OSError:
            pass

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(WireError):
        transport.take(timeout_s=5)
    with pytest.raises(WireError):
        transport.push(b"x", timeout_s=1)
    transport.close()
    thread.join(5)
    theirs.close()


def test_what_the_kernel_does_not_take_is_refused_for_good_and_in_nobodys_way() -> None:
    """As where `net.core.wmem_default` is small: whoever was refused may use the slot of that operation again."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 * 1024)
    client, server = MessageTransport(left, own=True), MessageTransport(right, own=False)
    try:
        for number in range(3):
            with pytest.raises(ResourceExhausted) as caught:
                client.push(bytes(3 * MAX_BODY_NBYTES), timeout_s=0.1)
            assert caught.value.code == "socket"
            client.push(b"small %d" % number, timeout_s=0.1)
        assert [server.take(timeout_s=5) for _ in range(3)] == [b"small 0", b"small 1", b"small 2"]
    finally:
        client.close()
        server.close()


def test_descriptors_that_come_along_are_not_taken() -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    transport = MessageTransport(mine, own=False)
    before = len(os.listdir("/proc/self/fd"))
    theirs.sendmsg([b"\0frame"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [0, 1, 2]))])
    assert transport.take(timeout_s=1) == b"frame"
    assert len(os.listdir("/proc/self/fd")) == before
    transport.close()
    theirs.close()


def test_a_peer_that_makes_the_socket_not_wait_does_not_make_it_spin() -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    also_mine = os.dup(mine.fileno())
    transport = MessageTransport(mine, own=False)
    os.set_blocking(also_mine, False)
    began = os.times()
    with pytest.raises(CompletionTimeout):
        transport.take(timeout_s=0.3)
    assert os.times().user - began.user < 0.2
    transport.close()
    theirs.close()
    os.close(also_mine)


@pytest.mark.parametrize("way", list(Way))
def test_descriptors_that_are_no_offer(way: Way) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for count in (0, 1, 2, 4, 5):
        fds = [os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) for _ in range(count)]
        with pytest.raises(HandleError):
            take_offer(way, fds)
    assert len(os.listdir("/proc/self/fd")) == before
    with Offer(way) as offer, pytest.raises(HandleError):
        offer.complete([os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_take_that_is_interrupted_while_it_sends_what_is_kept_holds_no_other() -> None:
    client, server = ends(Way.MESSAGES)
    assert isinstance(client, MessageTransport)
    files = (str(datagrams.__file__), str(turns.__file__))
    for point in range(1, 9):  # to where it was released
        client._rest.append(memoryview(b"kept"))
        assert interrupt_at(point, lambda: client._awaits(Deadline(0.0)), files)
        assert not client._sending.locked(), f"the turn is kept after an interrupt at place {point}"
        client._rest.clear()
    client.close()
    server.close()
