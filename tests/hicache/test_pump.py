"""Who takes answers: the thread that waits, another one meanwhile, or the background when nobody waits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from devipc.errors import DevIPCError, PeerGone, ProtocolError
from devipc.hicache.client.pump import Pump
from devipc.hicache.wire.transport import Offer, Transport, Way, take_offer
from devipc.hicache.wire.waiting import Waiters, wake

BACKGROUND = "devipc-hicache-answers"


class Desk:
    """Notes what was delivered and by which thread."""

    def __init__(self, way: Way) -> None:
        with Offer(way) as offer:
            taken = take_offer(way, [os.dup(fd) for fd in offer.fds])
            self.client: Transport = offer.complete([os.dup(fd) for fd in taken.fds])
        self.server = taken.transport
        self.open = True
        self.came: dict[bytes, str] = {}
        self.ends: list[DevIPCError] = []
        self.waiters: Waiters = []
        self.pump = Pump(self.client, self.deliver, is_open=lambda: self.open, on_end=self.ends.append)

    def deliver(self, frame: bytes) -> None:
        if frame == b"nonsense":
            raise ProtocolError("nonsense")
        self.came[frame] = threading.current_thread().name
        wake(self.waiters)

    def wait(self, frame: bytes, timeout_s: float = 10.0) -> bool:
        return self.pump.wait(lambda: frame in self.came, self.waiters, time.monotonic() + timeout_s)

    def answer(self, frame: bytes) -> None:
        self.server.push(frame, timeout_s=5)

    def close(self) -> None:
        self.pump.end(PeerGone("closed"))
        self.pump.join(5)
        self.client.close()
        self.server.close()


@pytest.fixture(params=list(Way))
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    made = Desk(request.param)
    yield made
    made.close()


def test_who_waits_takes_by_itself(desk: Desk) -> None:
    desk.open = False
    for number in range(300):
        name = b"%d" % number
        desk.answer(name)
        desk.open = True
        assert desk.wait(name)
        desk.open = False
    by_me = sum(thread == threading.current_thread().name for thread in desk.came.values())
    assert by_me > 290


def test_who_waits_looks_for_a_moment_before_it_sleeps_and_the_background_never_does(desk: Desk) -> None:
    took, take = set[tuple[str, bool]](), desk.pump._take

    def noted(*, timeout_s: float, spin: bool = True) -> bytes:
        took.add((threading.current_thread().name, spin))
        return take(timeout_s=timeout_s, spin=spin)

    desk.pump._take = noted
    mine = threading.current_thread().name
    while not {(mine, True), (BACKGROUND, False)} <= took:  # the test's own limit ends this
        desk.wait(b"never", timeout_s=0.01)
        time.sleep(0.01)
    assert took == {(mine, True), (BACKGROUND, False)}


def test_without_a_waiter_the_background_takes(desk: Desk) -> None:
    desk.answer(b"a")
    deadline = time.monotonic() + 5
    while b"a" not in desk.came:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert desk.came[b"a"] == BACKGROUND
    desk.open = False
    time.sleep(0.5)  # it sleeps now
    desk.open = True
    desk.pump.submitted()
    desk.answer(b"b")
    deadline = time.monotonic() + 5
    while b"b" not in desk.came:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_many_wait_and_all_are_served(desk: Desk) -> None:
    """Whoever leaves hands the turn on: nobody sleeps until its deadline."""
    names = [b"%d" % number for number in range(12)]
    done: list[bytes] = []

    def wait(name: bytes) -> None:
        if desk.wait(name):
            done.append(name)

    threads = [threading.Thread(target=wait, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    for name in names:
        time.sleep(0.01)
        desk.answer(name)
    for thread in threads:
        thread.join(10)
    assert sorted(done) == sorted(names)
    assert time.monotonic() - began < 5


def test_what_another_thread_does_is_seen_by_who_takes(desk: Desk) -> None:
    done = threading.Event()
    timer = threading.Timer(0.1, done.set)
    timer.start()
    began = time.monotonic()
    assert desk.pump.wait(done.is_set, desk.waiters, began + 10)
    assert time.monotonic() - began < 2
    timer.join(5)
    assert not desk.wait(b"never", timeout_s=0.05)


@pytest.mark.parametrize("how", ["peer", "frame", "here"])
def test_the_end_is_told_once_and_leaves_nobody_taking(desk: Desk, how: str) -> None:
    waited: list[bool] = []
    threads = [threading.Thread(target=lambda: waited.append(desk.wait(b"x", 0.5))) for _ in range(3)]
    for thread in threads:
        thread.start()
    match how:
        case "peer":
            desk.server.close()
        case "frame":
            desk.answer(b"nonsense")
        case "here":
            desk.pump.end(PeerGone("here"))
    for thread in threads:
        thread.join(5)
    assert waited == [False] * 3
    assert [type(error) for error in desk.ends] == {"peer": [PeerGone], "frame": [ProtocolError], "here": []}[how]
