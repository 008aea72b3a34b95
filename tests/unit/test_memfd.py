"""Sealed shared memory: nothing that can shrink, ends early or is no memory file is ever mapped."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from devipc.errors import ClosedError, HandleError, ResourceExhausted, UsageError
from devipc.memfd import PAGE_NBYTES, REQUIRED_SEALS, SharedMap, create_memfd, round_up, validate_memfd

SEALABLE = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_memfd("test", 2 * PAGE_NBYTES)
    yield fd
    os.close(fd)


def child(code: str) -> str:
    """Run ``code`` in a process of its own, whose exit status must be 0, and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


def test_a_new_file_is_sealed_reserved_zero_and_closed_on_exec(fd: int) -> None:
    assert os.fstat(fd).st_size == 2 * PAGE_NBYTES
    assert os.fstat(fd).st_blocks * 512 == 2 * PAGE_NBYTES
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == REQUIRED_SEALS
    assert not os.get_inheritable(fd)
    assert os.pread(fd, 2 * PAGE_NBYTES, 0) == bytes(2 * PAGE_NBYTES)
    for size in (0, 1, 10 * PAGE_NBYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert validate_memfd(fd, min_nbytes=2 * PAGE_NBYTES) == 2 * PAGE_NBYTES


@pytest.mark.parametrize("nbytes", [0, -1, -(2**63)])
def test_no_bytes_are_a_usage_error(nbytes: int) -> None:
    with pytest.raises(UsageError):
        create_memfd("test", nbytes)


@pytest.mark.parametrize("name", ["x" * 250, "\0", "é" * 125])
def test_a_name_that_the_kernel_refuses_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError):
        create_memfd(name, 1)


@pytest.mark.parametrize("nbytes", [2**50, 2**63 - 1, 2**63, 2**64 + 1])
def test_more_memory_than_there_is_is_refused_and_leaves_no_descriptor(nbytes: int) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ResourceExhausted) as caught:
        create_memfd("test", nbytes)
    assert caught.value.code == "host_memory"
    assert os.listdir("/proc/self/fd") == before


def test_no_descriptor_left_is_said_in_those_words() -> None:
    assert child(
        "import os, resource\n"
        "from devipc.errors import ResourceExhausted\n"
        "from devipc.memfd import create_memfd\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))\n"
        "made = []\n"
        "try:\n"
        "    while True: made.append(create_memfd('test', 1))\n"
        "except ResourceExhausted as error:\n"
        "    assert error.retryable\n"
        "    print(error.code, 'ulimit -n' in error.remedy, len(made) > 5)\n"
        "os.close(made.pop())\n"
        "create_memfd('test', 1)\n"
    ).split() == ["fds", "True", "True"]


def test_no_room_for_another_mapping_is_said_in_those_words() -> None:
    assert child(
        "import resource\n"
        "from devipc.errors import ResourceExhausted\n"
        "from devipc.memfd import SharedMap, create_memfd\n"
        "fd = create_memfd('test', 4096)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))\n"
        "try: SharedMap(fd, 4096)\n"
        "except ResourceExhausted as error: print(error.code, 'ulimit -v' in error.remedy)\n"
    ).split() == ["mmap", "True"]


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL])
def test_a_file_that_lacks_one_seal_is_refused(missing: int) -> None:
    fd = os.memfd_create("test", SEALABLE)
    try:
        os.ftruncate(fd, PAGE_NBYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, REQUIRED_SEALS & ~missing)
        with pytest.raises(HandleError) as caught:
            validate_memfd(fd, min_nbytes=1)
        assert caught.value.code == "unsealed"
    finally:
        os.close(fd)


def test_a_file_of_huge_pages_is_refused() -> None:
    """A peer can punch a hole into it and use the pool up: then a load there would end in SIGBUS."""
    try:
        fd = os.memfd_create("test", SEALABLE | os.MFD_HUGETLB)
    except OSError:
        pytest.skip("this kernel has no huge pages")
    try:
        os.ftruncate(fd, 2**30)  # a whole page of every size; none is taken before it is mapped
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, REQUIRED_SEALS)
        with pytest.raises(HandleError) as caught:
            validate_memfd(fd, min_nbytes=PAGE_NBYTES)
        assert caught.value.code == "huge_pages"
    finally:
        os.close(fd)


def test_a_file_that_is_shorter_than_announced_is_refused(fd: int) -> None:
    with pytest.raises(HandleError) as caught:
        validate_memfd(fd, min_nbytes=2 * PAGE_NBYTES + 1)
    assert caught.value.code == "too_small"


def test_what_is_no_memory_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    read, write = os.pipe()
    fds = [read, write, os.open(tmp_path / "file", os.O_RDWR), os.open(tmp_path, os.O_RDONLY)]
    fds += [os.open("/dev/zero", os.O_RDWR), os.eventfd(0), os.pidfd_open(os.getpid())]
    try:
        for fd in (*fds, -1, 10**6):
            with pytest.raises(HandleError) as caught:
                validate_memfd(fd, min_nbytes=1)
            assert caught.value.code in {"not_a_memfd", "unsealed"}
    finally:
        for fd in fds:
            os.close(fd)


def test_two_maps_see_each_other_and_outlive_the_descriptor() -> None:
    fd = create_memfd("test", 100)
    with pytest.raises(HandleError):
        SharedMap(fd, 101)
    one, two = SharedMap(fd, 100), SharedMap(fd, 100, writable=False)
    os.close(fd)
    one.view[99] = 7
    assert two.view[99] == 7
    assert two.view.readonly
    with pytest.raises(TypeError):
        two.view[0] = 1
    assert one.address % PAGE_NBYTES == 0
    assert len(one.view) == one.nbytes == 100
    for shared in (one, two, one, two):
        shared.close()
        assert shared.closed
        with pytest.raises(ClosedError):
            _ = shared.view


def test_a_part_can_be_mapped(fd: int) -> None:
    os.pwrite(fd, b"second", PAGE_NBYTES)
    shared = SharedMap(fd, 6, offset=PAGE_NBYTES)
    assert bytes(shared.view) == b"second"
    shared.close()


@pytest.mark.parametrize(("nbytes", "offset"), [(0, 0), (-1, 0), (1, 1), (1, -PAGE_NBYTES), (1, PAGE_NBYTES // 2)])
def test_a_range_that_cannot_be_mapped_is_a_usage_error(fd: int, nbytes: int, offset: int) -> None:
    with pytest.raises(UsageError):
        SharedMap(fd, nbytes, offset=offset)


@pytest.mark.parametrize(
    ("nbytes", "offset"),
    [(2 * PAGE_NBYTES + 1, 0), (1, 2 * PAGE_NBYTES), (PAGE_NBYTES + 1, PAGE_NBYTES), (2**64 + 1, 0)],
)
def test_nothing_behind_the_end_is_ever_mapped(fd: int, nbytes: int, offset: int) -> None:
    """The system would allow it; the first touch would be SIGBUS."""
    with pytest.raises(HandleError) as caught:
        SharedMap(fd, nbytes, offset=offset)
    assert caught.value.code == "too_small"


def test_a_file_sealed_against_writing_is_the_exporters_fault() -> None:
    fd = os.memfd_create("test", SEALABLE)
    try:
        os.ftruncate(fd, PAGE_NBYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, REQUIRED_SEALS | fcntl.F_SEAL_WRITE)
        validate_memfd(fd, min_nbytes=PAGE_NBYTES)
        with pytest.raises(HandleError) as caught:
            SharedMap(fd, PAGE_NBYTES)
        assert caught.value.code == "mmap"
        assert not caught.value.retryable
    finally:
        os.close(fd)


def test_a_closed_descriptor_is_a_handle_error() -> None:
    with pytest.raises(HandleError):
        SharedMap(-1, 1)


def test_a_thousand_maps_leave_nothing() -> None:
    def maps() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:test")

    for _ in range(1000):
        fd = create_memfd("test", 1)
        shared = SharedMap(fd, 1)
        os.close(fd)
        shared.close()
    assert maps() == 0


def test_rounding() -> None:
    assert [round_up(n, 4096) for n in (0, 1, 4095, 4096, 4097)] == [0, 4096, 4096, 4096, 8192]
    assert PAGE_NBYTES == mmap.PAGESIZE
