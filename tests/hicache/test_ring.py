"""One end in one process: order, room, waiting, ends, and what is refused."""

from __future__ import annotations

import os
import platform
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from random import Random

import pytest

from devipc.channel import Arena
from devipc.errors import (
    CapabilityError,
    ClosedError,
    CompletionTimeout,
    DevIPCError,
    ForkError,
    HandleError,
    PeerGone,
    ProtocolError,
    ResourceExhausted,
    UsageError,
)
from devipc.hicache.wire.ring import RECHECK_S, Consumer, Producer
from devipc.memfd import PAGE_NBYTES, create_memfd
from tests.hicache.resident import resident_nbytes
from tests.hicache.ring_peer import LIMIT_NBYTES, drop_kicks, payload_of

SEED = 20261129
Pair = tuple[Producer, Consumer]
TAIL, HEAD = 8, 16


def push(producer: Producer, count: int) -> None:
    for _ in range(count):
        producer.push(b"", timeout_s=20)


def dup(fds: tuple[int, ...]) -> list[int]:
    return [os.dup(fd) for fd in fds]


@pytest.fixture
def pair() -> Iterator[Pair]:
    producer = Producer(slots=4, slot_nbytes=128, arena_nbytes=4096)
    consumer = Consumer(dup(producer.fds()), limit_nbytes=LIMIT_NBYTES)
    yield producer, consumer
    producer.close()
    consumer.close()


def test_entries_come_in_order_small_and_large(pair: Pair) -> None:
    producer, consumer = pair
    for number in range(1000):
        producer.push(payload_of(number), timeout_s=0)
        assert consumer.take(timeout_s=0) == payload_of(number)
    producer.push(b"", timeout_s=0)
    producer.push(bytes(128 - 24), timeout_s=0)
    assert [consumer.take(timeout_s=0) for _ in range(2)] == [b"", bytes(104)]


def test_a_full_ring_is_busy_and_goes_on(pair: Pair) -> None:
    producer, consumer = pair
    for number in range(1, 5):
        producer.push(payload_of(number), timeout_s=0)
    started = time.monotonic()
    with pytest.raises(ResourceExhausted) as caught:
        producer.push(b"more", timeout_s=0.15)
    assert (caught.value.code, caught.value.retryable) == ("busy", True)
    assert 0.15 <= time.monotonic() - started < 2
    assert consumer.take(timeout_s=0) == payload_of(1)
    producer.push(b"more", timeout_s=0)
    assert [consumer.take(timeout_s=0) for _ in range(4)] == [*map(payload_of, (2, 3, 4)), b"more"]


def test_who_makes_room_kicks_whoever_waits_for_it(pair: Pair) -> None:
    producer, consumer = pair
    lost = drop_kicks(consumer, 1.0, SEED)
    thread = threading.Thread(target=push, args=(producer, 5))
    thread.start()
    while not producer._words[32]:
        time.sleep(0.001)
    consumer.take(timeout_s=0)
    thread.join(RECHECK_S + 5.0)
    assert (thread.is_alive(), lost()) == (False, 1)


def test_a_full_arena_is_busy_and_its_room_comes_back(pair: Pair) -> None:
    producer, consumer = pair
    for _ in range(100):
        producer.push(bytes(2500), timeout_s=0)
        with pytest.raises(ResourceExhausted, match="arena"):
            producer.push(bytes(2500), timeout_s=0)
        assert len(consumer.take(timeout_s=0)) == 2500
    with pytest.raises(UsageError):
        producer.push(bytes(5000), timeout_s=0)
    for _ in range(100):  # a call that breaks off keeps no slot
        with pytest.raises(TypeError):
            producer.push("text", timeout_s=0)  # type: ignore[arg-type]
    producer.push(b"x", timeout_s=0)
    assert consumer.take(timeout_s=0) == b"x"


def test_a_handler_that_raises_loses_no_slot(pair: Pair) -> None:
    producer, consumer = pair
    for number in range(1000):
        producer.push(payload_of(number), timeout_s=0)
        with pytest.raises(ZeroDivisionError):
            consumer.take(timeout_s=0) and 1 / 0
    push(producer, 4)


def test_nothing_came(pair: Pair) -> None:
    started = time.monotonic()
    with pytest.raises(CompletionTimeout):
        pair[1].take(timeout_s=0.12)
    assert 0.12 <= time.monotonic() - started < 2


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_sleeper_is_woken_and_without_kicks_looks_by_itself(pair: Pair, share: float) -> None:
    producer, consumer = pair
    lost = drop_kicks(producer, share, SEED)
    waits: list[float] = []

    def take() -> None:
        for _ in range(20):
            consumer.take(timeout_s=20)
            waits.append(time.monotonic())

    thread = threading.Thread(target=take)
    thread.start()
    for number in range(20):
        time.sleep(0.01)
        pushed = time.monotonic()
        producer.push(b"x", timeout_s=1)
        while len(waits) <= number:
            time.sleep(0.001)
        assert waits[number] - pushed < RECHECK_S + 1.0
    thread.join(20)
    assert len(waits) == 20
    assert bool(lost()) == bool(share)


def test_many_threads_share_an_end(pair: Pair) -> None:
    producer, consumer = pair

    def push(first: int) -> None:
        for number in range(first, 2000, 4):
            producer.push(b"%d" % number, timeout_s=20)

    threads = [threading.Thread(target=push, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    taken = [int(consumer.take(timeout_s=20)) for _ in range(2000)]
    for thread in threads:
        thread.join(20)
    assert sorted(taken) == list(range(2000))
    for first in range(4):
        assert [n for n in taken if n % 4 == first] == list(range(first, 2000, 4))


def test_a_forked_child_has_no_part_in_it(pair: Pair) -> None:
    producer, consumer = pair
    pid = os.fork()
    if not pid:
        refused = 0
        for call in (lambda: producer.push(b"", timeout_s=0), lambda: consumer.take(timeout_s=0)):
            try:
                call()
            except ForkError:
                refused += 1
        producer.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    producer.push(b"mine", timeout_s=0)
    assert consumer.take(timeout_s=0) == b"mine"


# --- ends ---------------------------------------------------------------------------------------------------------


def test_a_closed_producer_leaves_what_it_published(pair: Pair) -> None:
    producer, consumer = pair
    producer.push(payload_of(64), timeout_s=0)
    producer.close()
    producer.close()
    assert consumer.take(timeout_s=0) == payload_of(64)
    with pytest.raises(PeerGone) as caught:
        consumer.take(timeout_s=20)
    assert caught.value.code == "ring_closed"
    with pytest.raises(ClosedError):
        producer.push(b"", timeout_s=0)


def test_a_closed_consumer_takes_nothing_more(pair: Pair) -> None:
    producer, consumer = pair
    consumer.close()
    with pytest.raises(PeerGone):
        producer.push(b"", timeout_s=20)
    with pytest.raises(ClosedError):
        consumer.take(timeout_s=0)


@pytest.mark.parametrize("how", ["end", "close mine", "close theirs"])
@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_who_waits_is_released(pair: Pair, side: str, how: str) -> None:
    producer, consumer = pair
    mine, theirs = (producer, consumer) if side == "producer" else (consumer, producer)
    push(producer, 4)
    if side == "consumer":
        for _ in range(4):
            consumer.take(timeout_s=0)
    caught: list[DevIPCError] = []

    def wait() -> None:
        try:
            producer.push(b"", timeout_s=30) if side == "producer" else consumer.take(timeout_s=30)
        except DevIPCError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.02)
    started = time.monotonic()
    if how == "end":
        mine.end(PeerGone("it died", code="died"))
    else:
        (mine if how == "close mine" else theirs).close()
    thread.join(10)
    assert time.monotonic() - started < 2
    assert type(caught[0]) is (ClosedError if how == "close mine" else PeerGone)
    if how == "end":
        with pytest.raises(PeerGone, match="it died"):
            producer.push(b"", timeout_s=0) if side == "producer" else consumer.take(timeout_s=0)
        mine.close()
        mine.end(PeerGone("again"))


def test_descriptors_that_are_no_ring_are_refused_and_closed() -> None:
    with Arena(4096) as arena:
        producer = Producer(slots=4, slot_nbytes=64, arena_nbytes=64)
        ring, room, bell = producer.fds()
        read_end, write_end = os.pipe()
        empty = create_memfd("not-a-ring", PAGE_NBYTES + 4 * 64)
        before = len(os.listdir("/proc/self/fd"))
        for fds in (
            (ring, room),
            (ring, room, bell, bell),
            (arena.fd, room, bell),
            (empty, room, bell),
            (read_end, room, bell),
            (ring, read_end, bell),
            (ring, room, read_end),
            (ring, room, write_end),
            (ring, room, ring),
        ):
            with pytest.raises(HandleError):
                Consumer(dup(fds), limit_nbytes=64)
            assert len(os.listdir("/proc/self/fd")) == before
        for at, value in ((0, 1), (1, 2), (2, 3), (2, 8), (2, 2**63), (3, 0), (3, 128), (3, 2**64 - 1)):
            words = producer._words
            kept, words[at] = words[at], value
            with pytest.raises(HandleError):
                Consumer(dup(producer.fds()), limit_nbytes=64)
            words[at] = kept
        assert len(os.listdir("/proc/self/fd")) == before
        for fd in (read_end, write_end, empty):
            os.close(fd)
        producer.close()


@pytest.mark.parametrize(
    ("slots", "slot_nbytes", "arena_nbytes"), [(3, 64, 1), (1, 64, 1), (4, 65, 1), (2**17, 64, 1), (4, 64, 0)]
)
def test_shapes(slots: int, slot_nbytes: int, arena_nbytes: int) -> None:
    with pytest.raises(UsageError):
        Producer(slots=slots, slot_nbytes=slot_nbytes, arena_nbytes=arena_nbytes)


def test_other_machines_are_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    fds = dup(pair[0].fds())
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(CapabilityError):
        Producer()
    with pytest.raises(CapabilityError):
        Consumer(fds, limit_nbytes=64)


# --- nonsense -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [2, 3, 2**63, 2**64 - 1])
def test_a_head_that_cannot_be_ends_the_producer(pair: Pair, head: int) -> None:
    producer, _ = pair
    producer.push(b"x", timeout_s=0)
    producer._words[HEAD] = head
    for _ in range(2):
        with pytest.raises(ProtocolError):
            producer.push(b"x", timeout_s=1)


def test_a_head_that_goes_back_ends_the_producer(pair: Pair) -> None:
    producer, consumer = pair
    producer.push(b"x", timeout_s=0)
    consumer.take(timeout_s=0)
    producer.push(b"x", timeout_s=0)
    producer._words[HEAD] = 0
    with pytest.raises(ProtocolError):
        producer.push(b"x", timeout_s=1)


@pytest.mark.parametrize("tail", [0, 1, 7, 2**63, 2**64 - 1])
def test_a_tail_that_cannot_be_ends_the_consumer(pair: Pair, tail: int) -> None:
    producer, consumer = pair
    producer.push(b"x", timeout_s=0)
    producer.push(b"x", timeout_s=0)
    consumer.take(timeout_s=0)
    producer._words[TAIL] = tail
    for _ in range(2):
        with pytest.raises(ProtocolError):
            consumer.take(timeout_s=1)


@pytest.mark.once
def test_100_000_malformed_entries(pair: Pair) -> None:
    """Every bit of an entry counts: one that differs is refused, or was not looked at; nothing else ever happens."""
    producer, consumer = pair
    random, refused, untouched, before = Random(SEED), 0, 0, 0
    for round_ in range(100_000):
        if round_ == 10_000:
            before = resident_nbytes()
        payload = payload_of(random.choice((1, 5, 64, 128, 0)))
        producer.push(payload, timeout_s=0)
        at = PAGE_NBYTES + (producer._tail - 1 & 3) * 128
        if random.random() < 0.3:
            producer._bytes[at : at + 128] = random.randbytes(128)
        else:
            for _ in range(random.choice((1, 1, 2, 8))):
                producer._bytes[at + random.randrange(128 if random.random() < 0.3 else 24)] ^= 1 << random.randrange(8)
        try:
            assert consumer.take(timeout_s=0) == payload
            untouched += 1
        except ProtocolError:
            refused += 1
            assert consumer._words[HEAD] == producer._tail  # the slot is free again
            consumer._ended = None
    print(f"{refused} refused, {untouched} changed behind the payload")
    assert refused > 80_000
    assert resident_nbytes() - before < 4 * 2**20


INLINE = 2**64 - 1


@pytest.mark.parametrize(
    ("sequence", "nbytes", "place", "says"),
    [
        (2, 8, INLINE, "entry 2 where 1 belongs"),
        (0, 8, INLINE, "entry 0 where 1 belongs"),
        (1, 105, INLINE, "105 bytes in a slot of 128"),
        (1, LIMIT_NBYTES + 1, INLINE, "at most"),
        (1, LIMIT_NBYTES + 1, 0, "at most"),
        (1, 2**32 - 1, 0, "at most"),
        (1, 4096, 4096, "range of 4096 bytes at 4096"),
        (1, 4096, 2**64 - 2, "range of 4096 bytes"),
        (1, 0, 0, "range of 0 bytes"),
    ],
)
def test_forged_entries_with_the_right_checksum(pair: Pair, sequence: int, nbytes: int, place: int, says: str) -> None:
    producer, consumer = pair
    rest = struct.pack("<IQQ", nbytes, sequence, place) + bytes(min(nbytes, 104) if place == INLINE else 0)
    slot = struct.pack("<I", zlib.crc32(rest)) + rest
    producer._bytes[PAGE_NBYTES : PAGE_NBYTES + len(slot)] = slot
    producer._words[TAIL] = 1
    for _ in range(2):
        with pytest.raises(ProtocolError, match=says):
            consumer.take(timeout_s=1)


def test_every_bit_of_an_entry_counts(pair: Pair) -> None:
    producer, consumer = pair
    for payload in (b"payload", bytes(500)):
        inline = len(payload) < 100
        for bit in range(8 * (24 + (len(payload) if inline else 0))):
            producer.push(payload, timeout_s=0)
            at = PAGE_NBYTES + (producer._tail - 1 & 3) * 128
            producer._bytes[at + bit // 8] ^= 1 << bit % 8
            with pytest.raises(ProtocolError):
                consumer.take(timeout_s=0)
            consumer._ended = None
    producer.push(bytes(500), timeout_s=0)
    os.pwrite(producer.fds()[1], b"\1", producer._lent[-1][1] + 499)  # changed in the arena
    with pytest.raises(ProtocolError, match="torn or was changed"):
        consumer.take(timeout_s=0)
