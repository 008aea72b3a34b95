"""Fences between real processes: order of data, both directions, several consumers, and death."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections import Counter

import pytest

from devipc.calltrace import observe
from devipc.completion import Fence, create_fence, poison_page
from devipc.errors import FencePoisoned
from devipc.interfaces.backend import Device
from devipc.memfd import create_memfd
from devipc.types import POISON_BASE, PoisonReason, Strategy
from tests.completion.peer import Peer, Pipe, spawn
from tests.completion.rig import (
    ALL,
    MECHANISM,
    Buffer,
    hold,
    host_device,
    open_exported,
    pair,
    receive_fence,
    send_fence,
    stream_of,
    transfer_of,
)

ROUNDS = 10_000
SLOTS = 4
SLOT_NBYTES = 256

every_strategy = pytest.mark.parametrize("strategy", ALL)


def write_rounds(device: Device, ready: Fence, read: Fence, data: Buffer, rounds: int) -> None:
    """Copy a new number into one slot after the other, as soon as the reader has read what was there."""
    transfer, stream = transfer_of(device), stream_of(device)
    table = Buffer(device, rounds * SLOT_NBYTES)
    for i in range(rounds):
        table.fill(i + 1, offset=i * SLOT_NBYTES, nbytes=SLOT_NBYTES)
    for n in range(1, rounds + 1):
        if n > SLOTS:
            read.wait(stream, n - SLOTS, timeout_s=20.0)
        slot = n % SLOTS * SLOT_NBYTES
        transfer.copy(stream, data.ptr + slot, table.ptr + (n - 1) * SLOT_NBYTES, SLOT_NBYTES)
        ready.signal(stream, n)
    read.synchronize(rounds, 20.0)
    transfer.synchronize_stream(stream)
    table.close()


def read_rounds(device: Device, ready: Fence, read: Fence, data: Buffer, rounds: int) -> int:
    """Copy every number out on the own stream; return how many were stale or torn."""
    transfer, stream = transfer_of(device), stream_of(device)
    table = Buffer(device, rounds * SLOT_NBYTES)
    for n in range(1, rounds + 1):
        ready.wait(stream, n, timeout_s=20.0)
        slot = n % SLOTS * SLOT_NBYTES
        transfer.copy(stream, table.ptr + (n - 1) * SLOT_NBYTES, data.ptr + slot, SLOT_NBYTES)
        read.signal(stream, n)
    transfer.synchronize_stream(stream)
    wrong = sum(not table.holds(i + 1, offset=i * SLOT_NBYTES, nbytes=SLOT_NBYTES) for i in range(rounds))
    table.close()
    return wrong


def reader(pipe: Pipe) -> None:
    (strategy, rounds), (fd,) = pipe.receive()
    calls: Counter[str] = Counter()
    with host_device() as device, contextlib.closing(Buffer(device, SLOTS * SLOT_NBYTES, fd)) as data:
        ready = receive_fence(pipe, device)
        with create_fence(device, Strategy(strategy)) as read, observe(lambda call: calls.update([call])):
            send_fence(pipe, read)
            wrong = read_rounds(device, ready, read, data, rounds)
            pipe.send({"wrong": wrong, "calls": dict(calls)})
            pipe.receive()
            ready.close()


@pytest.mark.once
@every_strategy
def test_ten_thousand_ordered_hand_overs(device: Device, strategy: Strategy) -> None:
    """Data goes over under one fence and leave to overwrite it comes back under another: both directions at once."""
    calls: Counter[str] = Counter()
    with spawn(reader) as peer, contextlib.closing(Buffer(device, SLOTS * SLOT_NBYTES)) as data:
        peer.send((strategy.value, ROUNDS), (data.fd,))
        with create_fence(device, strategy) as ready:
            send_fence(peer, ready)
            read = receive_fence(peer, device)
            started = time.monotonic()
            with observe(lambda call: calls.update([call])):
                write_rounds(device, ready, read, data, ROUNDS)
            answer = peer.receive()[0]
            print(f"{strategy.value}: {(time.monotonic() - started) / ROUNDS * 1e6:.0f} us for each hand-over")
            read.close()
            peer.send()
    assert answer["wrong"] == 0
    signalling, observing = MECHANISM[strategy]
    for side in (calls, Counter(answer["calls"])):
        assert side[signalling] >= ROUNDS
        assert not observing or side[observing] > 0


def follower(pipe: Pipe) -> None:
    with host_device() as device:
        fence = receive_fence(pipe, device)
        pipe.send()
        for n in range(1, 501):
            fence.synchronize(n, 20.0)
        assert not fence.query(501)
        pipe.ask()
        fence.close()


@every_strategy
def test_three_processes_on_one_fence(device: Device, strategy: Strategy) -> None:
    stream = stream_of(device)
    with create_fence(device, strategy) as fence, spawn(follower) as one, spawn(follower) as two:
        for peer in (one, two):
            send_fence(peer, fence)
            peer.receive()
        for n in range(1, 501):
            fence.signal(stream, n, timeout_s=20.0)
        for peer in (one, two):
            peer.receive()
            assert len(fence.consumers) == 2
        for peer in (one, two):
            peer.send()
        fence._page.wait_until(lambda: not fence.consumers, timeout_s=5.0, pause_s=1e-3)
        assert fence.consumers == ()


def waiter(pipe: Pipe) -> None:
    """Put a wait for 1 on a stream, tell when it is over, and what the fence says then."""
    with host_device() as device:
        transfer, stream = transfer_of(device), stream_of(device)
        fence = receive_fence(pipe, device)
        while (command := pipe.receive()[0]) != "end":
            if command == "wait":
                fence.wait(stream, 1)
                marker = transfer.create_marker()
                transfer.record(marker, stream)
                pipe.send()
            elif command == "query":
                pipe.send((fence.query(1), transfer.query_marker(marker)))
            elif command == "poison":
                fence.poison(PoisonReason.CANCELLED)
                pipe.send()
            elif command == "released":
                transfer.synchronize_stream(stream)
                try:
                    fence.query(1)
                except FencePoisoned as error:
                    pipe.send(error.code)
        fence.close()


@pytest.mark.parametrize("who", ["producer", "consumer"])
def test_poison_releases_a_pending_device_wait(device: Device, who: str) -> None:
    stream = stream_of(device)
    with spawn(waiter) as peer, create_fence(device, Strategy.STREAM_MEMOP) as fence:
        send_fence(peer, fence)
        hold(stream)
        fence.signal(stream, 1)
        peer.ask("wait")
        time.sleep(0.02)
        assert peer.ask("query") == [False, False]
        started = time.monotonic()
        if who == "consumer":
            peer.ask("poison")
        else:
            fence.poison(PoisonReason.CANCELLED)
        assert peer.ask("released") == "cancelled"
        assert time.monotonic() - started < 1.0
        # The producer's own store is still queued. It lands on the poison, and nobody is fooled by it.
        stream.resume()
        transfer_of(device).synchronize_stream(stream)
        assert peer.ask("released") == "cancelled"
        peer.send("end")


def test_a_store_after_the_poison_does_not_hold_a_wait(device: Device) -> None:
    """The wait begins when the poison was overwritten already: only a poison that is repeated can release it."""
    producing, waiting = stream_of(device), stream_of(device)
    with pair(device, Strategy.STREAM_MEMOP) as (producer, consumer):
        consumer._in_producer = False
        hold(producing)
        producer.signal(producing, 5)
        hold(waiting)
        consumer.wait(waiting, 5)
        consumer.poison(PoisonReason.PEER_DIED)
        producer._page.value = 1
        waiting.resume()
        started = time.monotonic()
        transfer_of(device).synchronize_stream(waiting)
        assert time.monotonic() - started < 1.0
        for _ in range(200):
            producer._page.value = 5
            with pytest.raises(FencePoisoned):
                consumer.query(5)
        producing.resume()


def dying_writer(pipe: Pipe) -> None:
    """Queue two stores, then let them land when told to: late, like those of a process that was killed."""
    with host_device() as device, create_fence(device, Strategy.STREAM_MEMOP) as fence:
        stream = stream_of(device)
        send_fence(pipe, fence)
        hold(stream)
        fence.signal(stream, 1)
        fence.signal(stream, 2)
        pipe.send()
        pipe.receive()
        stream.resume()
        transfer_of(device).synchronize_stream(stream)
        pipe.send()
        pipe.receive()


def test_late_stores_of_a_dead_writer_never_undo_its_poison(device: Device) -> None:
    with spawn(dying_writer) as peer:
        fence = receive_fence(peer, device)
        page, pidfd = fence._page, os.pidfd_open(peer.pid)
        peer.receive()
        waiting = stream_of(device)
        fence.wait(waiting, 2)

        def gone() -> bool:
            return bool(select.select([pidfd], [], [], 0)[0])

        fence.poison(PoisonReason.PEER_DIED, writer_gone=gone)
        transfer_of(device).synchronize_stream(waiting)
        peer.ask()  # now both stores have landed on the poison
        for _ in range(50):
            with pytest.raises(FencePoisoned) as caught:
                fence.query(1)
            assert caught.value.code == "peer_died"
            time.sleep(1e-3)
        assert page.value == POISON_BASE + PoisonReason.PEER_DIED
        page.value = 2  # while the process lives, it could still store
        assert page.wait_until(lambda: page.value >= POISON_BASE, timeout_s=1.0, pause_s=1e-3)
        peer.kill()
        assert page.wait_until(lambda: not repeating(), timeout_s=2.0, pause_s=1e-3)
        fence.close()
        os.close(pidfd)


def supervised_engine(pipe: Pipe) -> None:
    """As :func:`dying_writer`; the page is the supervisor's, who made it."""
    _, (fd,) = pipe.receive()
    with host_device() as device, create_fence(device, Strategy.STREAM_MEMOP, page_fd=fd) as fence:
        stream = stream_of(device)
        send_fence(pipe, fence)
        hold(stream)
        fence.signal(stream, 1)
        fence.signal(stream, 2)
        pipe.ask()
        stream.resume()
        transfer_of(device).synchronize_stream(stream)
        pipe.ask()


def supervisor(pipe: Pipe) -> None:
    """Poison the page of a process that is told to die, and of which more is heard until it is gone; no device."""
    pid, (fd,) = pipe.receive()
    pidfd = os.pidfd_open(pid)
    pipe.send()
    pipe.receive()
    poison_page(fd, PoisonReason.PEER_DIED, until=lambda: bool(select.select([pidfd], [], [], 0)[0]))
    pipe.send([name for name in sys.modules if name.startswith("devipc.host")])


def test_a_supervisor_poisons_the_fence_of_an_engine_that_was_killed(device: Device) -> None:
    page_fd = create_memfd("test-page", 4096)
    failures: list[str] = []
    with spawn(supervised_engine) as engine, spawn(supervisor) as watching:
        engine.send(None, (page_fd,))
        consumer = receive_fence(engine, device)
        engine.receive()
        watching.ask(engine.pid, (page_fd,))
        stream = stream_of(device)
        consumer.wait(stream, 2)

        def wait() -> None:
            with pytest.raises(FencePoisoned) as caught:
                consumer.synchronize(2, 20.0)
            failures.append(caught.value.code)

        waiter = threading.Thread(target=wait)
        waiter.start()
        watching.send()
        waiter.join(5.0)
        transfer_of(device).synchronize_stream(stream)
        assert failures == ["peer_died"]
        engine.ask()  # both stores land on the poison
        page = consumer._page
        assert page.wait_until(lambda: page.value >= POISON_BASE, timeout_s=1.0, pause_s=1e-3)
        engine.kill()
        assert watching.receive()[0] == [], "a supervisor loads no device"
        assert page.value == POISON_BASE + PoisonReason.PEER_DIED
        with pytest.raises(FencePoisoned):
            consumer.query(1)
        consumer.close()
    os.close(page_fd)


def repeating() -> bool:
    return any(thread.name.startswith("devipc-poison") for thread in threading.enumerate())


def endless_writer(pipe: Pipe) -> None:
    with host_device() as device, create_fence(device, Strategy(pipe.receive()[0])) as fence:
        stream = stream_of(device)
        send_fence(pipe, fence)
        n = 0
        while True:
            n += 1
            fence.signal(stream, n)
            fence.synchronize(n, 10.0)


def kill_after(peer: Peer, fence: Fence, n: int) -> None:
    fence.synchronize(n, 10.0)
    peer.kill()


@every_strategy
def test_nobody_hangs_when_the_writer_is_killed(device: Device, strategy: Strategy) -> None:
    with spawn(endless_writer) as peer:
        peer.send(strategy.value)
        fence = receive_fence(peer, device)
        kill_after(peer, fence, 100)
        seen = fence.value
        fence.poison(PoisonReason.PEER_DIED, writer_gone=lambda: True)
        started = time.monotonic()
        with pytest.raises(FencePoisoned):
            fence.synchronize(seen + 1000, 5.0)
        with pytest.raises(FencePoisoned):
            fence.wait(stream_of(device), seen + 1000, timeout_s=5.0)
        fence.close()
        assert time.monotonic() - started < 1.0


@every_strategy
def test_a_killed_consumer_is_dropped(device: Device, strategy: Strategy) -> None:
    stream = stream_of(device)
    with spawn(follower) as peer:
        fence = create_fence(device, strategy, ring=4)
        line = send_fence(peer, fence)
        peer.receive()
        fence.signal(stream, 1)
        peer.kill()
        fence.drop_consumer(line)
        for n in range(2, 50):
            fence.signal(stream, n)
        fence.synchronize(49, 5.0)  # the ring is empty when the next consumer, which looks only later, comes
        late = open_exported(device, fence.export())
        fence.signal(stream, 50)
        late.synchronize(50, 5.0)
        late.close()
        fence.close()
