"""Numbers of the descriptors that imports are given: closed once, by whom they belong to, whatever a runtime does."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from devipc_hip.opening import Descriptor

from devipc.spi import DriverError, ResourceExhausted, create_memfd

from .peers import environment
from .test_conformance import passed, run_suite


@pytest.fixture
def file() -> Iterator[int]:
    fd = create_memfd("block", 4096)
    yield fd
    os.close(fd)


def test_a_number_that_a_runtime_closed_is_nobody_elses(file: int) -> None:
    first = Descriptor(file)
    os.close(first.number)  # as a runtime does that takes what it is given
    second = Descriptor(file)  # of the same file, on another thread
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
    blocked = Descriptor(file)
    blocked.close(after=DriverError("does not return", code="driver_blocked", backend="hip"))
    assert os.fstat(blocked.number).st_ino == os.fstat(file).st_ino
    os.close(blocked.number)  # the call that was given up, at last
    later = Descriptor(file)
    assert later.number != blocked.number
    later.close()


def test_a_descriptor_that_is_closed_already_is_refused_by_type() -> None:
    fd = create_memfd("gone", 4096)
    os.close(fd)
    with pytest.raises(DriverError, match="Bad file descriptor") as refused:
        Descriptor(fd)
    assert refused.value.code == "descriptor"
    assert refused.value.remedy


def test_the_lower_numbers_are_taken_when_the_upper_are_in_use(file: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[Descriptor] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        with pytest.raises(ResourceExhausted):
            held.extend(Descriptor(file) for _ in range(129))
        numbers = [one.number for one in held]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in held:
            one.close()
    assert numbers[0] >= 64
    assert min(numbers) < 64


@pytest.mark.long
@pytest.mark.simulator
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", [1, 2])
def test_threads_open_at_once_whatever_becomes_of_the_descriptors(mode: int, tmp_path: Path) -> None:
    """Of one extent, so that a number that was closed comes back as the same file."""
    report = run_suite(tmp_path, environment({"fd_mode": mode}), "--devipc-backend", "hip", "--devipc-only", "MEM-107")
    assert passed(report, "MEM-107") >= {"vmm_fd", "pool"}
