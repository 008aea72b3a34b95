"""Fences in a few words, as :mod:`devipc.conformance.sharing` does it for memory.

Owns no verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from devipc.completion import (
    ConsumerFence,
    Fence,
    ProducerFence,
    create_fence,
    decode_fence_handle,
    encode_fence_handle,
    open_fence,
)
from devipc.conformance import roles_sync
from devipc.conformance.peers import Peer
from devipc.conformance.rig import Rig
from devipc.conformance.staging import given_back
from devipc.spi import close_fds
from devipc.types import Strategy
from devipc.wire import Reader

__all__ = ["Follower", "fence", "followed", "followed_here", "following"]


@dataclass(frozen=True, slots=True)
class Follower:
    """A fence that a peer has opened."""

    peer: Peer
    key: int

    def query(self, value: int) -> bool:
        """Let the peer ask."""
        return bool(self.peer.call(roles_sync.query, key=self.key, value=value).body["done"])

    def synchronize(self, value: int, timeout_s: float) -> float:
        """Let the peer wait; return how long it took there."""
        body = self.peer.call(roles_sync.synchronize, key=self.key, value=value, limit_s=timeout_s).body
        return float(body["seconds"])


@contextmanager
def fence(rig: Rig, strategy: Strategy) -> Iterator[ProducerFence]:
    """Yield a fence of this process."""
    made = create_fence(rig.device, strategy)
    with given_back(lambda: made.close(1.0)):
        yield made


def following(peer: Peer, producer: Fence) -> Follower:
    """Let the peer open a fence of this process."""
    handle = producer.export()
    try:
        text = encode_fence_handle(handle).hex()
        return Follower(peer, peer.call(roles_sync.follow_fence, fds=handle.fds, handle=text).body["key"])
    finally:
        close_fds(handle.fds)


@contextmanager
def followed(rig: Rig, peer: Peer, strategy: Strategy) -> Iterator[tuple[ProducerFence, Follower]]:
    """Yield a fence of this process and the peer's view of it; the peer closes first."""
    with fence(rig, strategy) as producer:
        follower = following(peer, producer)
        yield producer, follower
        if peer.usable:
            peer.call(roles_sync.close_fence, key=follower.key)


@contextmanager
def followed_here(rig: Rig, peer: Peer, strategy: Strategy) -> Iterator[tuple[int, ConsumerFence]]:
    """Yield the key of a fence that the peer made, and this process's view of it."""
    answer = peer.call(roles_sync.make_fence, strategy=strategy.value)
    try:
        handle = decode_fence_handle(Reader(bytes.fromhex(answer.body["handle"])), answer.fds)
        consumer = open_fence(rig.device, handle)
    finally:
        close_fds(answer.fds)
    with given_back(lambda: consumer.close(1.0)):
        yield answer.body["key"], consumer
