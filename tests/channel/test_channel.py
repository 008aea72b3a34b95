"""One connection: what travels, who owns descriptors, and that nothing waits for ever."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable

import pytest

from devipc.channel import Channel, Message, channel_pair
from devipc.channel.link import Link
from devipc.errors import (
    ClosedError,
    CompletionTimeout,
    PeerGone,
    UsageError,
    WireError,
)
from devipc.wire import MAX_BODY_NBYTES, MAX_MESSAGE_FDS, MAX_MESSAGE_NBYTES, Header, encode_header
from tests.channel.processes import Child, holdings

Pair = tuple[Channel, Channel]


@pytest.mark.parametrize("nbytes", [0, 1, MAX_BODY_NBYTES, MAX_BODY_NBYTES + 1, 3 * MAX_BODY_NBYTES])
def test_a_body_arrives_as_it_was_sent(pair: Pair, nbytes: int) -> None:
    body = os.urandom(nbytes)
    sender = threading.Thread(target=pair[0].send, args=(77, body), kwargs={"request": 2**64 - 1, "timeout_s": 5})
    sender.start()
    message = pair[1].receive(5)
    sender.join()
    assert (message.kind, message.request, message.body, message.fds) == (77, 2**64 - 1, body, ())


@pytest.mark.parametrize("count", [1, 250, 251, 300, 1000])
def test_descriptors_of_one_message_arrive_in_order_and_close_on_exec(pair: Pair, count: int) -> None:
    held = holdings()
    files = [os.memfd_create(str(number)) for number in range(count)]
    pair[0].send(77, b"files", fds=files, timeout_s=5)
    message = pair[1].receive(5)
    assert [os.readlink(f"/proc/self/fd/{fd}") for fd in message.fds] == [
        os.readlink(f"/proc/self/fd/{fd}") for fd in files
    ]
    assert not set(message.fds) & set(files)
    assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in message.fds)
    message.close_fds()
    message.close_fds()
    for fd in files:
        os.close(fd)
    assert holdings() == held


def test_taken_descriptors_are_no_longer_the_messages(pair: Pair) -> None:
    pair[0].send(77, fds=[0], timeout_s=1)
    message = pair[1].receive(1)
    (fd,) = message.take_fds()
    message.close_fds()
    os.fstat(fd)
    os.close(fd)


def test_credentials_among_the_control_messages_do_no_harm() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (left, right):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    with Channel(left) as one, Channel(right) as other:
        one.send(77, b"with", fds=[0, 1, 2], timeout_s=1)
        message = other.receive(1)
        assert (message.body, len(message.fds)) == (b"with", 3)
        message.close_fds()


def test_what_is_too_large_is_refused_before_it_is_sent(pair: Pair) -> None:
    with pytest.raises(UsageError) as caught:
        pair[0].send(77, bytes(MAX_MESSAGE_NBYTES + 1), timeout_s=1)
    assert "arena" in caught.value.remedy
    with pytest.raises(UsageError):
        pair[0].send(77, fds=[0] * (MAX_MESSAGE_FDS + 1), timeout_s=1)
    for kind, request in ((0, 0), (2**16, 0), (-1, 0), (77, -1), (77, 2**64)):
        with pytest.raises(UsageError):
            pair[0].send(kind, request=request, timeout_s=1)
    with pytest.raises(CompletionTimeout):
        pair[1].receive(0)


def test_a_descriptor_that_is_not_open_is_the_callers_mistake(pair: Pair) -> None:
    fd = os.memfd_create("closed")
    os.close(fd)
    with pytest.raises(UsageError):
        pair[0].send(77, fds=[fd], timeout_s=1)
    pair[0].send(78, timeout_s=1)
    assert pair[1].receive(1).kind == 78


def test_receiving_ends_at_its_deadline(pair: Pair) -> None:
    started = time.monotonic()
    with pytest.raises(CompletionTimeout):
        pair[0].receive(0.1)
    assert 0.09 < time.monotonic() - started < 1


def fill(channel: Channel) -> int:
    for count in range(1000):
        try:
            channel.send(70, bytes(MAX_BODY_NBYTES), timeout_s=0.02)
        except CompletionTimeout:
            return count
    pytest.fail("the socket took everything")


def test_sending_to_one_who_does_not_read_ends_at_its_deadline_and_sends_nothing(pair: Pair) -> None:
    count = fill(pair[0])
    assert count > 0
    for _ in range(count):
        assert pair[1].receive(1).kind == 70
    with pytest.raises(CompletionTimeout):
        pair[1].receive(0.02)


def test_a_message_that_broke_off_is_withdrawn_by_the_next_one(pair: Pair) -> None:
    held = holdings()
    with pytest.raises(CompletionTimeout):
        pair[0].send(70, bytes(100 * MAX_BODY_NBYTES), fds=[0, 1], timeout_s=0.05)
    with pytest.raises(CompletionTimeout):
        pair[1].receive(0.05)  # reads the half and keeps it
    assert holdings()[0] == held[0] + 2
    pair[0].send(71, b"whole", timeout_s=1)
    assert (message := pair[1].receive(1)).kind == 71
    assert message.body == b"whole"
    assert holdings() == held


def failing(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """Start a thread that makes a call and keeps what it raises."""
    caught: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except (ClosedError, PeerGone) as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, caught


def test_another_threads_long_send_does_not_hold_up_a_short_deadline(pair: Pair) -> None:
    fill(pair[0])
    long, caught = failing(lambda: pair[0].send(71, timeout_s=30))
    time.sleep(0.1)
    started = time.monotonic()
    with pytest.raises(CompletionTimeout):
        pair[0].send(72, timeout_s=0.1)
    assert time.monotonic() - started < 2
    pair[0].close()
    long.join(5)
    assert type(caught[0]) is ClosedError


def test_many_threads_send_whole_messages(pair: Pair) -> None:
    def send(kind: int) -> None:
        for number in range(20):
            pair[0].send(kind, bytes([kind]) * 150_000, request=number, timeout_s=20)

    senders = [threading.Thread(target=send, args=(kind,)) for kind in range(70, 74)]
    for sender in senders:
        sender.start()
    seen: dict[int, list[int]] = {}
    for _ in range(80):
        message = pair[1].receive(20)
        assert message.body == bytes([message.kind]) * 150_000
        seen.setdefault(message.kind, []).append(message.request)
    for sender in senders:
        sender.join()
    assert seen == {kind: list(range(20)) for kind in range(70, 74)}


@pytest.mark.parametrize("unread", [False, True])
def test_last_words_are_read_before_the_hang_up(pair: Pair, unread: bool) -> None:
    if unread:  # the kernel then tells the peer of a reset
        pair[1].send(80, b"never read", timeout_s=1)
    pair[0].send(77, b"last", fds=[0], timeout_s=1)
    pair[0].close()
    message = pair[1].receive(1)
    assert message.body == b"last"
    message.close_fds()
    for _ in range(2):
        with pytest.raises(PeerGone):
            pair[1].receive(1)
    with pytest.raises(PeerGone):
        pair[1].send(77, timeout_s=1)


def test_descriptors_of_unread_and_of_half_read_messages_are_closed() -> None:
    held = holdings()
    reading, writing = os.pipe()
    left, right = channel_pair()
    left.send(70, fds=[writing], timeout_s=1)
    with pytest.raises(CompletionTimeout):
        left.send(71, bytes(100 * MAX_BODY_NBYTES), fds=[writing], timeout_s=0.05)
    right.receive(1).close_fds()
    with pytest.raises(CompletionTimeout):
        right.receive(0.05)
    os.close(writing)
    left.close()
    right.close()
    assert os.read(reading, 1) == b""  # end of file: no copy of the other end is left anywhere
    os.close(reading)
    assert holdings() == held


@pytest.mark.parametrize("who", [0, 1])
def test_closing_either_end_wakes_who_waits(pair: Pair, who: int) -> None:
    thread, caught = failing(lambda: pair[0].receive(None))
    time.sleep(0.05)
    pair[who].close()
    thread.join(5)
    assert type(caught[0]) is (ClosedError if who == 0 else PeerGone)


def test_a_closed_channel_and_a_second_receiver_are_refused(pair: Pair) -> None:
    waiting, caught = failing(lambda: pair[0].receive(None))
    time.sleep(0.05)
    with pytest.raises(UsageError):
        pair[0].receive(0)
    pair[0].close()
    pair[0].close()
    waiting.join(5)
    assert caught
    for use in (lambda: pair[0].receive(0), lambda: pair[0].send(70, timeout_s=0), pair[0].detach):
        with pytest.raises(UsageError):
            use()


def test_a_channel_is_quiet_only_while_its_receiver_waits_for_nothing(pair: Pair) -> None:
    assert not pair[0].is_quiet()  # nobody is receiving
    taken: list[Message] = []
    for _ in range(200):
        receiver = threading.Thread(target=lambda: taken.append(pair[0].receive(5)))
        receiver.start()
        while not pair[0].is_quiet():
            time.sleep(0)
        count = len(taken)
        pair[1].send(70, timeout_s=1)
        # From here on the message is in the socket, in the receiver's hand, or delivered: never is all quiet.
        while len(taken) == count:
            assert not pair[0].is_quiet()
            time.sleep(0)
        receiver.join()
    pair[0].close()
    assert pair[0].is_quiet()


def test_only_seqpacket_sockets_become_channels() -> None:
    held = holdings()
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (left, right):
        with pytest.raises(UsageError):
            Channel(end)
    fd = os.memfd_create("none")
    with pytest.raises(UsageError):
        Channel.adopt(fd)
    assert holdings() == held


def test_an_empty_datagram_counts_as_hang_up() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, Channel(right) as channel:
        held = holdings()
        left.sendmsg([b""], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, (0).to_bytes(4, "little"))])
        with pytest.raises(PeerGone):
            channel.receive(1)
        assert holdings() == held


def test_a_split_message_cannot_grow_for_ever() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, Channel(right) as channel:
        frame = encode_header(Header(70, 1, MAX_BODY_NBYTES, 0, more=True)) + bytes(MAX_BODY_NBYTES)
        count = MAX_MESSAGE_NBYTES // MAX_BODY_NBYTES
        for _ in range(count):
            left.send(frame)
            with pytest.raises(CompletionTimeout):
                channel.receive(0)
        left.send(frame)
        with pytest.raises(WireError) as caught:
            channel.receive(0)
        assert caught.value.code == "message_size"


def test_too_many_descriptors_under_way_is_told_and_passes(spawn: Callable[..., Child]) -> None:
    child = spawn("flood")
    assert child.line() == "fds True True"
    assert child.line() == "65 again 20"
    assert child.code() == 0


def test_running_out_in_the_middle_of_a_message_leaves_the_channel_usable(spawn: Callable[..., Child]) -> None:
    child = spawn("half_sent")
    assert child.line() == "fds"
    assert child.line() in ("CompletionTimeout", "LostMessage")
    assert child.line() == "next 0"
    assert child.code() == 0


def test_a_full_table_loses_one_message_and_says_which(spawn: Callable[..., Child]) -> None:
    child = spawn("lost_frames")
    assert child.line() == "64 9 fds"
    assert child.line() == "next True"
    assert child.code() == 0


def test_a_spawned_child_inherits_an_end(spawn: Callable[..., Child]) -> None:
    left, right = channel_pair()
    fd = right.detach()
    right.close()
    try:
        child = spawn("inherited", fd, pass_fds=(fd,))
    finally:
        os.close(fd)
    with Link.accept(left, facts={}, timeout_s=20) as link:
        link.start()
        assert child.line() == "False"
        assert link.peer.pid == child.pid
        assert link.peer.facts["role"] == "child"
        assert link.call(64, b"ab", timeout_s=5).body == b"abab"
        child.say("done")
        assert child.code() == 0


def test_timeouts_are_numbers_and_may_be_endless(pair: Pair) -> None:
    for use in (lambda: pair[0].send(70, timeout_s=float("nan")), lambda: pair[0].receive(float("nan"))):
        with pytest.raises(UsageError):
            use()
    pair[0].send(70, timeout_s=float("inf"))
    pair[0].send(71, timeout_s=-1)
    assert pair[1].receive(float("inf")).kind == 70
    assert pair[1].receive(-1).kind == 71


def test_a_message_is_plain_data() -> None:
    message = Message(70)
    assert (message.request, message.body, message.fds) == (0, b"", ())
