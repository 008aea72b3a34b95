"""Entries of a ring that are longer than what is copied of a slot at once, and lie in it all the same."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from devipc.errors import ProtocolError
from devipc.hicache.wire.ring import Consumer, Producer
from devipc.memfd import PAGE_NBYTES

SLOT = 2048
HEAD = 24


@pytest.fixture
def pair() -> Iterator[tuple[Producer, Consumer]]:
    producer = Producer(slots=2, slot_nbytes=SLOT, arena_nbytes=4096)
    consumer = Consumer([os.dup(fd) for fd in producer.fds()], limit_nbytes=4096)
    yield producer, consumer
    producer.close()
    consumer.close()


def test_entries_of_every_length_that_a_slot_holds(pair: tuple[Producer, Consumer]) -> None:
    producer, consumer = pair
    for nbytes in (0, 231, 232, 233, 1000, SLOT - HEAD, SLOT - HEAD + 1):
        payload = os.urandom(nbytes)
        producer.push(payload, timeout_s=0)
        assert len(producer._lent) == (nbytes > SLOT - HEAD)
        assert consumer.take(timeout_s=0) == payload


def test_every_byte_of_a_long_entry_counts(pair: tuple[Producer, Consumer]) -> None:
    producer, consumer = pair
    for at in range(HEAD + 900):
        producer.push(bytes(900), timeout_s=0)
        producer._bytes[PAGE_NBYTES + (producer._tail - 1 & 1) * SLOT + at] ^= 1 << at % 8
        with pytest.raises(ProtocolError):
            consumer.take(timeout_s=0)
        consumer._ended = None
    producer.push(b"whole" * 180, timeout_s=0)
    assert consumer.take(timeout_s=0) == b"whole" * 180
