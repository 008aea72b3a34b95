"""The other process of the ring tests: checks, echoes, dies at a chosen store, or writes nonsense.

Run with a role, three descriptors each ring, and numbers. Shares what an entry holds with the tests.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from devipc.errors import PeerGone
from devipc.hicache.wire.ring import Consumer, Producer
from devipc.memfd import SharedMap, validate_memfd

LIMIT_NBYTES = 4096
SLOTS = 16


def payload_of(number: int) -> bytes:
    """What entry ``number`` holds: most fit a slot, one in 64 goes through the arena."""
    size = 600 + number % 1000 if number % 64 == 0 else number * 7 % 200
    return number.to_bytes(8, "little") + bytes([number & 0xFF]) * size


def drop_kicks(end: Any, share: float, seed: int) -> Callable[[], int]:
    """Lose ``share`` of the kicks of ``end``; return how many were lost so far."""
    random, ring, lost = Random(seed), end._ring, 0

    def lossy() -> None:
        nonlocal lost
        if random.random() < share:
            lost += 1
        else:
            ring()

    end._ring = lossy
    return lambda: lost


class Mortal:
    """Memory whose owner kills itself before a chosen store; counts over both views of one ring."""

    def __init__(self, memory: memoryview, left: list[int], *, tear: bool = False) -> None:
        self.memory, self.left, self.tear = memory, left, tear

    def __getitem__(self, at: Any) -> Any:
        return self.memory[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self.step()
        if self.tear and isinstance(at, slice):  # half of a slot is there
            middle = len(value) // 2
            self.memory[at.start : at.start + middle] = value[:middle]
            self.step()
        self.memory[at] = value

    def release(self) -> None:
        self.memory.release()

    def step(self) -> None:
        self.left[0] -= 1
        if not self.left[0]:
            os.kill(os.getpid(), signal.SIGKILL)


def mortal(end: Any, at: int) -> list[int]:
    left = [at]
    end._words, end._bytes = Mortal(end._words, left), Mortal(end._bytes, left, tear=True)
    return left


def check(fds: Sequence[int], count: int, share: float) -> None:
    """Take ``count`` entries of the parent, and check each."""
    consumer = Consumer(fds, limit_nbytes=LIMIT_NBYTES, spin_s=0)  # so that kicks are needed
    lost = drop_kicks(consumer, share, 2)
    for number in range(count):
        assert consumer.take(timeout_s=20) == payload_of(number)
    print("checked", count, lost(), flush=True)
    consumer.close()


def echo(there: Sequence[int], share: float) -> None:
    """Send back what comes, over a ring that this process makes, until the parent closes."""
    back = Producer(slots=SLOTS, arena_nbytes=64 * 1024)
    drop_kicks(back, share, 3)
    consumer = Consumer(there, limit_nbytes=LIMIT_NBYTES, spin_s=0)
    print(*back.fds(), flush=True)
    try:
        while True:
            back.push(consumer.take(timeout_s=20), timeout_s=20)
    except PeerGone:
        pass
    back.close()
    consumer.close()


def die_consuming(fds: Sequence[int], at: int) -> None:
    consumer = Consumer(fds, limit_nbytes=LIMIT_NBYTES)
    mortal(consumer, at)
    print("ready", flush=True)
    for _ in range(6):
        consumer.take(timeout_s=20)
    consumer.close()


def die_producing(at: int) -> None:
    """Make a ring for the parent, which takes its descriptors from here; then die while entries are put."""
    producer = Producer(slots=2, slot_nbytes=256, arena_nbytes=4096)
    print(*producer.fds(), flush=True)
    sys.stdin.readline()
    mortal(producer, at)
    for number in (1, 64, 2, 3, 128, 4):
        producer.push(payload_of(number), timeout_s=20)
    producer.close()


def storm(fd: int, seed: int) -> None:
    """Write nonsense everywhere, for as long as there is a parent."""
    nbytes = validate_memfd(fd, min_nbytes=1)
    memory = SharedMap(fd, nbytes)
    words, random = memory.view.cast("Q"), Random(seed)
    print("ready", flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        for _ in range(1000):
            at = random.choice((8, 16, 24, 32, 40, 48, random.randrange(512, len(words)), random.randrange(512, 530)))
            words[at] = random.choice((0, 1, 2, 3, 2**64 - 1, 2**63, random.getrandbits(64), random.getrandbits(6)))


def main(role: str, *numbers: str) -> None:
    if role == "check":
        check([int(n) for n in numbers[:3]], int(numbers[3]), float(numbers[4]))
    elif role == "echo":
        echo([int(n) for n in numbers[:3]], float(numbers[3]))
    elif role == "die_consuming":
        die_consuming([int(n) for n in numbers[:3]], int(numbers[3]))
    elif role == "die_producing":
        die_producing(int(numbers[0]))
    elif role == "storm":
        storm(int(numbers[0]), int(numbers[1]))


if __name__ == "__main__":
    main(*sys.argv[1:])
