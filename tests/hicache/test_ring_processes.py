"""Two processes: many entries, lost kicks, death at every store, and a peer that writes nonsense all the time."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from devipc.channel import PeerWatch
from devipc.errors import CompletionTimeout, PeerGone, ProtocolError, ResourceExhausted
from devipc.hicache.wire.ring import RECHECK_S, Consumer, Producer
from tests.hicache.ring_peer import LIMIT_NBYTES, SLOTS, drop_kicks, payload_of

ROOT = Path(__file__).resolve().parents[2]
Peer = subprocess.Popen[str]
Start = Callable[..., Peer]
SLACK_S = 1.0  # two cores, shared with whatever else runs


@pytest.fixture
def start() -> Iterator[Start]:
    peers: list[Peer] = []

    def start(role: str, *arguments: object, fds: tuple[int, ...] = ()) -> Peer:
        peer = subprocess.Popen(
            [sys.executable, "-m", "tests.hicache.ring_peer", role, *map(str, (*fds, *arguments))],
            pass_fds=fds,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        peers.append(peer)
        return peer

    yield start
    for peer in peers:
        if peer.poll() is None:
            peer.kill()
        peer.communicate(timeout=10)


def adopted(peer: Peer, numbers: list[int]) -> list[int]:
    """Take copies of another process's descriptors."""
    libc, pidfd = ctypes.CDLL(None, use_errno=True), os.pidfd_open(peer.pid)
    try:
        fds = [libc.syscall(438, pidfd, number, 0) for number in numbers]  # pidfd_getfd
    finally:
        os.close(pidfd)
    if min(fds) < 0:
        pytest.skip(f"pidfd_getfd is not allowed here ({os.strerror(ctypes.get_errno())})")
    return fds


def line(peer: Peer) -> str:
    assert peer.stdout is not None
    return peer.stdout.readline()


@pytest.mark.once
@pytest.mark.parametrize(
    "count", [100_000, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
def test_many_entries_with_lost_kicks(start: Start, count: int) -> None:
    producer = Producer(slots=64, arena_nbytes=64 * 1024)
    lost = drop_kicks(producer, 0.01, 1)
    peer = start("check", count, 0.01, fds=producer.fds())
    slowest, begun = 0.0, time.monotonic()
    for number in range(count):
        payload = payload_of(number)
        before = time.monotonic()
        producer.push(payload, timeout_s=20)
        slowest = max(slowest, time.monotonic() - before) if number > SLOTS * 8 else 0.0
    said = line(peer)
    took = time.monotonic() - begun
    print(f"{count} entries in {took:.1f} s, slowest push {slowest * 1e3:.1f} ms; lost kicks {lost()}; {said.strip()}")
    assert peer.wait(10) == 0
    assert said.startswith(f"checked {count} ")
    assert slowest < RECHECK_S + SLACK_S
    producer.close()


@pytest.mark.once
@pytest.mark.parametrize("share", [0.01, 0.5])
def test_no_round_trip_stalls_when_kicks_are_lost(start: Start, share: float) -> None:
    there = Producer(slots=SLOTS, arena_nbytes=64 * 1024)
    drop_kicks(there, share, 5)
    peer = start("echo", share, fds=there.fds())
    fds = adopted(peer, [int(n) for n in line(peer).split()])
    back = Consumer(fds, limit_nbytes=LIMIT_NBYTES, spin_s=0)
    slowest = 0.0
    for number in range(3000 if share < 0.1 else 100):
        before = time.monotonic()
        there.push(payload_of(number), timeout_s=10)
        assert back.take(timeout_s=10) == payload_of(number)
        slowest = max(slowest, time.monotonic() - before)
    print(f"slowest round trip {slowest * 1e3:.1f} ms")
    assert slowest < 2 * RECHECK_S + SLACK_S
    there.close()
    assert peer.wait(10) == 0
    with pytest.raises(PeerGone):
        back.take(timeout_s=1)
    back.close()


def take_all(consumer: Consumer, taken: list[bytes]) -> None:
    while True:
        taken.append(consumer.take(timeout_s=20))


def push_all(producer: Producer, numbers: Iterable[int], timeout_s: float) -> None:
    for number in numbers:
        producer.push(payload_of(number), timeout_s=timeout_s)


# --- death --------------------------------------------------------------------------------------------------------


def watched(peer: Peer, end: Any) -> PeerWatch:
    gone = PeerGone("the peer died", code="died")
    return PeerWatch(None, os.pidfd_open(peer.pid), on_dying=lambda: end.end(gone), on_gone=lambda: end.end(gone))


@pytest.mark.chaos
@pytest.mark.timeout(180)
def test_a_producer_killed_before_any_store(start: Start) -> None:
    expected = [payload_of(number) for number in (1, 64, 2, 3, 128, 4)]
    deaths = []
    for at in range(1, 200):
        peer = start("die_producing", at)
        consumer = Consumer(adopted(peer, [int(n) for n in line(peer).split()]), limit_nbytes=LIMIT_NBYTES)
        watch = watched(peer, consumer)
        assert peer.stdin is not None
        peer.stdin.write("go\n")
        peer.stdin.flush()
        taken: list[bytes] = []
        begun = time.monotonic()
        with pytest.raises(PeerGone) as caught:
            take_all(consumer, taken)
        assert time.monotonic() - begun < 10
        watch.close()
        consumer.close()
        assert taken == expected[: len(taken)]  # whole entries, in order, and nothing torn
        if peer.wait(10) == 0:
            assert caught.value.code in ("ring_closed", "died")
            break
        assert peer.returncode == -signal.SIGKILL
        assert caught.value.code == "died"
        deaths.append(len(taken))
    print(f"{len(deaths)} deaths, entries taken: {deaths}")
    assert len(deaths) >= 3 * 6


@pytest.mark.chaos
@pytest.mark.timeout(180)
def test_a_consumer_killed_before_any_store(start: Start) -> None:
    deaths = 0
    for at in range(1, 200):
        producer = Producer(slots=2, slot_nbytes=256, arena_nbytes=4096)
        peer = start("die_consuming", at, fds=producer.fds())
        assert line(peer) == "ready\n"
        watch = watched(peer, producer)
        begun = time.monotonic()
        with pytest.raises(PeerGone):
            push_all(producer, (1, 64, 2, 3, 128, 4, *[5] * 100), 20.0)
        assert time.monotonic() - begun < 10
        watch.close()
        producer.close()
        if peer.wait(10) == 0:
            break
        assert peer.returncode == -signal.SIGKILL
        deaths += 1
    print(f"{deaths} deaths")
    assert deaths >= 6


def test_a_stopped_peer_is_busy_and_then_goes_on(start: Start) -> None:
    producer = Producer(slots=SLOTS, arena_nbytes=64 * 1024)
    peer = start("check", 4 * SLOTS, 0.0, fds=producer.fds())
    producer.push(payload_of(0), timeout_s=20)
    os.kill(peer.pid, signal.SIGSTOP)
    with pytest.raises(ResourceExhausted):
        push_all(producer, range(1, 4 * SLOTS), 0.2)
    os.kill(peer.pid, signal.SIGCONT)
    push_all(producer, range(producer._tail, 4 * SLOTS), 20.0)
    assert line(peer).startswith("checked")
    assert peer.wait(10) == 0
    producer.close()


@pytest.mark.once
def test_a_peer_that_writes_nonsense_all_the_time(start: Start) -> None:
    """Whatever it does between two loads: an entry that was put, an error of the tree, or nothing."""
    first = Producer(slots=4, slot_nbytes=128, arena_nbytes=4096)
    peer = start("storm", 7, fds=(first.fds()[0],))
    assert line(peer) == "ready\n"
    refused = whole = quiet = 0
    until = time.monotonic() + 3
    consumer = Consumer([os.dup(fd) for fd in first.fds()], limit_nbytes=LIMIT_NBYTES)
    while time.monotonic() < until:
        try:
            first.push(payload_of(1), timeout_s=0)
            assert consumer.take(timeout_s=0) == payload_of(1)
            whole += 1
        except ProtocolError:
            refused += 1
        except (PeerGone, ResourceExhausted, CompletionTimeout):
            quiet += 1
        for end in (first, consumer):  # as if nothing had been noticed: the next look is at other nonsense
            end._ended = None
        consumer._head, consumer._seen = first._tail, 0
        first._head = 0
        words = first._words
        words[8] = words[16] = first._tail
        words[40] = words[48] = 0
    print(f"{refused} refused, {quiet} quiet, {whole} whole")
    assert refused > 100
    first.close()
    consumer.close()
