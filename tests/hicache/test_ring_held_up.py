"""What must not hold a ring's end up: a peer that has the same bell, and interrupts at any instruction."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from devipc.errors import CompletionTimeout, ResourceExhausted
from devipc.hicache.daemon.remotecopies import _Outlet
from devipc.hicache.wire.ring import Consumer, Producer

HEAD = 16
Pair = tuple[Producer, Consumer]


@pytest.fixture
def pair() -> Iterator[Pair]:
    producer = Producer(slots=4, slot_nbytes=128, arena_nbytes=4096)
    consumer = Consumer([os.dup(fd) for fd in producer.fds()], limit_nbytes=4096)
    yield producer, consumer
    producer.close()
    consumer.close()


@pytest.mark.parametrize("flooded", [False, True])
@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_no_bell_holds_anybody_up(pair: Pair, side: str, flooded: bool) -> None:
    """A peer has the same open socket, and may have it wait, and fill it with whatever it likes, at any time."""
    producer, consumer = pair
    mine, theirs = (producer, consumer) if side == "producer" else (consumer, producer)
    for _ in range(4):
        producer.push(b"", timeout_s=0)
    for bell in (mine._bell, theirs._bell):
        os.set_blocking(bell.fileno(), False)
    if flooded:
        for bell in (mine._bell, theirs._bell):
            with suppress(BlockingIOError):
                while True:
                    bell.send(bytes(4096))
    for bell in (mine._bell, theirs._bell):
        os.set_blocking(bell.fileno(), True)
    mine._words[mine._their_nap] = 1  # it seems to sleep, so that it is kicked
    thread = threading.Thread(
        target=lambda: producer.push(b"", timeout_s=5) if side == "producer" else consumer.take(timeout_s=5)
    )
    if side == "producer":
        consumer.take(timeout_s=0)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()


def test_an_order_is_not_put_off_by_another_that_is_announced(pair: Pair) -> None:
    """Clients of an engine use its ring at the same time: one wakes the engine just when another's order is sent."""
    producer, consumer = pair
    outlet = _Outlet(producer)
    kicking, let_go, ring = threading.Event(), threading.Event(), producer._ring

    def slowly() -> None:
        kicking.set()
        assert let_go.wait(5)
        ring()

    producer._ring = slowly  # type: ignore[method-assign]
    producer._words[producer._their_nap] = 1
    announcing = threading.Thread(target=outlet.announce)
    sending = threading.Thread(target=outlet.send, args=(b"order",))
    announcing.start()
    assert kicking.wait(5)
    sending.start()
    sending.join(0.05)
    let_go.set()
    announcing.join()
    sending.join()
    assert consumer.take(timeout_s=0) == b"order"


def test_no_interrupt_leaves_an_end_taken(pair: Pair) -> None:
    """A process sends signals whose handler raises, as Ctrl-C does; SIGALRM is the limit's of each test."""
    producer, consumer = pair

    class Interrupt(Exception):
        pass

    armed = False

    def handler(*_: object) -> None:
        if armed:
            raise Interrupt

    before = signal.signal(signal.SIGUSR1, handler)
    text = f"import os,time\nwhile os.getppid() == {os.getpid()}: os.kill({os.getpid()}, 10); time.sleep(1e-4)"
    sender = subprocess.Popen([sys.executable, "-c", text])
    interrupts, until = 0, time.monotonic() + 10
    try:
        while interrupts < 2000 and time.monotonic() < until:
            try:
                armed = True
                for _ in range(100):
                    producer.push(b"x", timeout_s=0)
                    consumer.take(timeout_s=0)
            except Interrupt:
                armed = False
                interrupts += 1
            except (ResourceExhausted, CompletionTimeout):  # one of the two was done, and the other was not
                pass
            armed = False
            assert not producer._turn.locked()
            assert not consumer._turn.locked()
            producer._words[HEAD] = consumer._head = producer._tail  # what an interrupt left in between
    finally:
        sender.kill()
        sender.wait()
        signal.signal(signal.SIGUSR1, before)
    print(f"{interrupts} interrupts")
    assert interrupts > 100
