"""A consumer that lingers: it sleeps only when nothing came for a while, with few others, and ends at once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from devipc.errors import ClosedError, CompletionTimeout, DevIPCError
from devipc.hicache.ring import MAX_LINGERING, RECHECK_S, Consumer, Producer
from tests.hicache.ring_peer import LIMIT_NBYTES

LONG_S = 1.0
Pair = tuple[Producer, Consumer]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    """As many as may linger, and one more."""
    with ExitStack() as stack:
        found = []
        for _ in range(MAX_LINGERING + 1):
            producer = Producer(slots=4, slot_nbytes=128, arena_nbytes=4096)
            stack.callback(producer.close)
            fds = [os.dup(fd) for fd in producer.fds()]
            consumer = Consumer(fds, limit_nbytes=LIMIT_NBYTES, linger_s=LONG_S)
            stack.callback(consumer.close)
            found.append((producer, consumer))
        yield found


def take_one(pair: Pair) -> None:
    producer, consumer = pair
    producer.push(b"first", timeout_s=0)
    assert consumer.take(timeout_s=1.0) == b"first"


def test_nobody_sleeps_before_the_first_entry_and_soon_behind_one(pairs: list[Pair]) -> None:
    producer, consumer = pairs[0]
    with pytest.raises(CompletionTimeout):
        consumer.take(timeout_s=2 * RECHECK_S)
    slept = consumer._naps
    assert slept, "whoever never had an entry sleeps"
    take_one(pairs[0])
    with pytest.raises(CompletionTimeout):
        consumer.take(timeout_s=2 * RECHECK_S)
    assert consumer._naps == slept, "it looks on behind an entry"
    threading.Timer(0.05, lambda: producer.push(b"second", timeout_s=0)).start()
    assert consumer.take(timeout_s=5.0) == b"second"
    assert consumer._naps == slept
    assert not producer._kicked, "whoever looks needs no kick"


def test_it_sleeps_when_nothing_came_for_so_long(pairs: list[Pair]) -> None:
    _, consumer = pairs[0]
    take_one(pairs[0])
    consumer._lingers_until = time.monotonic() + 0.05
    with pytest.raises(CompletionTimeout):
        consumer.take(timeout_s=4 * RECHECK_S)
    assert consumer._naps


def test_only_so_many_linger_at_a_time(pairs: list[Pair]) -> None:
    for pair in pairs:
        take_one(pair)

    def wait(consumer: Consumer) -> None:
        with pytest.raises(CompletionTimeout):
            consumer.take(timeout_s=4 * RECHECK_S)

    before = [consumer._naps for _, consumer in pairs]
    threads = [threading.Thread(target=wait, args=(consumer,)) for _, consumer in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slept = [consumer._naps > naps for (_, consumer), naps in zip(pairs, before, strict=True)]
    assert slept.count(True) == 1
    take_one(pairs[0])
    wait(pairs[0][1])  # and they have given back their turns
    take_one(pairs[-1])
    naps = pairs[-1][1]._naps
    wait(pairs[-1][1])
    assert pairs[-1][1]._naps == naps


def test_who_lingers_lets_others_have_the_interpreter_and_ends_at_once(pairs: list[Pair]) -> None:
    _, consumer = pairs[0]
    take_one(pairs[0])
    caught: list[DevIPCError] = []

    def wait() -> None:
        try:
            consumer.take(timeout_s=30)
        except DevIPCError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    assert consumer._naps == 0
    began = time.monotonic()
    consumer.end(ClosedError("over", remedy="none"))
    thread.join()
    assert time.monotonic() - began < 0.5
    assert [type(error) for error in caught] == [ClosedError]
