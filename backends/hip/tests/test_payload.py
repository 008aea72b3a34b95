"""What a backend reads of an extent from another process before its driver sees it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from devipc_hip import payload

from devipc.spi import Chunk, ExportedExtent, HandleError, HandleKind

SIZES = {HandleKind.LEGACY: 145, HandleKind.VMM_FD: 1, HandleKind.POOL: 97, HandleKind.DMABUF: 65}


def extent(kind: HandleKind, *, chunks: int = 1) -> ExportedExtent:
    has_fd = kind is not HandleKind.LEGACY
    one = Chunk(4096, 0, 4096, bytes([1]) + bytes(SIZES[kind] - 1), has_fd=has_fd)
    return ExportedExtent(kind, (one,) * chunks, tuple(range(100, 100 + chunks)) if has_fd else ())


@pytest.mark.parametrize("kind", SIZES)
def test_what_this_package_makes_is_read(kind: HandleKind) -> None:
    payload.check_extent(extent(kind))
    assert len(payload.unpack(extent(kind).chunks[0])) == SIZES[kind] - 1


@pytest.mark.parametrize("kind", SIZES)
def test_anything_else_is_refused(kind: HandleKind) -> None:
    good = extent(kind)
    chunk = good.chunks[0]
    wrong = [
        replace(good, kind=HandleKind.FABRIC),
        replace(good, chunks=()),
        replace(good, fds=(*good.fds, 7)),
        replace(good, chunks=(replace(chunk, payload=chunk.payload + b"\0"),)),
        replace(good, chunks=(replace(chunk, payload=b""),)),
        replace(good, chunks=(replace(chunk, payload=b"\2" + chunk.payload[1:]),)),
        replace(good, chunks=(replace(chunk, has_fd=not chunk.has_fd),)),
        replace(good, chunks=(replace(chunk, offset=-1),)),
        replace(good, chunks=(replace(chunk, nbytes=0),)),
        replace(good, chunks=(replace(chunk, allocation_nbytes=0),)),
    ]
    if kind is not HandleKind.VMM_FD:
        wrong.append(extent(kind, chunks=2))
    for each in wrong:
        with pytest.raises(HandleError) as caught:
            payload.check_extent(each)
        assert caught.value.code == "malformed"
        assert "devipc-hip" in caught.value.remedy
