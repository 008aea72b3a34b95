"""How links begin and end: a goodbye is no death, a silent peer costs little, and closing is bounded."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from devipc.channel import Channel, Message, channel_pair
from devipc.channel import link as link_module
from devipc.channel.datagram import close_all
from devipc.channel.hello import Kind, encode_error, greet
from devipc.channel.link import Link, PeerState, Reply
from devipc.channel.listener import Listener
from devipc.errors import (
    CapabilityError,
    ClosedError,
    CompletionTimeout,
    DevIPCError,
    HandleError,
    PeerGone,
    ProtocolError,
    ResourceExhausted,
    UsageError,
)
from tests.channel.links import ASK, joined, waits
from tests.channel.processes import Child, eventually, holdings, stop

pytestmark = pytest.mark.usefixtures("flat")

Spawn = Callable[..., Child]


def test_notices_arrive_in_order_before_the_goodbye() -> None:
    heard: list[object] = []

    def hear(message: Message) -> None:
        eventually(lambda: other.state is PeerState.CLOSED)  # the goodbye is in before the first is served
        heard.append(message.body)

    one, other = joined(ask=hear)
    other.on_state(heard.append)
    for number in range(50):
        one.notify(ASK, str(number).encode())
    one.close()
    assert eventually(lambda: PeerState.CLOSED in heard)
    assert heard == [*(str(number).encode() for number in range(50)), PeerState.CLOSED]
    other.close()


def test_an_answer_to_the_goodbye_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = joined()
    told: list[PeerState] = []
    one.on_state(told.append)
    say = one._say

    def slow(kind: Kind, body: bytes = b"", *, request: int = 0) -> None:
        say(kind, body, request=request)
        assert eventually(lambda: other.state is PeerState.CLOSED)
        other.close()
        one._threads[0].join(5)  # it has read the end of the connection

    monkeypatch.setattr(one, "_say", slow)
    one.close()
    assert (told, one.state) == ([], PeerState.CLOSED)


def test_what_comes_after_the_goodbye_is_not_called_a_flood(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = joined(ask=lambda _: None)
    close = other._channel.close

    def late() -> None:
        other._inbox.close()
        one._channel.send(ASK, timeout_s=5)
        one._channel.send(ASK, request=10**6, timeout_s=5)
        time.sleep(0.1)
        close()

    monkeypatch.setattr(other._channel, "close", late)
    other.close()
    one.close()
    assert "too many requests" not in caplog.text


def test_a_peer_that_could_not_greet_is_not_waited_for() -> None:
    left, right = channel_pair()
    links: list[Link] = []
    thread = threading.Thread(target=lambda: links.append(Link.accept(right, facts={}, timeout_s=5)))
    thread.start()
    greeted = greet(left, first=True, facts={}, timeout_s=5)
    close_all(fd for fd in (greeted.life_fd, greeted.pidfd) if fd is not None)
    thread.join()
    told: list[PeerState] = []
    links[0].on_state(told.append)
    links[0].start()
    left.send(Kind.ERROR, encode_error(ResourceExhausted("no descriptor for the answer")), timeout_s=5)
    left.close()
    assert eventually(lambda: told == [PeerState.CLOSED])
    links[0].close()


def test_goodbye_ends_calls_and_is_not_a_death() -> None:
    entered, go = threading.Event(), threading.Event()

    def slow(_: Message) -> Reply:
        entered.set()
        go.wait(20)
        return b"", ()

    one, other = joined(ask=slow)
    states: list[PeerState] = []
    one.on_state(states.append)
    caught: list[DevIPCError] = []

    def ask() -> None:
        try:
            one.call(ASK, timeout_s=20)
        except PeerGone as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert entered.wait(5)
    closing = threading.Thread(target=other.close)
    closing.start()
    thread.join(5)
    assert caught[0].code == "closed"
    go.set()
    closing.join(5)
    assert eventually(lambda: states == [PeerState.CLOSED])
    for use in (lambda: one.call(ASK, timeout_s=1), lambda: one.notify(ASK)):
        with pytest.raises(PeerGone):
            use()
    one.close()
    assert one.state is PeerState.CLOSED


def test_closing_ends_ones_own_calls_and_later_use() -> None:
    go = threading.Event()
    one, other = joined(ask=waits(go))
    caught: list[DevIPCError] = []

    def ask() -> None:
        try:
            one.call(ASK, timeout_s=20)
        except ClosedError as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.05)
    one.close()
    one.close()
    thread.join(5)
    assert caught
    for use in (lambda: one.call(ASK, timeout_s=1), lambda: one.notify(ASK), one.start):
        with pytest.raises(ClosedError):
            use()
    go.set()
    other.close()


def test_closing_with_a_handler_that_does_not_return_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link_module, "_JOIN_S", 0.2)
    entered, go = threading.Event(), threading.Event()

    def stuck(_: Message) -> None:
        entered.set()
        go.wait(20)

    one, other = joined(ask=stuck)
    one.notify(ASK, fds=[0])
    one.notify(ASK, fds=[0])
    assert entered.wait(5)
    started = time.monotonic()
    other.close()
    assert time.monotonic() - started < 2
    assert "still run" in caplog.text
    go.set()
    one.close()


def test_callbacks_may_raise_and_may_close() -> None:
    one, other = joined()
    heard: list[PeerState] = []

    def fail(_: PeerState) -> None:
        raise ValueError("on purpose")

    one.on_state(fail)
    one.on_state(lambda state: one.close())
    one.on_state(heard.append)
    other.close()
    assert eventually(lambda: heard == [PeerState.CLOSED])
    one.close()


def test_misuse_is_refused() -> None:
    left, right = channel_pair()
    accepted: list[Link] = []
    thread = threading.Thread(target=lambda: accepted.append(Link.accept(right, facts={}, timeout_s=5)))
    thread.start()
    one = Link.over(left, facts={}, timeout_s=5)
    thread.join()
    with pytest.raises(UsageError):
        one.call(ASK, timeout_s=1)  # not started: nobody would receive the answer
    one.start()
    one.start()
    refused: tuple[Callable[[], object], ...] = (
        lambda: one.handle(ASK, lambda _: None),
        lambda: accepted[0].handle(63, lambda _: None),
        lambda: one.call(5, timeout_s=1),
        lambda: one.notify(2**16),
    )
    for use in refused:
        with pytest.raises(UsageError):
            use()
    one.close()
    accepted[0].close()


def test_a_peer_that_says_nothing_costs_little(path: str, spawn: Spawn) -> None:
    with Listener(path) as listener:
        child = spawn("silent", path)
        channel = listener.accept(20)
        assert child.line() == "connected"
        started = time.monotonic()
        with pytest.raises(CompletionTimeout):
            Link.accept(channel, facts={}, timeout_s=0.3)
        assert time.monotonic() - started < 2
        assert channel.closed
        child.end()


def test_a_pidfd_of_another_process_is_refused(path: str, spawn: Spawn) -> None:
    with Listener(path) as listener:
        child = spawn("impostor", path)
        with pytest.raises(HandleError) as caught:
            Link.accept(listener.accept(20), facts={}, timeout_s=20)
        assert caught.value.code == "foreign_pidfd"
        assert child.line() == "ERROR foreign_pidfd"
        child.end()


def test_what_comes_before_the_greeting_is_refused() -> None:
    for kind in (ASK, Kind.BYE, Kind.HELLO_ACK, Kind.ANSWER):
        left, right = channel_pair()
        with left:
            left.send(kind, fds=[0], timeout_s=1)
            with pytest.raises(ProtocolError) as caught:
                Link.accept(right, facts={}, timeout_s=1)
            assert caught.value.code == "no_hello"
            assert left.receive(1).kind == Kind.ERROR


def test_a_refused_greeting_is_told_to_who_connected() -> None:
    left, right = channel_pair()
    refused: list[DevIPCError] = []

    def accept() -> None:
        right.receive(5).close_fds()
        right.send(Kind.ERROR, encode_error(CapabilityError("not today", code="later")), timeout_s=1)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        Link.over(left, facts={}, timeout_s=5)
    except CapabilityError as error:
        refused.append(error)
    thread.join()
    assert refused[0].code == "later"
    right.close()


def test_too_many_facts_are_the_callers_mistake() -> None:
    left, right = channel_pair()
    with right, pytest.raises(UsageError):
        Link.over(left, facts={str(number): "x" for number in range(200)}, timeout_s=1)


@pytest.mark.chaos
def test_a_stopped_peer_times_out_and_its_late_answer_is_dropped(path: str, spawn: Spawn) -> None:
    child = spawn("echo", path)
    assert child.line() == "listening"
    with Link.connect(path, facts={}, timeout_s=20) as link:
        link.start()
        assert link.call(ASK, b"one", timeout_s=20).body == b"one"
        held = holdings()
        stop(child.pid)
        for body in (b"two", bytes(1_000_000)):  # the second one does not even fit into the socket
            started = time.monotonic()
            with pytest.raises(CompletionTimeout):
                link.call(ASK, body, fds=[0], timeout_s=0.2)
            assert time.monotonic() - started < 1
        assert link.state is PeerState.CONNECTED
        os.kill(child.pid, signal.SIGCONT)
        assert link.call(ASK, b"three", timeout_s=20).body == b"three"
        assert eventually(lambda: holdings() == held)
    assert child.line() == "closed"
    child.end()


@pytest.mark.chaos
@pytest.mark.parametrize(("how", "state"), [("bye", PeerState.CLOSED), ("exit", PeerState.GONE)])
def test_leaving_in_good_order_is_told_apart_from_death(path: str, spawn: Spawn, how: str, state: PeerState) -> None:
    """The leaver's process is over at once after its goodbye: the goodbye wins all the same."""
    for _ in range(8):
        told: list[PeerState] = []
        with Listener(path) as listener:
            child = spawn("leave", path, how)
            link = Link.accept(listener.accept(20), facts={}, timeout_s=20)
            link.on_state(told.append)
            time.sleep(0.05)
            link.start()
        assert eventually(lambda told=told: state in told)  # type: ignore[misc]
        assert told == ([PeerState.CLOSED] if how == "bye" else [PeerState.DYING, PeerState.GONE])
        link.close()
        child.end()


@pytest.mark.chaos
def test_death_ends_waiting_calls_at_once(path: str, spawn: Spawn) -> None:
    with Listener(path) as listener:
        child = spawn("victim", 2**28, path)
        link = Link.accept(listener.accept(20), facts={}, timeout_s=20)
    link.start()
    assert child.line() == "ready"
    stop(child.pid)
    ended: list[float] = []

    def ask() -> None:
        try:
            link.call(ASK, timeout_s=60)
        except PeerGone:
            ended.append(time.monotonic())

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    moment = child.kill()
    for thread in threads:
        thread.join(5)
    assert len(ended) == 5
    assert max(ended) - moment <= 0.2
    link.close()
    assert link.state in (PeerState.DYING, PeerState.GONE)  # closing is no proof of the end
    child.end()


def test_a_peer_without_descriptors_is_told_and_goes_on(path: str, spawn: Spawn) -> None:
    child = spawn("scarce", path)
    assert child.line() == "listening"
    with Link.connect(path, facts={}, timeout_s=20) as link:
        link.start()
        assert child.line() == "scarce"
        with pytest.raises(ResourceExhausted) as caught:
            link.call(ASK, fds=[0] * 300, timeout_s=5)
        assert caught.value.code == "fds"
        assert link.call(ASK, timeout_s=5).body == b"0"
        child.say("more")
        assert child.line() == "plenty"
        assert link.call(ASK, fds=[0] * 300, timeout_s=5).body == b"300"
        child.say("done")
        assert child.code() == 0
    child.end()


def test_a_hundred_links_leave_nothing(path: str) -> None:
    with Listener(path) as listener:
        for _ in range(100):
            channels: list[Channel] = []
            links: list[Link] = []

            def accept(channels: list[Channel] = channels, links: list[Link] = links) -> None:
                channels.append(listener.accept(5))
                links.append(Link.accept(channels[0], facts={}, timeout_s=5))

            thread = threading.Thread(target=accept)
            thread.start()
            link = Link.connect(path, facts={}, timeout_s=5)
            thread.join()
            for one in (link, links[0]):
                one.start()
            link.close()
            links[0].close()
