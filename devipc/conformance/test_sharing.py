"""Memory once more: limits, descriptors, other devices, and many hands at once."""
# ruff: noqa: D103 - the demand of a case is its documentation

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools

import pytest

from devipc.conformance import roles_races as races
from devipc.conformance.catalogue import case
from devipc.conformance.fixtures import NewPeer
from devipc.conformance.grown import allocated_grown
from devipc.conformance.peers import Peer
from devipc.conformance.profile import BackendProfile
from devipc.conformance.rig import Rig
from devipc.conformance.roles_device import open_elsewhere
from devipc.conformance.sharing import allocated, exported, mapped, send, shared, shared_by_peer
from devipc.conformance.staging import given_back
from devipc.errors import ResourceExhausted
from devipc.interfaces.backend import Backend
from devipc.types import ExportedExtent, HandleKind

KIB, MIB = 1 << 10, 1 << 20


@case(
    "MEM-036",
    "An extent of one device opens on another with the right bytes, or is refused there by type.",
    clause="interfaces/memory.py: DeviceMemoryIPC.open",
)
def test_other_device(backend: Backend, rig: Rig, bare_peer: Peer, kind: HandleKind) -> None:
    if len(backend.devices()) < 2:
        pytest.skip("there is one device only")
    with allocated(rig, MIB, kind, seed=36) as allocation, exported(rig, allocation.ptr, MIB) as extent:
        answers = bare_peer.call(open_elsewhere, **send(extent), nbytes=MIB, seed=36).body["answers"]
        assert len(answers) == len(backend.devices()) - 1


@case(
    "MEM-098",
    "A handle opens whatever numbers its descriptors have in the importer, those of the exporter included.",
    clause="types.py: ExportedExtent.fds",
)
def test_descriptor_numbers(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with allocated(rig, MIB, kind, seed=98) as allocation, exported(rig, allocation.ptr, MIB) as extent:
        if not extent.fds:
            pytest.skip(f"a handle of kind {kind.value} has no descriptors")
        for numbers in (list(extent.fds), [fd + 100 for fd in extent.fds], [900 + fd for fd in extent.fds]):
            peer.call(races.open_at_number, **send(extent), numbers=numbers, nbytes=MIB, seed=98)


@case(
    "MEM-100",
    "Descriptors of an export are closed when the process starts another program.",
    clause="interfaces/memory.py: export",
)
def test_close_on_exec(rig: Rig, kind: HandleKind) -> None:
    with allocated(rig, MIB, kind) as allocation, exported(rig, allocation.ptr, MIB) as extent:
        if not extent.fds:
            pytest.skip(f"a handle of kind {kind.value} has no descriptors")
        for fd in extent.fds:
            assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC, f"descriptor {fd} survives exec"


@case(
    "MEM-101",
    "Two exports of one allocation have descriptors of their own: releasing one leaves the other usable.",
    clause="interfaces/memory.py: release",
)
def test_exports_are_apart(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with allocated(rig, MIB, kind, seed=101) as allocation:
        with contextlib.ExitStack() as of_first:
            first = of_first.enter_context(exported(rig, allocation.ptr, MIB))
            with exported(rig, allocation.ptr, MIB) as second:
                assert not set(first.fds) & set(second.fds)
                of_first.close()
                with mapped(peer, second) as mapping:
                    mapping.expect(MIB, 101)


@case(
    "MEM-108",
    "Two processes export and open at the same time, again and again.",
    clause="interfaces/memory.py: DeviceMemoryIPC",
)
def test_export_races_open(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    nbytes = 64 * KIB
    with (
        allocated(rig, nbytes, kind, seed=108) as allocation,
        exported(rig, allocation.ptr, nbytes) as extent,
        shared_by_peer(peer, nbytes, kind, seed=109) as theirs,
    ):
        peer.start(races.export_and_open, **send(extent), nbytes=nbytes, seed=108, times=12, kind=kind.value)
        for _ in range(12):
            with allocated(rig, nbytes, kind) as own, exported(rig, own.ptr, nbytes):
                opened = rig.memory.open(theirs)
                with given_back(lambda opened=opened: rig.memory.close(opened)):  # type: ignore[misc]
                    rig.expect(opened.ptr, nbytes, 109, "the peer's memory")
        peer.result()


@case(
    "MEM-119",
    "An extent of which one chunk is bad opens nothing, and leaves no mapping and no descriptor.",
    clause="interfaces/memory.py: open",
)
def test_no_half_open(rig: Rig, peer: Peer, profile: BackendProfile) -> None:
    with allocated_grown(rig, profile, (2 * MIB, 2 * MIB, 4 * MIB)) as allocation:
        with exported(rig, allocation.ptr, 8 * MIB) as extent:
            last = dataclasses.replace(extent.chunks[-1], offset=0, nbytes=extent.chunks[-1].allocation_nbytes + 4096)
            wrong = ExportedExtent(extent.kind, (*extent.chunks[:-1], last), extent.fds)
            body = peer.call(races.refuse_many, **send(wrong), times=16).body
            assert not body["accepted"], "an extent with a bad chunk was opened"
            assert body["maps"] < 16, f"{body['maps']} mapped files are left of 16 refused opens"
            assert body["fds"] < 16, f"{body['fds']} descriptors are left of 16 refused opens"
            with mapped(peer, extent):
                pass


@case(
    "MEM-210",
    "An allocation larger than the device is refused as exhausted, and a small one works afterwards.",
    clause="interfaces/memory.py: allocate",
)
def test_too_much(rig: Rig, kind: HandleKind) -> None:
    with pytest.raises(ResourceExhausted) as refused:
        rig.memory.free(rig.memory.allocate(4 * rig.transfer.memory_info().total_nbytes, kind=kind))
    assert refused.value.remedy
    with allocated(rig, MIB, kind, seed=210) as allocation:
        rig.expect(allocation.ptr, MIB, 210, "memory that was allocated after a refusal")


@case(
    "MEM-211",
    "Allocations that live at the same time do not overlap, and each keeps its content.",
    clause="interfaces/memory.py: Allocation.nbytes",
)
def test_allocations_are_apart(rig: Rig, kind: HandleKind) -> None:
    sizes = [1, 4 * KIB, 64 * KIB + 1, MIB, 2 * MIB + 1, 3 * MIB]
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(allocated(rig, nbytes, kind, seed=nbytes)) for nbytes in sizes]
        ranges = sorted((one.ptr, one.ptr + one.nbytes) for one in made)
        for (_, end), (start, _) in itertools.pairwise(ranges):
            assert end <= start, "two allocations overlap"
        for nbytes, allocation in zip(sizes, made, strict=True):
            assert allocation.nbytes >= nbytes
            rig.expect(allocation.ptr, nbytes, nbytes, "one of several allocations")


@case(
    "MEM-212",
    "Both ends of a mapping are described as one imported range that cannot be exported.",
    clause="interfaces/memory.py: describe",
)
def test_mapping_is_described(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with shared(rig, peer, 3 * MIB, kind, seed=0) as (_, mapping):
        body = peer.call(races.describe_mapping, key=mapping.key).body
        assert body == {"kinds": ["imported", "imported"], "inside": True, "exportable": []}


@case(
    "MEM-213",
    "Memory that is allocated without a kind is exported as its best kind, and opens.",
    clause="interfaces/memory.py: allocate",
)
def test_best_kind(rig: Rig, peer: Peer, any_kind: HandleKind) -> None:
    with allocated(rig, MIB, None, seed=213) as allocation:
        assert rig.memory.describe(allocation.ptr).exportable[0] is allocation.kind
        with exported(rig, allocation.ptr, MIB) as extent, mapped(peer, extent) as mapping:
            assert extent.kind is allocation.kind
            mapping.expect(MIB, 213)


@case(
    "OFF-201",
    "Two ranges of one allocation open as two mappings, each its own part and no other.",
    clause="types.py: Chunk.offset",
)
def test_two_ranges(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    half = 2 * MIB
    with (
        allocated(rig, 2 * half, kind, seed=1) as allocation,
        exported(rig, allocation.ptr, half) as low,
        exported(rig, allocation.ptr + half, half) as high,
        mapped(peer, low) as one,
        mapped(peer, high) as other,
    ):
        one.fill(half, 2)
        other.fill(half, 3)
        one.expect(half, 2)
        rig.expect(allocation.ptr, half, 2, "the lower half")
        rig.expect(allocation.ptr + half, half, 3, "the upper half")


@case(
    "OFF-202",
    "A part of a grown range takes the chunks that it touches and no more.",
    clause="types.py: ExportedExtent.chunks",
)
def test_part_of_a_grown_range(rig: Rig, peer: Peer, profile: BackendProfile) -> None:
    with allocated_grown(rig, profile, (2 * MIB, 2 * MIB, 4 * MIB)) as allocation:
        rig.fill(allocation.ptr, 8 * MIB, 1)
        for start, nbytes, chunks in ((0, MIB, 1), (2 * MIB, 2 * MIB, 1), (MIB, 2 * MIB, 2), (5 * MIB, MIB, 1)):
            rig.fill(allocation.ptr + start, nbytes, 202)
            with exported(rig, allocation.ptr + start, nbytes) as extent, mapped(peer, extent) as mapping:
                assert len(extent.chunks) == chunks, f"{nbytes} bytes at {start}"
                assert extent.nbytes == nbytes
                mapping.expect(nbytes, 202)


@case(
    "LIFE-109",
    "Mappings of one extent are closed in any order, and those that are left stay usable.",
    clause="interfaces/memory.py: close",
)
def test_shuffled_closes(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    nbytes = 64 * KIB
    with allocated(rig, nbytes, kind, seed=109) as allocation, exported(rig, allocation.ptr, nbytes) as extent:
        peer.call(races.open_shuffled, **send(extent), nbytes=nbytes, seed=109, times=8)


@case(
    "LIFE-120",
    "One export is opened and closed 300 times by each of two importers, one after the other.",
    clause="interfaces/memory.py: open",
)
def test_many_opens(rig: Rig, new_peer: NewPeer, kind: HandleKind) -> None:
    nbytes = 4 * KIB
    with allocated(rig, nbytes, kind, seed=120) as allocation, exported(rig, allocation.ptr, nbytes) as extent:
        for importer in (new_peer(), new_peer()):
            body = importer.call(races.open_until_refused, **send(extent), nbytes=nbytes, seed=120, times=300).body
            assert body == {"opened": 300, "refused": ""}


@case(
    "LIFE-203",
    "An export that is released while a peer has it mapped leaves that mapping usable.",
    clause="interfaces/memory.py: release",
)
def test_released_while_mapped(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with allocated(rig, MIB, kind, seed=1) as allocation:
        with contextlib.ExitStack() as stack:
            with exported(rig, allocation.ptr, MIB) as extent:
                mapping = stack.enter_context(mapped(peer, extent))
            mapping.expect(MIB, 1)
            mapping.fill(MIB, 203)
            rig.expect(allocation.ptr, MIB, 203, "the exporter's memory after its export was released")
