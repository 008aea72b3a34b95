"""Numbers of the descriptors that imports are given: closed once, by whom they belong to, whatever a driver does."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from devipc.descriptors import Descriptor, explain_missing_fd
from devipc.errors import DriverError, HandleError, ResourceExhausted
from devipc.memfd import create_memfd
from devipc.undoing import note_left


@pytest.fixture
def file() -> Iterator[int]:
    fd = create_memfd("block", 4096)
    yield fd
    os.close(fd)


def test_a_number_that_a_runtime_closed_is_nobody_elses(file: int) -> None:
    first = Descriptor(file, backend="any")
    os.close(first.number)  # as a driver does that takes what it is given
    second = Descriptor(file, backend="any")  # of the same file, on another thread
    received = os.dup(file)
    assert len({first.number, second.number, received}) == 3
    first.close()
    assert os.fstat(second.number).st_ino == os.fstat(received).st_ino == os.fstat(file).st_ino
    second.close()
    second.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(second.number)
    os.close(received)


def test_what_is_given_up_stays_open_and_its_number_is_not_used_again(file: int) -> None:
    blocked = Descriptor(file, backend="any")
    blocked.close(after=DriverError("does not return", code="driver_blocked", backend="any"))
    assert os.fstat(blocked.number).st_ino == os.fstat(file).st_ino
    os.close(blocked.number)  # the call that was given up, at last
    later = Descriptor(file, backend="any")
    assert later.number != blocked.number
    later.close()


def test_a_descriptor_that_is_closed_already_is_refused_by_type() -> None:
    fd = create_memfd("gone", 4096)
    os.close(fd)
    for number in (fd, -1, 2**40):
        with pytest.raises(HandleError) as refused:
            Descriptor(number, backend="any")
        assert (refused.value.code, refused.value.backend) == ("no_descriptor", "any")
        assert refused.value.remedy


def test_a_number_to_avoid_is_not_taken_and_left_free(file: int) -> None:
    first = Descriptor(file, backend="any")
    first.close()
    other = Descriptor(file, backend="any", avoid={first.number, first.number + 1})
    assert other.number not in (first.number, first.number + 1)
    for number in (first.number, first.number + 1):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
    other.close()


def test_the_lower_numbers_are_taken_when_the_upper_are_in_use(file: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[Descriptor] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        with pytest.raises(ResourceExhausted):
            held.extend(Descriptor(file, backend="any") for _ in range(129))
        numbers = [one.number for one in held]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in held:
            one.close()
    assert numbers[0] >= 64
    assert min(numbers) < 64


def test_what_is_left_is_said_of_a_full_table_too() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    error, kept = DriverError("out of memory"), DriverError("does not unmap")
    note_left(error, kept)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        full, free = explain_missing_fd(error, backend="any"), explain_missing_fd(DriverError("none"), backend="any")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert isinstance(full, ResourceExhausted)
    assert (full.left, full.retryable) == ((kept,), False)
    assert (free.left, free.retryable) == ((), True)
