"""Handles that cannot be trusted, and offsets inside allocations."""
# ruff: noqa: D103 - the demand of a case is its documentation

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from devipc.conformance.catalogue import case
from devipc.conformance.peers import Peer, Refusal
from devipc.conformance.rig import Rig
from devipc.conformance.roles_memory import expect_part, open_extent, open_many, open_untouched, open_without_fds
from devipc.conformance.sharing import allocated, exported, mapped, send, shared
from devipc.conformance.suite import Suite
from devipc.errors import UsageError
from devipc.types import Chunk, ExportedExtent, HandleKind

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def change(extent: ExportedExtent, index: int = 0, **changes: object) -> ExportedExtent:
    """Return the extent with one chunk changed."""
    chunks: list[Chunk] = list(extent.chunks)
    chunks[index] = dataclasses.replace(chunks[index], **changes)  # type: ignore[arg-type]
    return ExportedExtent(extent.kind, tuple(chunks), extent.fds)


def refused(peer: Peer, extent: ExportedExtent, *types: str) -> Refusal:
    """Let the peer open what must be refused by one of these types."""
    refusal = peer.refusal(open_extent, **send(extent))
    assert any(name in refusal.types for name in types), f"refused as {refusal.types[0]}: {refusal.message}"
    return refusal


@case(
    "MEM-020",
    "A payload of the wrong size is refused as a bad handle, before any driver call.",
    clause="interfaces/memory.py: open",
)
def test_wrong_size(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with allocated(rig, MIB, kind) as allocation, exported(rig, allocation.ptr, MIB) as extent:
        payload = extent.chunks[0].payload
        for wrong in (b"", payload[:-1], payload + b"\0", bytes(512)):
            if wrong != payload:
                refusal = peer.refusal(open_untouched, **send(change(extent, payload=wrong)))
                assert "HandleError" in refusal.types, refusal


@case(
    "MEM-021",
    "Random payload bytes of the right size are refused by type; nothing crashes and nothing opens.",
    clause="interfaces/memory.py: open",
)
def test_random_bytes(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with shared(rig, peer, MIB, kind, seed=21) as (allocation, mapping), exported(rig, allocation.ptr, MIB) as extent:
        size = len(extent.chunks[0].payload)
        if size == 0:
            pytest.skip(f"a handle of kind {kind.value} has no payload")
        for seed in range(16):
            wrong = change(extent, payload=random.Random(seed).randbytes(size))
            refused(peer, wrong, "HandleError", "DriverError")
        mapping.expect(MIB, 21)


@case(
    "MEM-022",
    "A handle of a kind that the backend does not know is refused by type.",
    clause="interfaces/memory.py: open",
)
def test_foreign_kind(rig: Rig, peer: Peer, kind: HandleKind, suite: Suite) -> None:
    foreign = [other for other in HandleKind if other not in suite.kinds()]
    with allocated(rig, MIB, kind) as allocation, exported(rig, allocation.ptr, MIB) as extent:
        for other in foreign:
            wrong = ExportedExtent(other, extent.chunks, extent.fds)
            refused(peer, wrong, "HandleError", "CapabilityError")


@case(
    "MEM-206",
    "An extent whose descriptors are missing, doubled or of another sort is refused as a bad handle.",
    clause="types.py: ExportedExtent.fds",
)
def test_wrong_descriptors(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with allocated(rig, MIB, kind) as allocation, exported(rig, allocation.ptr, MIB) as extent:
        if not extent.fds:
            pytest.skip(f"a handle of kind {kind.value} has no descriptors")
        with open("/dev/null", "rb") as null:
            for fds in ((), extent.fds * 2):
                refused(peer, ExportedExtent(kind, extent.chunks, fds), "HandleError")
            refused(peer, ExportedExtent(kind, extent.chunks, (null.fileno(),)), "HandleError", "DriverError")


@case(
    "OFF-038",
    "A range at any offset of its allocation opens at that offset: 1 byte, a page, 2 MiB.",
    clause="types.py: Chunk.offset",
)
@pytest.mark.parametrize("offset", [1, 4 * KIB, 2 * MIB, 2 * MIB + 1])
def test_offsets(rig: Rig, peer: Peer, kind: HandleKind, offset: int) -> None:
    total, nbytes = 6 * MIB, MIB + 3
    with allocated(rig, total, kind, seed=38) as allocation:
        with exported(rig, allocation.ptr + offset, nbytes) as extent, mapped(peer, extent) as mapping:
            peer.call(expect_part, key=mapping.key, offset=0, nbytes=nbytes, seed=38, skip=offset)
            mapping.fill(nbytes, 39)
            rig.expect(allocation.ptr + offset, nbytes, 39, "the shared range")
            rig.expect(allocation.ptr, offset, 38, "the bytes before the shared range")


@case(
    "OFF-039",
    "The last byte of an allocation can be shared, and one byte behind it cannot.",
    clause="interfaces/memory.py: export",
)
def test_last_byte(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with allocated(rig, MIB, kind) as allocation:
        last = allocation.ptr + allocation.nbytes - 1
        rig.fill(last, 1, 39)
        with exported(rig, last, 1) as extent, mapped(peer, extent) as mapping:
            mapping.expect(1, 39)
            mapping.fill(1, 40)
            rig.expect(last, 1, 40, "the last byte")
        with pytest.raises(UsageError):
            rig.memory.release(rig.memory.export(last, 2))


@case(
    "OFF-041",
    "A chunk whose offset and length leave the allocation, wrap around or are negative is refused.",
    clause="interfaces/memory.py: open",
)
def test_chunk_bounds(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with allocated(rig, MIB, kind) as allocation, exported(rig, allocation.ptr, MIB) as extent:
        size = extent.chunks[0].allocation_nbytes
        wrong: Sequence[tuple[int, int]] = (
            (0, size + 1),
            (size - 1, 2),
            (size, 1),
            (1, 2**64 - 1),
            (2**64 - 1, 2),
            (2**63, 2**63),
            (-1, 2),
            (0, 0),
            (0, -1),
        )
        for offset, nbytes in wrong:
            refused(peer, change(extent, offset=offset, nbytes=nbytes), "HandleError")


@case(
    "OFF-042",
    "A chunk that announces a larger allocation than the importing driver reports is refused.",
    clause="interfaces/memory.py: open",
)
def test_announced_size(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with allocated(rig, MIB, kind) as allocation, exported(rig, allocation.ptr, MIB) as extent:
        size = extent.chunks[0].allocation_nbytes
        for announced, offset in ((4 * size, 2 * size), (2 * size, size), (size + 4 * KIB, size)):
            refused(peer, change(extent, allocation_nbytes=announced, offset=offset, nbytes=4 * KIB), "HandleError")


@case("OFF-043", "Extents and offsets beyond 4 GiB are exact.", clause="types.py: Chunk", large=True)
def test_beyond_4_gib(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    total = 5 * GIB
    if rig.free_nbytes() < 2 * total:
        pytest.skip(f"{rig.free_nbytes()} bytes are free, twice {total} are wanted")
    places = (0, 2 * GIB - MIB, 2 * GIB, 4 * GIB - MIB, 4 * GIB, 5 * GIB - MIB)
    with allocated(rig, total, kind) as allocation:
        for seed, place in enumerate(places, 1):
            rig.fill(allocation.ptr + place, MIB, seed)
        with exported(rig, allocation.ptr, total) as extent, mapped(peer, extent) as mapping:
            for seed, place in enumerate(places, 1):
                mapping.expect(MIB, seed, offset=place)
        far = allocation.ptr + 4 * GIB
        with exported(rig, far, MIB) as extent, mapped(peer, extent) as mapping:
            mapping.expect(MIB, 5)


@case("OFF-044", "Odd sizes are shared to the byte.", clause="interfaces/memory.py: export")
@pytest.mark.parametrize("nbytes", [1, 4 * KIB - 1, 2 * MIB - 1, 2 * MIB + 1])
def test_odd_sizes(rig: Rig, peer: Peer, kind: HandleKind, nbytes: int) -> None:
    with shared(rig, peer, nbytes, kind, seed=44) as (allocation, mapping):
        assert allocation.nbytes >= nbytes
        mapping.expect(nbytes, 44)
        mapping.fill(nbytes, 45)
        rig.expect(allocation.ptr, nbytes, 45, "the shared range")


@case(
    "OFF-045",
    "Allocations are whole driver blocks: what an export reaches beyond the request is disclosed and has no neighbour.",
    clause="interfaces/memory.py: Allocation.nbytes",
)
def test_no_neighbours(rig: Rig, kind: HandleKind) -> None:
    with allocated(rig, 1, kind) as one, allocated(rig, 1, kind) as other:
        for allocation in (one, other):
            with exported(rig, allocation.ptr, 1) as extent:
                (chunk,) = extent.chunks
                assert chunk.offset == 0
                assert chunk.allocation_nbytes <= allocation.nbytes, "the export reaches more than was disclosed"
        first, second = sorted((one, other), key=lambda allocation: allocation.ptr)
        assert first.ptr + first.nbytes <= second.ptr


@case(
    "MEM-107",
    "Several threads open, read and close the same extent at once.",
    clause="interfaces/memory.py: DeviceMemoryIPC",
)
def test_threads(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    nbytes = 64 * KIB
    with allocated(rig, nbytes, kind, seed=107) as allocation, exported(rig, allocation.ptr, nbytes) as extent:
        peer.call(open_many, **send(extent), nbytes=nbytes, seed=107, threads=4, times=8)


@case(
    "MEM-117",
    "Without a free descriptor an open works or is refused by type, and works again afterwards.",
    clause="errors.py: ResourceExhausted",
)
def test_no_descriptor_left(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with allocated(rig, MIB, kind) as allocation, exported(rig, allocation.ptr, MIB) as extent:
        peer.call(open_without_fds, **send(extent))
