"""Slots: each word has one writer, foreign memory and foreign values are checked, and closing ends every use."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from devipc.errors import BoundsError, ClosedError, HandleError, ProtocolError, UsageError
from devipc.hicache.wire.slots import MAX_SLOTS, Readiness, Slots
from devipc.memfd import PAGE_NBYTES, create_memfd
from devipc.types import PoisonReason

ROUNDS = 20_000


def pair(count: int = 100) -> tuple[Slots, Slots]:
    mine = Slots.create(count)
    return mine, Slots.open(os.dup(mine.fileno()))


def test_what_one_side_says_the_other_reads() -> None:
    client, other = pair()
    try:
        client.begin(7, 2**63 - 1)
        assert other.op(7) == 2**63 - 1
        assert other.op(6) == other.op(8) == 0
        assert not other.cancelled(7)
        client.cancel(7)
        assert other.cancelled(7)
        assert other.readiness(7) is Readiness.NOT_YET
        client.say_ready(7, Readiness.REACHED)
        assert other.readiness(7) is Readiness.REACHED
        other.submit(7, 41)
        assert client.base(7) == 41
        assert not client.ended(7)
        other.settle(7)
        assert client.ended(7)
        assert client.poisoned(7) is None
        client.begin(7, 5)
        assert (other.op(7), other.cancelled(7), other.readiness(7)) == (5, False, Readiness.NOT_YET)
        assert (client.base(7), client.ended(7)) == (0, False)
        for reason in PoisonReason:
            other.poison(7, reason)
            assert client.poisoned(7) is reason
    finally:
        client.close()
        other.close()


def test_foreign_values_mean_the_worst() -> None:
    client, other = pair()
    words = client._words
    at = PAGE_NBYTES // 8 + 3 * 8
    words[at + 2] = 3
    assert other.readiness(3) is Readiness.NEVER
    words[at + 3] = 2**62
    with pytest.raises(ProtocolError):
        other.base(3)
    words[at + 4] = 2**64 - 1
    assert other.poisoned(3) is PoisonReason.PROTOCOL
    for slot in (-1, 100, 2**64):
        with pytest.raises(BoundsError):
            other.op(slot)
    del words
    client.close()
    other.close()


def test_foreign_memory_is_refused() -> None:
    before = len(os.listdir("/proc/self/fd"))
    plain = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(plain, 2 * PAGE_NBYTES)
    for fd in (plain, create_memfd("test", 2 * PAGE_NBYTES), os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)):
        with pytest.raises(HandleError):
            Slots.open(fd)
    mine = Slots.create(10)
    for word, value in ((0, 1), (1, 2), (2, 0), (2, 100_000_000), (2, 1000)):
        kept = mine._words[word]
        mine._words[word] = value
        with pytest.raises(HandleError):
            Slots.open(os.dup(mine.fileno()))
        mine._words[word] = kept
    mine.close()
    for count in (0, -1, MAX_SLOTS + 1):
        with pytest.raises(UsageError):
            Slots.create(count)
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_under_a_user_ends_its_use() -> None:
    client, other = pair()
    failures: list[BaseException] = []

    def use() -> None:
        try:
            while True:
                other.submit(1, other.op(1) + 1)
        except ClosedError:
            pass
        except BaseException as error:
            failures.append(error)

    users = [threading.Thread(target=use) for _ in range(3)]
    for user in users:
        user.start()
    time.sleep(0.05)
    other.close()
    other.close()
    for user in users:
        user.join(5)
        assert not user.is_alive()
    assert not failures
    client.close()
    with pytest.raises(ClosedError):
        client.fileno()


PEER = f"""
import sys, time
from devipc.hicache.wire.slots import Readiness, Slots
slots = Slots.open(int(sys.argv[1]))
deadline = time.monotonic() + 30
for number in range(1, {ROUNDS} + 1):
    slot = number % slots.count
    while slots.readiness(slot) is not Readiness.REACHED or slots.op(slot) != number * 0x1_0000_0001:
        assert time.monotonic() < deadline
    slots.submit(slot, number * 3)
    while not slots.cancelled(slot):
        assert time.monotonic() < deadline
    slots.settle(slot)
"""


def test_two_processes_hand_a_slot_over_again_and_again() -> None:
    """Every store of one is seen by the other, whole and in order: the base before the end, the op before the ready."""
    mine = Slots.create(3)
    fd = os.dup(mine.fileno())
    os.set_inheritable(fd, True)
    peer = subprocess.Popen([sys.executable, "-c", PEER, str(fd)], pass_fds=[fd])
    os.close(fd)
    deadline = time.monotonic() + 30
    try:
        for number in range(1, ROUNDS + 1):
            slot = number % mine.count
            mine.begin(slot, number * 0x1_0000_0001)
            mine.say_ready(slot, Readiness.REACHED)
            while not mine.base(slot):
                assert time.monotonic() < deadline
            assert mine.base(slot) == number * 3
            assert not mine.ended(slot)
            mine.cancel(slot)
            while not mine.ended(slot):
                assert time.monotonic() < deadline
            assert mine.base(slot) == number * 3
        assert peer.wait(10) == 0
    finally:
        peer.kill()
        peer.wait()
        mine.close()
