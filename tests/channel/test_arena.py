"""Arrays beside the messages: room is lent and taken back, and no offset reaches beyond the file."""

from __future__ import annotations

import os
import random

import pytest

from devipc.channel import Channel
from devipc.channel.arena import Arena, ArenaReader
from devipc.errors import BoundsError, ClosedError, HandleError, ResourceExhausted, UsageError
from devipc.memfd import create_memfd
from tests.channel.processes import holdings


def test_arrays_travel_through_a_channel(pair: tuple[Channel, Channel]) -> None:
    held = holdings()
    data = os.urandom(300_000)
    with Arena(2**20) as arena:
        pair[0].send(70, fds=[arena.fd], timeout_s=1)
        (fd,) = pair[1].receive(1).take_fds()
        with ArenaReader(fd) as reader:
            assert reader.nbytes == arena.nbytes == 2**20
            with arena.lend(data) as (offset, nbytes):
                copy = reader.snapshot(offset, nbytes, limit_nbytes=2**20)
            arena.write(bytes(300_000))  # over what was read
            assert copy == data
    assert holdings() == held


def test_random_traffic_never_overlaps() -> None:
    source = random.Random(5)
    kept: dict[int, bytes] = {}
    with Arena(64 * 1024) as arena, ArenaReader(os.dup(arena.fd)) as reader:
        full = 0
        for _ in range(5000):
            data = source.randbytes(source.randint(1, 9000))
            try:
                offset, nbytes = arena.write(data)
                assert offset % 64 == 0
                kept[offset] = data
                assert nbytes == len(data)
            except ResourceExhausted:
                full += 1
                for offset in source.sample(list(kept), min(3, len(kept))):
                    assert reader.snapshot(offset, len(kept[offset]), limit_nbytes=9000) == kept.pop(offset)
                    arena.release(offset)
        for offset, data in kept.items():
            assert reader.snapshot(offset, len(data), limit_nbytes=9000) == data
            arena.release(offset)
        assert full > 100
        offset, nbytes = arena.write(bytes(64 * 1024))  # all of it is free again
        assert (offset, nbytes) == (0, 64 * 1024)


def test_a_full_arena_says_so_and_recovers() -> None:
    with Arena(4096) as arena:
        offset, _ = arena.write(bytes(4000))
        with pytest.raises(ResourceExhausted) as caught:
            arena.write(bytes(200))
        assert caught.value.retryable
        arena.release(offset)
        arena.write(bytes(200))


def test_an_error_inside_a_loan_keeps_the_room_taken() -> None:
    with Arena(4096) as arena:
        with pytest.raises(ValueError, match="late"), arena.lend(bytes(4096)):
            raise ValueError("late")
        with pytest.raises(ResourceExhausted):
            arena.write(b"x")


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, 0), (-1, 1), (0, -1), (4096, 1), (4095, 2), (2**63, 1), (2**64 - 1, 2), (0, 4097), (0, 2**64 - 1), (0, 2049)],
)
def test_hostile_ranges_are_refused(offset: int, nbytes: int) -> None:
    with ArenaReader(create_memfd("arena", 4096)) as reader, pytest.raises(BoundsError):
        reader.snapshot(offset, nbytes, limit_nbytes=2048 if nbytes == 2049 else 2**64)


def test_files_whose_size_can_change_are_refused() -> None:
    held = holdings()
    unsealed = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    for fd in (unsealed, os.memfd_create("plain"), os.open("/dev/zero", os.O_RDWR)):
        with pytest.raises(HandleError):
            ArenaReader(fd)
    assert holdings() == held


def test_a_peer_cannot_shrink_what_we_read() -> None:
    fd = create_memfd("arena", 8192)
    with ArenaReader(os.dup(fd)) as reader:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        assert reader.snapshot(0, 8192, limit_nbytes=8192) == bytes(8192)
    os.close(fd)


def test_misuse_is_refused() -> None:
    arena = Arena(4096)
    for data in (b"", bytes(4097)):
        with pytest.raises(UsageError):
            arena.write(data)
    with pytest.raises(UsageError):
        arena.release(0)
    arena.close()
    arena.close()
    with pytest.raises(ClosedError):
        arena.write(b"x")
    with pytest.raises(ClosedError):
        _ = arena.fd
    reader = ArenaReader(create_memfd("arena", 4096))
    reader.close()
    with pytest.raises(ClosedError):
        reader.snapshot(0, 1, limit_nbytes=1)
