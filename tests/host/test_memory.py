"""Memory of the host backend in one process: sizes, bounds, chunks, what is refused and what is given back."""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from devipc.host.backend import HostBackend, HostDevice
from devipc.host.meminfo import memory_info
from devipc.spi import (
    PAGE_NBYTES,
    CapabilityError,
    ClosedError,
    DevIPCError,
    ExportedExtent,
    HandleKind,
    MemoryKind,
    OpenedExtent,
    ResourceExhausted,
    UsageError,
    close_fds,
)
from tests.host.conftest import Words, held


def test_allocation_is_whole_pages_zeroed_and_described(device: HostDevice) -> None:
    memory = device.memory
    made = memory.allocate(PAGE_NBYTES + 1, zero=True)
    assert made.ptr % PAGE_NBYTES == 0
    assert made.nbytes == 2 * PAGE_NBYTES
    assert ctypes.string_at(made.ptr, made.nbytes) == bytes(made.nbytes)
    for ptr in (made.ptr, made.ptr + 17, made.ptr + made.nbytes - 1):
        info = memory.describe(ptr)
        assert (info.base, info.nbytes, info.kind) == (made.ptr, made.nbytes, MemoryKind.DEVICE)
        assert info.exportable == (HandleKind.MEMFD,)
        assert info.reason == ""
    memory.free(made)


def test_unknown_and_freed_pointers_are_answered(device: HostDevice) -> None:
    memory = device.memory
    made = memory.allocate(1)
    memory.free(made)
    for ptr in (0, 1, made.ptr, 2**64 - 1):
        info = memory.describe(ptr)
        assert info.kind is MemoryKind.UNKNOWN
        assert info.exportable == ()
        assert info.reason


def test_ids_are_never_reused_even_by_a_reopened_device(device: HostDevice) -> None:
    seen: set[int] = set()
    for _ in range(50):
        made = device.memory.allocate(1)
        seen.add(device.memory.describe(made.ptr).allocation_id)
        device.memory.free(made)
    assert len(seen) == 50
    assert 0 not in seen


def test_an_export_shares_bytes_at_any_offset(device: HostDevice) -> None:
    memory = device.memory
    made = memory.allocate(5 * PAGE_NBYTES)
    for offset, nbytes in ((0, made.nbytes), (1, 1), (4095, 2), (PAGE_NBYTES, 100), (made.nbytes - 3, 3), (77, 9000)):
        extent = memory.export(made.ptr + offset, nbytes)
        assert extent.nbytes == nbytes
        (chunk,) = extent.chunks
        assert (chunk.offset, chunk.nbytes, chunk.allocation_nbytes) == (offset, nbytes, made.nbytes)
        opened = memory.open(extent)
        memory.release(extent)
        assert opened.nbytes == nbytes
        ctypes.memset(made.ptr + offset, 0xA5, nbytes)
        assert ctypes.string_at(opened.ptr, nbytes) == b"\xa5" * nbytes
        ctypes.memset(opened.ptr, 0x5A, nbytes)
        assert ctypes.string_at(made.ptr + offset, nbytes) == b"\x5a" * nbytes
        memory.close(opened)
    memory.free(made)


def test_a_grown_range_travels_as_chunks_and_is_mapped_without_a_gap(device: HostDevice) -> None:
    memory = device.memory
    made = memory.allocate_grown([PAGE_NBYTES, 3 * PAGE_NBYTES, 2 * PAGE_NBYTES])
    assert made.nbytes == 6 * PAGE_NBYTES
    pattern = os.urandom(made.nbytes)
    ctypes.memmove(made.ptr, pattern, made.nbytes)
    start, nbytes = 100, made.nbytes - 300
    extent = memory.export(made.ptr + start, nbytes)
    assert [(chunk.offset, chunk.nbytes) for chunk in extent.chunks] == [
        (100, PAGE_NBYTES - 100),
        (0, 3 * PAGE_NBYTES),
        (0, 2 * PAGE_NBYTES - 200),
    ]
    opened = memory.open(extent)
    assert opened.nbytes == nbytes
    assert ctypes.string_at(opened.ptr, nbytes) == pattern[start : start + nbytes]
    middle = memory.export(made.ptr + 2 * PAGE_NBYTES, 5)
    assert [(chunk.offset, chunk.nbytes) for chunk in middle.chunks] == [(PAGE_NBYTES, 5)]
    for one in (extent, middle):
        memory.release(one)
    memory.close(opened)
    memory.free(made)


def permissions(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(border, 16) for border in line.split()[0].split("-"))
        if low <= address < high:
            return line.split()[1]
    return ""


def test_nothing_lies_next_to_shared_memory(device: HostDevice) -> None:
    memory = device.memory
    made = [memory.allocate(PAGE_NBYTES) for _ in range(5)]
    extent = memory.export(made[0].ptr, PAGE_NBYTES)
    for ptr in [one.ptr for one in made] + [memory.open(extent).ptr for _ in range(5)]:
        assert permissions(ptr) == "rw-s"
        assert permissions(ptr - 1) == permissions(ptr + PAGE_NBYTES) == "---p"
    memory.release(extent)


def test_memory_outlives_its_allocation_in_a_mapping(device: HostDevice) -> None:
    memory = device.memory
    made = memory.allocate(PAGE_NBYTES)
    extent = memory.export(made.ptr, 16)
    opened = memory.open(extent)
    ctypes.memset(made.ptr, 7, 16)
    memory.free(made)
    memory.release(extent)
    assert ctypes.string_at(opened.ptr, 16) == b"\x07" * 16
    memory.close(opened)


def test_imported_and_registered_memory_is_not_exported(device: HostDevice, words: Words) -> None:
    memory = device.memory
    made = memory.allocate(PAGE_NBYTES)
    extent = memory.export(made.ptr, 64)
    opened = memory.open(extent)
    for ptr, kind, word in (
        (opened.ptr, MemoryKind.IMPORTED, "another process"),
        (words.at(0), MemoryKind.HOST, "registered"),
    ):
        info = memory.describe(ptr)
        assert (info.kind, info.exportable) == (kind, ())
        assert word in info.reason
        with pytest.raises(CapabilityError, match=word) as caught:
            memory.export(ptr, 8)
        assert caught.value.remedy
    memory.close(opened)
    memory.release(extent)
    memory.free(made)


@pytest.mark.parametrize(
    ("misuse", "expected"),
    [
        (lambda m, a, e, o: m.allocate(0), UsageError),
        (lambda m, a, e, o: m.allocate(-1), UsageError),
        (lambda m, a, e, o: m.allocate("12"), UsageError),
        (lambda m, a, e, o: m.allocate(2**40), ResourceExhausted),
        (lambda m, a, e, o: m.allocate(1, kind=HandleKind.LEGACY), CapabilityError),
        (lambda m, a, e, o: m.allocate_grown([]), UsageError),
        (lambda m, a, e, o: m.free(o), UsageError),
        (lambda m, a, e, o: m.free(None), UsageError),
        (lambda m, a, e, o: m.free(dataclasses.replace(a, token=17)), UsageError),
        (lambda m, a, e, o: m.close(a), UsageError),
        (lambda m, a, e, o: m.close(OpenedExtent(o.ptr, o.nbytes, None)), UsageError),
        (lambda m, a, e, o: m.export(a.ptr, 0), UsageError),
        (lambda m, a, e, o: m.export(a.ptr, -5), UsageError),
        (lambda m, a, e, o: m.export(a.ptr, a.nbytes + 1), UsageError),
        (lambda m, a, e, o: m.export(a.ptr + 1, a.nbytes), UsageError),
        (lambda m, a, e, o: m.export(a.ptr, 2**64 - 1), UsageError),
        (lambda m, a, e, o: m.export(a.ptr, 1, kind=HandleKind.DMABUF), CapabilityError),
        (lambda m, a, e, o: m.export(1, 1), CapabilityError),
        (lambda m, a, e, o: m.describe(-1), UsageError),
        (lambda m, a, e, o: m.describe(None), UsageError),
        (lambda m, a, e, o: m.open(None), UsageError),
        (lambda m, a, e, o: m.release(ExportedExtent(HandleKind.MEMFD, e.chunks, (12345,))), UsageError),
    ],
)
def test_misuse_is_a_typed_error(
    device: HostDevice, misuse: Callable[..., object], expected: type[DevIPCError]
) -> None:
    memory = device.memory
    made = memory.allocate(2 * PAGE_NBYTES)
    extent = memory.export(made.ptr, 100)
    opened = memory.open(extent)
    before = held()
    with pytest.raises(expected) as caught:
        misuse(memory, made, extent, opened)
    assert caught.value.remedy
    assert held() == before
    memory.close(opened)
    memory.release(extent)
    memory.free(made)


def test_giving_back_twice_is_a_closed_error(device: HostDevice) -> None:
    memory = device.memory
    made = memory.allocate(PAGE_NBYTES)
    extent = memory.export(made.ptr, 64)
    opened = memory.open(extent)
    calls: list[Callable[[], None]] = [
        lambda: memory.close(opened),
        lambda: memory.release(extent),
        lambda: memory.free(made),
    ]
    for give_back in calls:
        give_back()
        with pytest.raises(ClosedError):
            give_back()


def test_memory_of_another_device_is_not_given_back_here(device: HostDevice) -> None:
    other = HostBackend().open_device()
    made = other.memory.allocate(PAGE_NBYTES)
    device.memory.free(device.memory.allocate(PAGE_NBYTES))
    mine = device.memory.allocate(PAGE_NBYTES)
    extent = other.memory.export(made.ptr, 8)
    opened = other.memory.open(extent)
    calls: list[Callable[[], None]] = [lambda: device.memory.free(made), lambda: device.memory.close(opened)]
    for call in calls:
        with pytest.raises(UsageError):
            call()
    assert device.memory.describe(mine.ptr).base == mine.ptr
    assert other.memory.describe(made.ptr).base == made.ptr
    other.memory.release(extent)
    other.memory.close(opened)
    other.memory.free(made)
    other.close()


def test_release_spares_a_number_that_another_file_has_by_now(device: HostDevice) -> None:
    memory = device.memory
    made = memory.allocate(PAGE_NBYTES)
    extent = memory.export(made.ptr, 64)
    close_fds(extent.fds)
    other = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    fcntl.fcntl(other, fcntl.F_DUPFD_CLOEXEC, extent.fds[0])
    assert os.readlink(f"/proc/self/fd/{extent.fds[0]}") == "/dev/null"
    memory.release(extent)
    assert os.readlink(f"/proc/self/fd/{extent.fds[0]}") == "/dev/null"
    for fd in {other, extent.fds[0]}:
        os.close(fd)
    memory.free(made)


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_limits_the_device(tmp_path: Path, version: int) -> None:
    mib = 1 << 20
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text(f"MemTotal: {8 << 20} kB\nMemAvailable: {6 << 20} kB\n")
    limit, usage, inactive, line, root = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "4:cpu,memory:/a/b", "memory")
        if version == 1
        else ("memory.max", "memory.current", "inactive_file", "0::/a/b", "")
    )
    (tmp_path / "self" / "cgroup").write_text(f"9:pids:/x\n{line}\n")
    inner = tmp_path / root / "a" / "b"
    inner.mkdir(parents=True)
    (inner / limit).write_text("max" if version == 2 else str(2**63 - 4096))
    (inner / usage).write_text(str(100 * mib))
    assert memory_info(proc=tmp_path, cgroups=tmp_path).total_nbytes == 8 << 30
    outer = inner.parent
    (outer / limit).write_text(str(512 * mib))
    (outer / usage).write_text(str(300 * mib))
    (outer / "memory.stat").write_text(f"other 5\n{inactive} {50 * mib}\n")
    found = memory_info(proc=tmp_path, cgroups=tmp_path)
    assert found.total_nbytes == 512 * mib
    assert found.free_nbytes == 262 * mib
