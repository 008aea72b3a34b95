"""Random walks on the backend and on the host backend, step by step alike."""
# ruff: noqa: D103 - the demand of a case is its documentation

from __future__ import annotations

from collections.abc import Iterator

import pytest

from devipc.conformance.catalogue import case
from devipc.conformance.fixtures import NewPeer
from devipc.conformance.peers import Peer
from devipc.conformance.rig import Rig
from devipc.conformance.stateful import LocalImporter, MemoryMachine, MemorySide, PeerImporter, run_machine
from devipc.conformance.suite import Suite
from devipc.conformance.timelines import FenceMachine, FenceSide, LocalFollowers, PeerFollowers
from devipc.host.backend import HostBackend
from devipc.types import HandleKind, Strategy


@pytest.fixture
def oracle(rig: Rig) -> Iterator[Rig]:
    """Return a rig of the host backend that is nobody else's."""
    made = Rig(HostBackend().open_device(), deadline_s=rig.deadline_s)
    yield made
    made.close()


@pytest.fixture
def walks(suite: Suite) -> int:
    """Return how many walks of each length are made."""
    return 100 if suite.large else 10


class Partners:
    """A usable peer for each walk: one that a failure broke is replaced for the replay."""

    def __init__(self, new_peer: NewPeer) -> None:
        self._new_peer = new_peer
        self._peer: Peer | None = None

    def next(self) -> Peer:
        """Return it."""
        if self._peer is None or not self._peer.usable:
            self._peer = self._new_peer()
        return self._peer


@case(
    "STATE-201",
    "In any order of steps memory is shared, described and refused as it is on the host backend.",
    clause="interfaces/memory.py: DeviceMemoryIPC",
)
def test_memory_walks(rig: Rig, oracle: Rig, new_peer: NewPeer, kind: HandleKind, walks: int) -> None:
    partners = Partners(new_peer)

    def machine() -> MemoryMachine:
        subject = MemorySide(rig, kind, PeerImporter(partners.next()))
        return MemoryMachine(subject, MemorySide(oracle, HandleKind.MEMFD, LocalImporter(oracle)))

    run_machine(machine, examples=walks)


@case(
    "STATE-202",
    "In any order of steps a fence is issued, reached, refused and failed as one of the host backend is.",
    clause="completion/fence.py: Fence",
)
def test_fence_walks(rig: Rig, oracle: Rig, new_peer: NewPeer, strategy: Strategy, walks: int) -> None:
    partners = Partners(new_peer)

    def machine() -> FenceMachine:
        subject = FenceSide(rig, strategy, PeerFollowers(partners.next()))
        reference = FenceSide(oracle, Strategy.POLLING, LocalFollowers(oracle))
        return FenceMachine(subject, reference, can_hold=rig.has_latches and oracle.has_latches)

    run_machine(machine, examples=walks)
