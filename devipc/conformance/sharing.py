"""Sharing in a few words: what nearly every case about memory begins and ends with.

Owns no verdict. Everything made here is given back when its block ends; after a failure, as far as the peer still
answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from devipc.conformance import roles_memory
from devipc.conformance.peers import Peer
from devipc.conformance.rig import Rig
from devipc.conformance.staging import given_back
from devipc.conformance.worker import extent_from_json, extent_to_json
from devipc.interfaces.memory import Allocation
from devipc.spi import close_fds
from devipc.types import ExportedExtent, HandleKind

__all__ = ["Mapping", "allocated", "exported", "mapped", "send", "shared", "shared_by_peer"]


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapping that a peer keeps."""

    peer: Peer
    key: int
    ptr: int

    def expect(self, nbytes: int, seed: int, *, offset: int = 0) -> None:
        """Let the peer compare."""
        self.peer.call(roles_memory.expect, key=self.key, nbytes=nbytes, seed=seed, offset=offset)

    def fill(self, nbytes: int, seed: int, *, offset: int = 0) -> None:
        """Let the peer write."""
        self.peer.call(roles_memory.fill, key=self.key, nbytes=nbytes, seed=seed, offset=offset)

    def close(self) -> str:
        """Let the peer close it; return what the address is called afterwards."""
        return str(self.peer.call(roles_memory.close_mapping, key=self.key).body["kind"])


def send(extent: ExportedExtent) -> dict[str, Any]:
    """Return the arguments that bring an extent to a role."""
    return {"extent": extent_to_json(extent), "fds": extent.fds}


@contextmanager
def allocated(rig: Rig, nbytes: int, kind: HandleKind | None, *, seed: int = 0) -> Iterator[Allocation]:
    """Yield memory with the content of ``seed``, or whatever it holds for 0."""
    allocation = rig.memory.allocate(nbytes, kind=kind)
    with given_back(lambda: rig.memory.free(allocation)):
        if seed:
            rig.fill(allocation.ptr, nbytes, seed)
        yield allocation


@contextmanager
def exported(rig: Rig, ptr: int, nbytes: int) -> Iterator[ExportedExtent]:
    """Yield an export of a range."""
    extent = rig.memory.export(ptr, nbytes)
    with given_back(lambda: rig.memory.release(extent)):
        yield extent


@contextmanager
def mapped(peer: Peer, extent: ExportedExtent) -> Iterator[Mapping]:
    """Yield the peer's mapping of an extent; closed afterwards unless the peer is gone."""
    body = peer.call(roles_memory.open_extent, **send(extent)).body
    mapping = Mapping(peer, body["key"], body["ptr"])
    yield mapping
    if peer.usable:
        mapping.close()


@contextmanager
def shared(rig: Rig, peer: Peer, nbytes: int, kind: HandleKind, *, seed: int) -> Iterator[tuple[Allocation, Mapping]]:
    """Yield memory of this process and the peer's mapping of it."""
    with (
        allocated(rig, nbytes, kind, seed=seed) as allocation,
        exported(rig, allocation.ptr, nbytes) as extent,
        mapped(peer, extent) as mapping,
    ):
        yield allocation, mapping


@contextmanager
def shared_by_peer(peer: Peer, nbytes: int, kind: HandleKind, *, seed: int) -> Iterator[ExportedExtent]:
    """Yield an extent that a peer exported; its descriptors are this process's."""
    answer = peer.call(roles_memory.share, kind=kind.value, nbytes=nbytes, seed=seed)
    try:
        yield extent_from_json(answer.body["extent"], answer.fds)
    finally:
        close_fds(answer.fds)
