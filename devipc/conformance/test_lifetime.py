"""Lifetime: closing, freeing, and coming back to where one was."""
# ruff: noqa: D103 - the demand of a case is its documentation

from __future__ import annotations

import contextlib
from typing import Any

from devipc.conformance import roles_memory as roles
from devipc.conformance.catalogue import case
from devipc.conformance.fencing import followed
from devipc.conformance.fixtures import NewPeer
from devipc.conformance.peers import Peer
from devipc.conformance.profile import BackendProfile
from devipc.conformance.rig import Rig
from devipc.conformance.roles_device import use_closed_device
from devipc.conformance.sharing import allocated, exported, mapped, send, shared
from devipc.errors import UsageError
from devipc.spi import close_fds
from devipc.types import HandleKind, Strategy

KIB, MIB = 1 << 10, 1 << 20


@case(
    "LIFE-046",
    "A closed mapping is described as imported no more; closing it again is refused or does nothing.",
    clause="interfaces/memory.py: close",
)
def test_close(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with (
        allocated(rig, MIB, kind, seed=46) as allocation,
        exported(rig, allocation.ptr, MIB) as extent,
        mapped(peer, extent) as other,
    ):
        key = peer.call(roles.open_extent, **send(extent)).body["key"]
        peer.call(roles.close_twice, key=key, other=other.key, nbytes=MIB, seed=46)
    with allocated(rig, MIB, kind, seed=47) as allocation, exported(rig, allocation.ptr, MIB) as extent:
        key = peer.call(roles.open_extent, **send(extent)).body["key"]
        kind_after = peer.call(roles.close_mapping, key=key).body["kind"]
        assert kind_after == "unknown", f"the address of a closed mapping is described as {kind_after}"


@case(
    "LIFE-047",
    "Of two mappings of one extent the second stays usable when the first is closed.",
    clause="interfaces/memory.py: close",
)
def test_first_close(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with allocated(rig, MIB, kind, seed=1) as allocation, exported(rig, allocation.ptr, MIB) as extent:
        for reverse in (False, True):
            keys = [peer.call(roles.open_extent, **send(extent)).body["key"] for _ in range(2)]
            first, second = reversed(keys) if reverse else keys
            peer.call(roles.close_mapping, key=first)
            peer.call(roles.fill, key=second, nbytes=MIB, seed=47)
            rig.expect(allocation.ptr, MIB, 47, "the exporter's memory")
            peer.call(roles.close_mapping, key=second)


@case(
    "LIFE-049",
    "A handle whose memory was freed before it was opened is refused by type in time, or still shows its bytes.",
    clause="interfaces/memory.py: open",
)
def test_freed_before_open(rig: Rig, peer: Peer, kind: HandleKind, profile: BackendProfile) -> None:
    with allocated(rig, MIB, kind, seed=49) as allocation:
        extent = rig.memory.export(allocation.ptr, MIB)
    try:
        opens_or_refuses(peer, send(extent), seed=None if kind in profile.recycled_kinds else 49)
    finally:
        rig.memory.release(extent)


def opens_or_refuses(peer: Peer, extent: dict[str, Any], *, seed: int | None) -> None:
    """Let the peer try; what opens must show the old bytes, where they are known."""
    body = peer.call(roles.try_open, **extent).body
    if body["refused"]:
        return
    if seed is not None:
        peer.call(roles.expect, key=body["key"], nbytes=MIB, seed=seed)
    peer.call(roles.close_mapping, key=body["key"])


@case(
    "LIFE-050",
    "A mapping whose memory its exporter freed behaves as the profile declares, and closes.",
    clause="conformance/profile.py: BackendProfile.keeps_freed_memory",
)
def test_freed_while_mapped(rig: Rig, peer: Peer, kind: HandleKind, profile: BackendProfile) -> None:
    with allocated(rig, MIB, kind, seed=50) as allocation, exported(rig, allocation.ptr, MIB) as extent:
        key = peer.call(roles.open_extent, **send(extent)).body["key"]
    with allocated(rig, MIB, kind, seed=51) as other:
        if profile.keeps_freed_memory and kind not in profile.recycled_kinds:
            peer.call(roles.expect, key=key, nbytes=MIB, seed=50)
            peer.call(roles.fill, key=key, nbytes=MIB, seed=52)
            rig.expect(other.ptr, MIB, 51, "other memory, after freed memory was written")
        peer.call(roles.close_mapping, key=key)


@case(
    "LIFE-052",
    "An export is released without harm to the memory; a second release is refused or does nothing.",
    clause="interfaces/memory.py: release",
)
def test_release(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with allocated(rig, MIB, kind, seed=52) as allocation:
        extent = rig.memory.export(allocation.ptr, MIB)
        rig.memory.release(extent)
        with contextlib.suppress(UsageError):
            rig.memory.release(extent)
        with exported(rig, allocation.ptr, MIB) as again, mapped(peer, again) as mapping:
            mapping.expect(MIB, 52)


@case(
    "LIFE-054",
    "A process that exits with everything open ends cleanly and in time.",
    clause="interfaces/backend.py: Device.close",
)
def test_exit_with_open_mapping(rig: Rig, new_peer: NewPeer, kind: HandleKind) -> None:
    peer = new_peer()
    with allocated(rig, MIB, kind, seed=1) as allocation, exported(rig, allocation.ptr, MIB) as extent:
        peer.call(roles.open_extent, **send(extent))
        close_fds(peer.call(roles.share, kind=kind.value, nbytes=MIB, seed=2).fds)
        peer.call(roles.leave)
        assert peer.wait_exit(rig.deadline_s) == 0
        rig.expect(allocation.ptr, MIB, 1, "memory, after an importer exited")


@case(
    "LIFE-055",
    "After 100 cycles of allocate, export, open, close, release and free nothing is left in either process.",
    clause="interfaces/memory.py: DeviceMemoryIPC",
)
def test_memory_cycles(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    for seed in range(1, 101):
        with shared(rig, peer, 2 * MIB, kind, seed=0) as (allocation, mapping):
            if seed % 20 == 0:
                mapping.fill(4 * KIB, seed)
                rig.expect(allocation.ptr, 4 * KIB, seed, "memory of a late cycle")


@case(
    "LIFE-056",
    "After many cycles of streams, markers, registrations, events and fences nothing is left in either process.",
    clause="interfaces/transfer.py: DeviceTransfer",
)
def test_sync_cycles(rig: Rig, peer: Peer, strategy: Strategy) -> None:
    for value in range(1, 21):
        with rig.new_stream() as stream, rig.new_staging(64 * KIB) as area:
            rig.carry(stream, area.ptr, area.ptr + 4 * KIB, 4 * KIB)
            with followed(rig, peer, strategy) as (producer, follower):
                producer.signal(stream, value)
                follower.synchronize(value, rig.deadline_s)


@case("LIFE-113", "A forked child is refused by type.", clause="interfaces/memory.py: DeviceMemoryIPC")
def test_fork(peer: Peer) -> None:
    status = peer.call(roles.fork_and_use).body["status"]
    assert status == 0, {1: "the child could allocate", 2: "the child got an error without that type"}.get(
        status, status
    )


@case(
    "LIFE-201",
    "A device closes twice without harm, and works again when it is opened again.",
    clause="interfaces/backend.py: Device.close",
)
def test_reopen(new_peer: NewPeer) -> None:
    peer = new_peer()
    peer.once = True  # a device that was opened again is not warm
    body = peer.call(roles.reopen_device).body
    assert body["uuid"] == body["before"]


@case(
    "LIFE-202",
    "A closed device refuses further work by type.",
    clause="interfaces/backend.py: Device.close",
)
def test_closed_device(bare_peer: Peer) -> None:
    answers = bare_peer.call(use_closed_device).body["answers"]
    assert all(answers.values()), f"accepted on a closed device: {[name for name, why in answers.items() if not why]}"
