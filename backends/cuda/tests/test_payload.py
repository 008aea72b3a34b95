"""Received bytes are checked before any driver call."""

from __future__ import annotations

import pytest
from devipc_cuda.payload import LEGACY_NBYTES, POOL_NBYTES, VMM_NBYTES, check_extent, pack, unpack

from devipc.spi import Chunk, ExportedExtent, HandleError, HandleKind

NBYTES = {HandleKind.LEGACY: LEGACY_NBYTES, HandleKind.VMM_FD: VMM_NBYTES, HandleKind.POOL: POOL_NBYTES}


def chunk(kind: HandleKind, **changes: object) -> Chunk:
    values: dict[str, object] = {
        "allocation_nbytes": 4096,
        "offset": 0,
        "nbytes": 4096,
        "payload": pack(bytes(NBYTES[kind] - 1)),
        "has_fd": kind is not HandleKind.LEGACY,
    }
    return Chunk(**(values | changes))  # type: ignore[arg-type]


def extent(kind: HandleKind, *chunks: Chunk, fds: int | None = None) -> ExportedExtent:
    count = sum(c.has_fd for c in chunks) if fds is None else fds
    return ExportedExtent(kind, chunks, tuple(range(100, 100 + count)))


@pytest.mark.parametrize("kind", list(NBYTES))
def test_what_is_made_here_is_accepted(kind: HandleKind) -> None:
    made = chunk(kind)
    check_extent(extent(kind, made))
    assert unpack(made) == bytes(NBYTES[kind] - 1)


@pytest.mark.parametrize("kind", list(NBYTES))
@pytest.mark.parametrize("size", [-1, 1])
def test_a_payload_of_another_size_is_refused(kind: HandleKind, size: int) -> None:
    with pytest.raises(HandleError, match="payload of"):
        check_extent(extent(kind, chunk(kind, payload=bytes([1]) * (NBYTES[kind] + size))))


@pytest.mark.parametrize("kind", list(NBYTES))
def test_another_version_is_refused(kind: HandleKind) -> None:
    with pytest.raises(HandleError, match="version 2"):
        check_extent(extent(kind, chunk(kind, payload=b"\x02" + bytes(NBYTES[kind] - 1))))


@pytest.mark.parametrize("kind", [HandleKind.MEMFD, HandleKind.FABRIC, HandleKind.DMABUF, HandleKind.OPAQUE])
def test_other_kinds_are_refused(kind: HandleKind) -> None:
    with pytest.raises(HandleError, match="not one of this backend"):
        check_extent(ExportedExtent(kind, (Chunk(1, 0, 1),)))


@pytest.mark.parametrize("kind", list(NBYTES))
def test_descriptors_must_fit(kind: HandleKind) -> None:
    wrong = chunk(kind, has_fd=kind is HandleKind.LEGACY)
    with pytest.raises(HandleError, match="descriptor"):
        check_extent(extent(kind, wrong))
    with pytest.raises(HandleError, match="descriptors"):
        check_extent(extent(kind, chunk(kind), fds=2))


def test_only_grown_ranges_have_several_chunks() -> None:
    for kind in (HandleKind.LEGACY, HandleKind.POOL):
        with pytest.raises(HandleError, match="2 chunks"):
            check_extent(extent(kind, chunk(kind), chunk(kind)))
    with pytest.raises(HandleError, match="0 chunks"):
        check_extent(ExportedExtent(HandleKind.VMM_FD, ()))


@pytest.mark.parametrize(
    ("parts", "accepted"),
    [
        ([(4096, 96, 4000), (4096, 0, 4096), (4096, 0, 10)], True),
        ([(4096, 0, 4000), (4096, 0, 4096)], False),
        ([(4096, 0, 4096), (4096, 8, 4088)], False),
        ([(4096, 0, 4096), (4096, 0, 4000), (4096, 0, 4096)], False),
        ([(4096, -8, 4104)], False),
        ([(4096, 0, 0)], False),
        ([(0, 0, 1)], False),
    ],
)
def test_chunks_must_lie_side_by_side(parts: list[tuple[int, int, int]], *, accepted: bool) -> None:
    kind = HandleKind.VMM_FD
    made = extent(kind, *(chunk(kind, allocation_nbytes=a, offset=o, nbytes=n) for a, o, n in parts))
    if accepted:
        check_extent(made)
    else:
        with pytest.raises(HandleError):
            check_extent(made)
