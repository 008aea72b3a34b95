"""Memory: what one process shares is what another one sees."""
# ruff: noqa: D103 - the demand of a case is its documentation

from __future__ import annotations

import pytest

from devipc.conformance.catalogue import case
from devipc.conformance.fixtures import NewPeer
from devipc.conformance.grown import allocated_grown
from devipc.conformance.peers import Peer
from devipc.conformance.profile import BackendProfile
from devipc.conformance.rig import Rig
from devipc.conformance.roles_memory import echo, export_imported, self_open
from devipc.conformance.sharing import allocated, exported, mapped, shared, shared_by_peer
from devipc.errors import CapabilityError, DevIPCError, UsageError
from devipc.spi import close_fds
from devipc.types import ExportedExtent, HandleKind, MemoryKind

MIB = 1 << 20
EXPORTABLE = (MemoryKind.DEVICE, MemoryKind.VMM, MemoryKind.POOL)


@case("MEM-011", "An importer reads the bytes that the exporter wrote.", clause="interfaces/memory.py: open")
def test_importer_reads(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with shared(rig, peer, 3 * MIB, kind, seed=11) as (_, mapping):
        mapping.expect(3 * MIB, 11)


@case("MEM-012", "What an importer writes is what the exporter reads.", clause="interfaces/memory.py: open")
def test_importer_writes(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with shared(rig, peer, MIB, kind, seed=1) as (allocation, mapping):
        mapping.fill(MIB, 12)
        rig.expect(allocation.ptr, MIB, 12, "the exporter's memory")


@case(
    "MEM-202",
    "An open mapping shows what the exporter writes later: it shares, it does not copy.",
    clause="interfaces/memory.py: open",
)
def test_later_writes_show(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with shared(rig, peer, MIB, kind, seed=1) as (allocation, mapping):
        mapping.expect(MIB, 1)
        for seed in (2, 3):
            rig.fill(allocation.ptr, MIB, seed)
            mapping.expect(MIB, seed)


@case(
    "MEM-013",
    "Two exports of one allocation both open, and are the same memory.",
    clause="interfaces/memory.py: export",
)
def test_two_exports(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with (
        allocated(rig, MIB, kind, seed=1) as allocation,
        exported(rig, allocation.ptr, MIB) as first,
        exported(rig, allocation.ptr, MIB) as second,
        mapped(peer, first) as one,
        mapped(peer, second) as other,
    ):
        one.fill(MIB, 13)
        other.expect(MIB, 13)


@case("MEM-014", "Exports of two allocations are different memory.", clause="interfaces/memory.py: export")
def test_two_allocations(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with (
        shared(rig, peer, MIB, kind, seed=1) as (first, one),
        shared(rig, peer, MIB, kind, seed=2) as (second, other),
    ):
        assert rig.memory.describe(first.ptr).allocation_id != rig.memory.describe(second.ptr).allocation_id
        one.expect(MIB, 1)
        other.expect(MIB, 2)
        one.fill(MIB, 3)
        other.expect(MIB, 2)


@case(
    "MEM-015",
    "An allocation id is never used twice, also where an address is.",
    clause="types.py: AllocationInfo.allocation_id",
)
def test_ids_are_fresh(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    seen: set[int] = set()
    for seed in range(1, 9):
        with shared(rig, peer, 4096, kind, seed=seed) as (allocation, mapping):
            identity = rig.memory.describe(allocation.ptr).allocation_id
            assert identity not in seen
            seen.add(identity)
            mapping.expect(4096, seed)


@case("MEM-016", "Export of freed memory is refused by type.", clause="interfaces/memory.py: export")
def test_freed_memory_is_refused(rig: Rig, kind: HandleKind) -> None:
    with allocated(rig, MIB, kind) as allocation:
        ptr = allocation.ptr
    refuse_export(rig, ptr, MIB)
    info = rig.memory.describe(ptr)
    assert info.kind is MemoryKind.UNKNOWN
    assert not info.exportable
    assert info.reason


def refuse_export(rig: Rig, ptr: int, nbytes: int) -> None:
    with pytest.raises(DevIPCError) as refused:
        rig.memory.release(rig.memory.export(ptr, nbytes))
    assert isinstance(refused.value, UsageError | CapabilityError), refused.value
    assert refused.value.remedy


@case("MEM-017", "Export of a range that leaves its allocation is refused.", clause="interfaces/memory.py: export")
@pytest.mark.parametrize("where", ["one byte more", "far more", "behind", "nothing"])
def test_range_is_checked(rig: Rig, kind: HandleKind, where: str) -> None:
    with allocated(rig, MIB, kind) as allocation:
        size = allocation.nbytes
        start, nbytes = {
            "one byte more": (0, size + 1),
            "far more": (1, 2**46),
            "behind": (size - 1, 2),
            "nothing": (0, 0),
        }[where]
        with pytest.raises(UsageError):
            rig.memory.release(rig.memory.export(allocation.ptr + start, nbytes))


@case(
    "MEM-018",
    "Null, plain host and registered host pointers are described without a crash and refused with a remedy.",
    clause="interfaces/memory.py: describe, export",
)
@pytest.mark.parametrize("what", ["null", "registered", "wild"])
def test_other_memory_is_refused(rig: Rig, what: str) -> None:
    ptr = {"null": 0, "registered": rig.staging.ptr, "wild": 0x1000}[what]
    info = rig.memory.describe(ptr)
    assert info.kind not in EXPORTABLE
    assert not info.exportable
    assert info.reason
    refuse_export(rig, ptr, 4096)


@case("MEM-019", "An imported mapping cannot be exported again.", clause="interfaces/memory.py: export")
def test_no_reexport(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with shared(rig, peer, MIB, kind, seed=1) as (_, mapping):
        refusal = peer.refusal(export_imported, key=mapping.key)
        assert "CapabilityError" in refusal.types
        assert refusal.remedy


@case(
    "MEM-024",
    "Opening an own export gives an alias or is refused by type, never anything else.",
    clause="interfaces/memory.py: open",
)
def test_open_in_exporter(peer: Peer, kind: HandleKind) -> None:
    peer.call(self_open, kind=kind.value, nbytes=MIB)


@case("MEM-025", "An extent that is opened twice is usable through both mappings.", clause="interfaces/memory.py: open")
def test_open_twice(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with (
        allocated(rig, MIB, kind, seed=1) as allocation,
        exported(rig, allocation.ptr, MIB) as extent,
        mapped(peer, extent) as one,
        mapped(peer, extent) as other,
    ):
        one.fill(MIB, 25)
        other.expect(MIB, 25)
        rig.expect(allocation.ptr, MIB, 25, "the exporter's memory")


@case(
    "MEM-027",
    "Memory that was allocated for a kind is described and exported as that kind.",
    clause="interfaces/memory.py: allocate, describe",
)
def test_kind_is_kept(rig: Rig, kind: HandleKind) -> None:
    with allocated(rig, MIB, kind) as allocation:
        info = rig.memory.describe(allocation.ptr)
        assert allocation.kind is kind
        assert kind in info.exportable
        assert info.kind in EXPORTABLE
        with exported(rig, allocation.ptr, MIB) as extent:
            assert extent.kind is kind
            assert extent.nbytes == MIB
            assert len(extent.fds) == sum(chunk.has_fd for chunk in extent.chunks)


@case(
    "MEM-029",
    "A range that was grown from several blocks is shared as several chunks, side by side.",
    clause="types.py: ExportedExtent",
)
def test_grown_range(rig: Rig, peer: Peer, profile: BackendProfile) -> None:
    with allocated_grown(rig, profile, (2 * MIB, 2 * MIB, 4 * MIB)) as allocation:
        start, nbytes = allocation.ptr + MIB, 6 * MIB
        rig.fill(start, nbytes, 29)
        with exported(rig, start, nbytes) as extent, mapped(peer, extent) as mapping:
            assert len(extent.chunks) == 3
            assert extent.nbytes == nbytes
            mapping.expect(nbytes, 29)
            mapping.fill(nbytes, 30)
            rig.expect(start, nbytes, 30, "the grown range")


@case(
    "MEM-030",
    "Export as a kind that the memory was not allocated for is refused.",
    clause="interfaces/memory.py: export",
)
def test_other_kind_is_refused(rig: Rig, kind: HandleKind) -> None:
    with allocated(rig, MIB, kind) as allocation:
        exportable = rig.memory.describe(allocation.ptr).exportable
        for other in HandleKind:
            if other not in exportable:
                with pytest.raises(CapabilityError):
                    rig.memory.release(rig.memory.export(allocation.ptr, MIB, kind=other))


@case(
    "MEM-035",
    "A handle that one importer hands on opens in a third process.",
    clause="interfaces/memory.py: open",
)
def test_handle_is_handed_on(rig: Rig, new_peer: NewPeer, kind: HandleKind) -> None:
    first, second = new_peer(), new_peer()
    with allocated(rig, MIB, kind, seed=35) as allocation, exported(rig, allocation.ptr, MIB) as extent:
        answer = first.call(echo, fds=extent.fds)
        try:
            handed_on = ExportedExtent(extent.kind, extent.chunks, answer.fds)
            with mapped(second, handed_on) as mapping:
                mapping.expect(MIB, 35)
        finally:
            close_fds(answer.fds)


@case(
    "MEM-203",
    "Every address of an allocation is described by its base, size and kind.",
    clause="types.py: AllocationInfo",
)
def test_describe_is_true(rig: Rig, kind: HandleKind) -> None:
    with allocated(rig, 3 * MIB, kind) as allocation:
        first = rig.memory.describe(allocation.ptr)
        assert (first.base, first.nbytes) == (allocation.ptr, allocation.nbytes)
        for offset in (1, MIB, allocation.nbytes - 1):
            assert rig.memory.describe(allocation.ptr + offset) == first
        assert rig.memory.describe(allocation.ptr + allocation.nbytes).allocation_id != first.allocation_id


@case("MEM-204", "An allocation of nothing is refused.", clause="interfaces/memory.py: allocate")
def test_empty_allocation(rig: Rig) -> None:
    for nbytes in (0, -1):
        with pytest.raises(UsageError):
            rig.memory.allocate(nbytes)


@case("MEM-205", "Memory that is freed twice is refused.", clause="interfaces/memory.py: free")
def test_double_free(rig: Rig, kind: HandleKind) -> None:
    with allocated(rig, MIB, kind) as allocation:
        pass
    with allocated(rig, MIB, kind, seed=5) as other:
        with pytest.raises(UsageError):
            rig.memory.free(allocation)
        rig.expect(other.ptr, MIB, 5, "another allocation, after a double free")


@case(
    "MEM-207",
    "Descriptors of an extent stay the caller's when it is opened.",
    clause="interfaces/memory.py: open",
)
def test_descriptors_stay(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with shared_by_peer(peer, MIB, kind, seed=7) as extent:
        for _ in range(2):
            opened = rig.memory.open(extent)
            try:
                rig.expect(opened.ptr, MIB, 7, "the mapping")
            finally:
                rig.memory.close(opened)


@case(
    "MEM-208",
    "Two processes export to each other at the same time.",
    clause="interfaces/memory.py: open",
)
def test_crosswise(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with shared(rig, peer, MIB, kind, seed=8) as (allocation, mapping):
        with shared_by_peer(peer, MIB, kind, seed=9) as theirs:
            opened = rig.memory.open(theirs)
            try:
                rig.expect(opened.ptr, MIB, 9, "the peer's memory")
                mapping.expect(MIB, 8)
                mapping.fill(MIB, 10)
                rig.expect(opened.ptr, MIB, 9, "the peer's memory, after it wrote to ours")
                rig.expect(allocation.ptr, MIB, 10, "our memory")
            finally:
                rig.memory.close(opened)


@case(
    "MEM-209",
    "An allocation that is asked to be zero holds no bytes of an earlier owner.",
    clause="interfaces/memory.py: allocate",
)
def test_zeroed(rig: Rig, kind: HandleKind) -> None:
    for seed in (1, 2):
        allocation = rig.memory.allocate(2 * MIB, kind=kind, zero=True)
        try:
            found = rig.read(allocation.ptr, allocation.nbytes)
            assert not any(found), "bytes that are not zero"
            rig.fill(allocation.ptr, allocation.nbytes, seed)
        finally:
            rig.memory.free(allocation)
