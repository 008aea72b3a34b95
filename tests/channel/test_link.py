"""Questions and answers: every wait ends, and every error arrives as what it was."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import pytest

from devipc.channel import Message, calls, channel_pair
from devipc.channel.identity import process_instance
from devipc.channel.link import Link, PeerState, Reply
from devipc.errors import (
    CapabilityError,
    CompletionTimeout,
    DevIPCError,
    DriverError,
    PeerError,
    PeerGone,
    ResourceExhausted,
    StaleError,
    UsageError,
    VendorStatus,
)
from tests.channel.links import ASK, joined, waits
from tests.channel.processes import Child, eventually, holdings

pytestmark = pytest.mark.usefixtures("flat")

Spawn = Callable[..., Child]


def test_both_know_who_the_other_is() -> None:
    one, other = joined()
    with one, other:
        assert one.peer.instance == other.peer.instance == process_instance()
        assert one.peer.pid == os.getpid()
        assert one.peer.uid == os.geteuid()
        assert (one.peer.facts["side"], other.peer.facts["side"]) == ("b", "a")
        assert one.peer.facts["boot_id"] == other.peer.facts["boot_id"]
        assert one.state is PeerState.CONNECTED


def test_questions_are_answered_with_descriptors() -> None:
    one, other = joined(ask=lambda message: (message.body[::-1], message.fds))
    with one, other:
        for count in (0, 1, 300):
            answer = one.call(ASK, b"abc", fds=[0] * count, timeout_s=5)
            assert (answer.body, len(answer.fds)) == (b"cba", count)
            answer.close_fds()
        with pytest.raises(CapabilityError) as caught:
            other.call(ASK, fds=[0], timeout_s=5)
        assert caught.value.code == "unknown_kind"


def test_answers_find_their_questions_among_many_threads() -> None:
    one, other = joined(ask=lambda message: (message.body, ()))
    wrong: list[bytes] = []

    def ask(name: int) -> None:
        for number in range(100):
            body = f"{name} {number}".encode()
            if one.call(ASK, body, timeout_s=20).body != body:
                wrong.append(body)

    with one, other:
        threads = [threading.Thread(target=ask, args=(name,)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_handler_keeps_what_it_takes() -> None:
    kept: list[int] = []

    def take(message: Message) -> Reply:
        kept.extend(message.take_fds()[:1])
        return b"", ()

    one, other = joined(ask=take)
    with one, other:
        one.call(ASK, fds=[0], timeout_s=5)
    os.fstat(kept[0])
    os.close(kept[0])


def test_a_handler_may_ask_back_and_may_close() -> None:
    one, other = joined()
    one.close()
    other.close()
    left, right = channel_pair()
    accepted: list[Link] = []
    thread = threading.Thread(target=lambda: accepted.append(Link.accept(right, facts={}, timeout_s=5)))
    thread.start()
    one = Link.over(left, facts={}, timeout_s=5)
    thread.join()
    (other,) = accepted
    other.handle(ASK, lambda message: (other.call(ASK, message.body, timeout_s=5).body, ()))
    other.handle(ASK + 1, lambda _: other.close())
    one.handle(ASK, lambda message: (message.body * 2, ()))
    one.start()
    other.start()
    assert one.call(ASK, b"ab", timeout_s=5).body == b"abab"
    with pytest.raises(PeerGone) as caught:
        one.call(ASK + 1, timeout_s=5)
    assert caught.value.code == "closed"
    one.close()


@pytest.mark.parametrize(
    "error",
    [
        StaleError("too old", code="old_one", remedy="ask again"),
        ResourceExhausted("no slot", remedy="wait"),
        CompletionTimeout("late"),
        DriverError("refused", backend="host", device="d", status=VendorStatus("call", -3, "NAME")),
        UsageError("not like this"),
        PeerGone("a third process"),
        DevIPCError("anything", retryable=True),
    ],
)
def test_errors_arrive_as_what_they_were(error: DevIPCError) -> None:
    def fail(_: Message) -> Reply:
        raise error

    one, other = joined(ask=fail)
    with one, other:
        with pytest.raises(type(error)) as caught:
            one.call(ASK, timeout_s=5)
        assert type(caught.value) is type(error)
        assert caught.value.message == f"peer {os.getpid()} answers: {error.message}"
        for name in ("code", "remedy", "retryable", "backend", "device", "status"):
            assert getattr(caught.value, name) == getattr(error, name)
        assert one.state is PeerState.CONNECTED


def test_unknown_and_private_errors_arrive_as_peer_errors(caplog: pytest.LogCaptureFixture) -> None:
    class NewError(DevIPCError):
        """Not known to the other side."""

    def new(_: Message) -> Reply:
        raise NewError("new \x1b[31m", code="n" * 1000)

    def bug(_: Message) -> Reply:
        raise ValueError("secret")

    def wrong(_: Message) -> Reply:
        return 1  # type: ignore[return-value]

    one, other = joined(ask=new, two=bug, three=wrong)
    with one, other:
        with pytest.raises(DevIPCError) as caught:
            one.call(ASK, timeout_s=5)
        assert "\x1b" not in str(caught.value)
        assert "new" in str(caught.value)
        for kind in (ASK + 1, ASK + 2):
            with caplog.at_level(logging.ERROR), pytest.raises(PeerError) as internal:
                one.call(kind, timeout_s=5)
            assert internal.value.code == "internal"
            assert "secret" not in str(internal.value)
        assert "secret" in caplog.text


def test_an_answer_that_cannot_be_sent_becomes_an_error() -> None:
    one, other = joined(ask=lambda _: (bytes(2**24 + 1), ()), two=lambda _: (b"", [10_000]))
    with one, other:
        for kind in (ASK, ASK + 1):
            with pytest.raises(UsageError):
                one.call(kind, timeout_s=5)


def test_late_answers_are_dropped_with_their_descriptors() -> None:
    entered, go = threading.Event(), threading.Event()

    def slow(message: Message) -> Reply:
        entered.set()
        go.wait(20)
        return b"late", message.fds

    one, other = joined(ask=slow, two=lambda _: (b"next", ()))
    with one, other:
        held = holdings()
        started = time.monotonic()
        with pytest.raises(CompletionTimeout) as caught:
            one.call(ASK, fds=[0, 1], timeout_s=0.1)
        assert caught.value.retryable
        assert time.monotonic() - started < 2
        assert entered.is_set()
        go.set()
        assert one.call(ASK + 1, timeout_s=5).body == b"next"
        assert eventually(lambda: holdings() == held)


def test_a_busy_worker_refuses_what_it_cannot_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_MAX_REQUESTS", 3)
    go = threading.Event()
    one, other = joined(ask=waits(go))
    outcomes: list[str] = []

    def ask() -> None:
        try:
            one.call(ASK, fds=[0], timeout_s=20)
            outcomes.append("ok")
        except ResourceExhausted as error:
            outcomes.append(error.code if error.retryable else "final")

    with one, other:
        threads = [threading.Thread(target=ask) for _ in range(10)]
        for thread in threads:
            thread.start()
        assert eventually(lambda: outcomes.count("busy") == 6)
        go.set()
        for thread in threads:
            thread.join()
        assert outcomes.count("ok") == 4


def test_a_flood_of_messages_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_MAX_NOTICES", 10)
    go = threading.Event()
    one, other = joined(ask=waits(go))
    with one, other:
        for _ in range(12):
            one.notify(ASK, fds=[0])
        assert eventually(lambda: other.state is PeerState.DYING)
        with pytest.raises(PeerError):
            one.call(ASK, timeout_s=5)
        go.set()


def test_an_exit_in_a_handler_is_an_internal_error_and_the_link_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def leave(_: Message) -> Reply:
        raise SystemExit(3)

    one, other = joined(ask=leave)
    with one, other:
        for _ in range(2):
            with pytest.raises(PeerError) as caught:
                one.call(ASK, timeout_s=5)
            assert caught.value.code == "internal"
    assert "SystemExit" in caplog.text


@pytest.mark.parametrize("most", [0, 2], ids=["to read", "to watch the peer"])
def test_a_link_without_threads_says_what_to_do(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    left, right = channel_pair()
    accepted: list[Link] = []
    thread = threading.Thread(target=lambda: accepted.append(Link.accept(right, facts={}, timeout_s=5)))
    thread.start()
    one = Link.over(left, facts={}, timeout_s=5)
    thread.join()
    start, started = threading.Thread.start, iter(range(most))

    def some(thread: threading.Thread) -> None:
        if next(started, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    with one, accepted[0]:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", some)
            with pytest.raises(ResourceExhausted) as caught:
                one.start()
        assert caught.value.code == "threads"
        assert "ulimit -u" in caught.value.remedy
