"""Extents from elsewhere that cannot be trusted or mapped: refused with a type, and nothing is left."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import fcntl
import os
from collections.abc import Callable

import pytest

from devipc.host import maps
from devipc.host.backend import HostDevice
from devipc.spi import (
    PAGE_NBYTES,
    BoundsError,
    Chunk,
    DevIPCError,
    ExportedExtent,
    HandleError,
    HandleKind,
    ResourceExhausted,
)
from tests.host.conftest import held


def change(extent: ExportedExtent, **fields: object) -> ExportedExtent:
    (chunk,) = extent.chunks
    return dataclasses.replace(extent, chunks=(dataclasses.replace(chunk, **fields),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tamper", "expected"),
    [
        (lambda e: change(e, nbytes=3 * PAGE_NBYTES), BoundsError),
        (lambda e: change(e, offset=2 * PAGE_NBYTES), BoundsError),
        (lambda e: change(e, offset=-1), BoundsError),
        (lambda e: change(e, nbytes=0), BoundsError),
        (lambda e: change(e, nbytes=2**63), BoundsError),
        (lambda e: change(e, allocation_nbytes=PAGE_NBYTES), BoundsError),
        (lambda e: change(e, allocation_nbytes=2**40, nbytes=2**39), BoundsError),
        (lambda e: change(e, payload=b""), HandleError),
        (lambda e: change(e, payload=e.chunks[0].payload + b"\0"), HandleError),
        (lambda e: change(e, payload=b"X" + e.chunks[0].payload[1:]), HandleError),
        (lambda e: change(e, payload=e.chunks[0].payload[:8] + bytes(16)), HandleError),
        (lambda e: change(e, has_fd=False), HandleError),
        (lambda e: dataclasses.replace(e, fds=()), HandleError),
        (lambda e: dataclasses.replace(e, fds=e.fds * 2), HandleError),
        (lambda e: dataclasses.replace(e, fds=(0,)), HandleError),
        (lambda e: dataclasses.replace(e, fds=(10**6,)), HandleError),
        (lambda e: dataclasses.replace(e, chunks=()), HandleError),
        (lambda e: dataclasses.replace(e, kind=HandleKind.OPAQUE), HandleError),
        (lambda e: dataclasses.replace(e, chunks=e.chunks * 2, fds=e.fds * 2), HandleError),
    ],
)
def test_a_tampered_extent_is_refused_before_anything_is_mapped(
    device: HostDevice, tamper: Callable[[ExportedExtent], ExportedExtent], expected: type[DevIPCError]
) -> None:
    made = device.memory.allocate(2 * PAGE_NBYTES)
    extent = device.memory.export(made.ptr, 100)
    before = held()
    with pytest.raises(expected) as caught:
        device.memory.open(tamper(extent))
    assert caught.value.remedy
    assert held() == before
    device.memory.release(extent)
    device.memory.free(made)


SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.mark.parametrize(
    ("seals", "code"),
    [
        (0, "unsealed"),
        (fcntl.F_SEAL_SHRINK, "unsealed"),
        (SIZE, "unsealed"),
        (SIZE | fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE, "mmap"),
    ],
)
def test_a_file_that_is_not_sealed_as_it_must_be_is_refused(device: HostDevice, seals: int, code: str) -> None:
    fd = os.memfd_create("devipc-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE_NBYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    made = device.memory.allocate(PAGE_NBYTES)
    extent = device.memory.export(made.ptr, 100)
    payload = extent.chunks[0].payload[:8] + os.fstat(fd).st_ino.to_bytes(8, "little") + extent.chunks[0].payload[16:]
    forged = ExportedExtent(HandleKind.MEMFD, (Chunk(PAGE_NBYTES, 0, 100, payload, has_fd=True),), (fd,))
    with pytest.raises(HandleError) as caught:
        device.memory.open(forged)
    assert caught.value.code == code
    os.close(fd)
    device.memory.release(extent)
    device.memory.free(made)


def test_a_mapping_that_fails_halfway_leaves_nothing(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    made = device.memory.allocate_grown([PAGE_NBYTES] * 4)
    extent = device.memory.export(made.ptr, made.nbytes)
    before = held()
    real, calls = maps._mmap, []

    def failing(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 4:
            ctypes.set_errno(errno.ENOMEM)
            return maps._MAP_FAILED
        return real(*arguments)

    monkeypatch.setattr(maps, "_mmap", failing)
    with pytest.raises(ResourceExhausted) as caught:
        device.memory.open(extent)
    assert caught.value.code == "mmap"
    assert held() == before
    monkeypatch.undo()
    device.memory.close(device.memory.open(extent))
    device.memory.release(extent)
    device.memory.free(made)
