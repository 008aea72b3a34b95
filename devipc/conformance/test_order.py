"""Order: generations, hand-overs and values near the end of the range."""
# ruff: noqa: D103 - the demand of a case is its documentation

from __future__ import annotations

import contextlib
import itertools
import random

import pytest

from devipc.conformance.catalogue import case
from devipc.conformance.fencing import fence, followed, followed_here, following
from devipc.conformance.fixtures import NewPeer
from devipc.conformance.peers import Peer
from devipc.conformance.rig import Rig
from devipc.conformance.roles_sync import close_fence, collect, copy_after, follow, hand_back
from devipc.conformance.sharing import shared
from devipc.conformance.staging import content
from devipc.errors import UsageError
from devipc.types import MAX_FENCE_VALUE, HandleKind, Strategy

KIB, MIB = 1 << 10, 1 << 20


def grows_to(seen: list[int], last: int) -> None:
    assert all(earlier < later for earlier, later in itertools.pairwise(seen)), f"values went back: {seen}"
    assert seen[-1] == last


@case(
    "ORD-081",
    "Over 100 generations a consumer never sees a value that is older than one it saw.",
    clause="completion/fence.py: Fence.value",
)
def test_generations(rig: Rig, peer: Peer, strategy: Strategy) -> None:
    with followed(rig, peer, strategy) as (producer, follower):
        peer.start(follow, key=follower.key, last=100)
        for value in range(1, 101):
            producer.signal(rig.stream, value, timeout_s=rig.deadline_s)
        grows_to(peer.result().body["seen"], 100)


@case(
    "ORD-082",
    "Values around 2^31, 2^32 and up to 2^62-1 are reached in order; larger and lower ones are refused.",
    clause="types.py: MAX_FENCE_VALUE",
)
def test_large_values(rig: Rig, peer: Peer, strategy: Strategy) -> None:
    values = [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**61, MAX_FENCE_VALUE]
    with followed(rig, peer, strategy) as (producer, follower):
        for value in values:
            producer.signal(rig.stream, value)
            follower.synchronize(value, rig.deadline_s)
            if value < MAX_FENCE_VALUE:
                assert not follower.query(value + 1)
        for wrong in (MAX_FENCE_VALUE, MAX_FENCE_VALUE + 1, 2**63, 0, -1):
            with pytest.raises(UsageError):
                producer.signal(rig.stream, wrong)


@case("ORD-084", "Several consumers see the same values in the same order.", clause="completion/fence.py: Fence.value")
def test_several_consumers(rig: Rig, new_peer: NewPeer, strategy: Strategy) -> None:
    peers = [new_peer(), new_peer()]
    with fence(rig, strategy) as producer:
        followers = [following(peer, producer) for peer in peers]
        for follower in followers:
            follower.peer.start(follow, key=follower.key, last=50)
        for value in range(1, 51):
            producer.signal(rig.stream, value, timeout_s=rig.deadline_s)
        for follower in followers:
            grows_to(follower.peer.result().body["seen"], 50)
        for follower in followers:
            follower.peer.call(close_fence, key=follower.key)


@case(
    "ORD-085",
    "Written, signalled, waited for and read in turns of many sizes: old bytes are never seen.",
    clause="completion/fence.py: Fence.wait",
)
def test_never_old_bytes(rig: Rig, peer: Peer, strategy: Strategy, any_kind: HandleKind, rounds: int) -> None:
    largest = MIB
    sizes = random.Random(85)
    with shared(rig, peer, largest, any_kind, seed=1) as (allocation, mapping):
        with followed(rig, peer, strategy) as (producer, follower), rig.new_staging(largest) as source:
            for n in range(1, rounds + 1):
                nbytes = sizes.choice((64, 4 * KIB, 64 * KIB, sizes.randrange(1, largest)))
                source.view[:nbytes] = content(n, nbytes)
                rig.transfer.copy(rig.stream, allocation.ptr, source.ptr, nbytes)
                producer.signal(rig.stream, n, timeout_s=rig.deadline_s)
                key = peer.call(copy_after, key=follower.key, value=n, mapping=mapping.key, nbytes=nbytes).body["key"]
                peer.call(collect, key=key, seed=n)


@case(
    "ORD-086",
    "Memory that goes to and fro between two processes by two fences shows each its own turn.",
    clause="completion/fence.py: Fence.wait",
)
def test_hand_back(rig: Rig, peer: Peer, strategy: Strategy, any_kind: HandleKind) -> None:
    nbytes, rounds = 64 * KIB, 24
    with (
        shared(rig, peer, nbytes, any_kind, seed=99) as (allocation, mapping),
        followed(rig, peer, strategy) as (forth, follower),
        followed_here(rig, peer, strategy) as (back_key, back),
        rig.new_staging(nbytes * rounds) as source,
    ):
        for n in range(1, rounds + 1):
            source.view[(n - 1) * nbytes : n * nbytes] = content(n, nbytes)
        keys = [follower.key, back_key, mapping.key]
        peer.start(hand_back, keys=keys, nbytes=nbytes, rounds=rounds)
        for n in range(1, rounds + 1):
            if n > 1:
                back.wait(rig.stream, n - 1, timeout_s=rig.deadline_s, block_timeout_s=rig.deadline_s)
            rig.transfer.copy(rig.stream, allocation.ptr, source.ptr + (n - 1) * nbytes, nbytes)
            forth.signal(rig.stream, n)
        peer.result(timeout_s=3 * rig.deadline_s)
        rig.finish(rig.stream, "the last round")
        back.synchronize(rounds, rig.deadline_s)


@case(
    "ORD-083",
    "A second stream cannot signal while values of the first are pending, and takes over when none is.",
    clause="completion/producer.py: ProducerFence.signal",
)
def test_two_streams(rig: Rig, peer: Peer, strategy: Strategy) -> None:
    with followed(rig, peer, strategy) as (producer, follower), rig.new_stream() as other:
        with rig.latch(rig.stream) as latch:
            producer.signal(rig.stream, 1)
            refused = False
            try:
                producer.signal(other, 2)
            except UsageError:
                refused = True
            if not latch.held:
                pytest.skip("the device was faster than its queue of copies; nothing was observed")
            assert refused, "a second stream signalled while a value of the first was pending"
        follower.synchronize(1, rig.deadline_s)
        producer.synchronize(1, rig.deadline_s)
        producer.signal(other, 3)
        follower.synchronize(3, rig.deadline_s)


@case(
    "ORD-201",
    "Twenty fences that are signalled in turns on four streams keep their values apart.",
    clause="completion/fence.py: Fence.value",
)
def test_many_fences(rig: Rig, peer: Peer, strategy: Strategy) -> None:
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(rig.new_stream()) for _ in range(4)]
        fences = [stack.enter_context(followed(rig, peer, strategy)) for _ in range(20)]
        for step in range(1, 4):
            for index, (producer, _) in enumerate(fences):
                producer.signal(streams[index % 4], step * (index + 1))
        for index, (producer, follower) in enumerate(fences):
            follower.synchronize(3 * (index + 1), rig.deadline_s)
            assert not follower.query(3 * (index + 1) + 1)
            assert producer.value == 3 * (index + 1)


@case(
    "ORD-202",
    "A value that was passed over is reached with the next larger one, and not before.",
    clause="completion/fence.py: Fence.query",
)
def test_gaps(rig: Rig, peer: Peer, strategy: Strategy) -> None:
    with followed(rig, peer, strategy) as (producer, follower):
        producer.signal(rig.stream, 10)
        follower.synchronize(10, rig.deadline_s)
        assert all(follower.query(value) for value in (1, 5, 9, 10))
        assert not follower.query(11)
        producer.signal(rig.stream, 20)
        follower.synchronize(15, rig.deadline_s)
        assert follower.query(20)
