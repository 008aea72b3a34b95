"""Sync: what a fence says about work, under every completion strategy that the device offers."""
# ruff: noqa: D103 - the demand of a case is its documentation

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from devipc.completion import create_fence, decode_fence_handle, encode_fence_handle, open_fence
from devipc.conformance.catalogue import case
from devipc.conformance.fencing import fence, followed, followed_here, following
from devipc.conformance.fixtures import NewPeer
from devipc.conformance.peers import Peer
from devipc.conformance.rig import Latch, Rig
from devipc.conformance.roles_sync import (
    close_fence,
    collect,
    copy_after,
    finish_stream,
    query,
    signal,
    signal_imported,
    synchronize,
    wait_briefly,
    wait_on_device,
)
from devipc.conformance.sharing import shared
from devipc.conformance.staging import content
from devipc.errors import CapabilityError, CompletionTimeout, DevIPCError, FencePoisoned, UsageError
from devipc.interfaces.backend import Device
from devipc.spi import close_fds
from devipc.types import HandleKind, PoisonReason, Strategy
from devipc.wire import Reader

MIB = 1 << 20
FENCE = "completion/fence.py: Fence"


@contextmanager
def behind_latch(rig: Rig) -> Iterator[Latch]:
    """Yield a latch on the rig's stream."""
    with rig.latch(rig.stream) as latch:
        yield latch


def must_hold(latch: Latch) -> None:
    """Skip when the latch has opened by itself before the observation: nothing was seen then."""
    if not latch.held:
        pytest.skip("the device was faster than its queue of copies; nothing was observed")


@case(
    "SYNC-066",
    "Work behind a wait for a fence sees the data that was written before the signal.",
    clause="completion/fence.py: Fence.wait",
)
def test_wait_then_data(rig: Rig, peer: Peer, strategy: Strategy, any_kind: HandleKind) -> None:
    nbytes = 2 * MIB
    with shared(rig, peer, nbytes, any_kind, seed=1) as (allocation, mapping):
        with followed(rig, peer, strategy) as (producer, follower), rig.new_staging(nbytes) as source:
            source.view[:] = content(66, nbytes)
            rig.transfer.copy(rig.stream, allocation.ptr, source.ptr, nbytes)
            producer.signal(rig.stream, 1)
            key = peer.call(copy_after, key=follower.key, value=1, mapping=mapping.key, nbytes=nbytes).body["key"]
            peer.call(collect, key=key, seed=66)


@case("SYNC-067", "A fence is not reached while the work before its signal is pending.", clause=FENCE)
def test_not_done_before(rig: Rig, peer: Peer, strategy: Strategy) -> None:
    with followed(rig, peer, strategy) as (producer, follower):
        with behind_latch(rig) as latch:
            producer.signal(rig.stream, 1)
            deadline = time.monotonic() + 0.05
            while time.monotonic() < deadline:
                there, here = follower.query(1), producer.query(1)
                must_hold(latch)
                assert not there, "the consumer was told that pending work is done"
                assert not here, "the producer was told that pending work is done"
            assert producer.issued == 1
        assert follower.synchronize(1, rig.deadline_s) < rig.deadline_s


@case("SYNC-068", "A fence is reached when its work is done, and stays reached.", clause=FENCE)
def test_done_after(rig: Rig, peer: Peer, strategy: Strategy) -> None:
    with followed(rig, peer, strategy) as (producer, follower):
        producer.signal(rig.stream, 1)
        follower.synchronize(1, rig.deadline_s)
        producer.signal(rig.stream, 2)
        follower.synchronize(2, rig.deadline_s)
        for _ in range(20):
            assert follower.query(1)
            assert follower.query(2)
        assert producer.value == 2


@case("SYNC-069", "A fence that was never signalled is not issued and not reached.", clause=FENCE)
def test_never_signalled(rig: Rig, peer: Peer, strategy: Strategy) -> None:
    with followed(rig, peer, strategy) as (producer, follower):
        body = peer.call(query, key=follower.key, value=1).body
        assert body == {"done": False, "issued": 0}
        assert not producer.query(1)
        assert producer.value == 0
        refusal = peer.refusal(synchronize, key=follower.key, value=1, limit_s=0.05)
        assert "CompletionTimeout" in refusal.types


@case(
    "SYNC-072",
    "A host that waits for a device is told in time, and reads what the device wrote before.",
    clause="completion/fence.py: Fence.synchronize",
)
def test_device_to_host(rig: Rig, peer: Peer, strategy: Strategy, any_kind: HandleKind) -> None:
    nbytes = MIB
    with shared(rig, peer, nbytes, any_kind, seed=1) as (allocation, mapping):
        with followed(rig, peer, strategy) as (producer, follower):
            rig.fill(allocation.ptr, nbytes, 72)
            with behind_latch(rig) as latch:
                producer.signal(rig.stream, 1)
                peer.start(synchronize, key=follower.key, value=1, limit_s=rig.deadline_s)
                time.sleep(0.05)
                latch.open()
            peer.result()
            mapping.expect(nbytes, 72)


@case(
    "SYNC-074",
    "The producer's process may follow its own fence by asking; a stream wait there is refused.",
    clause="completion/consumer.py: ConsumerFence.wait",
)
def test_same_process(rig: Rig, strategy: Strategy) -> None:
    with fence(rig, strategy) as producer:
        handle = producer.export()
        try:
            consumer = open_fence(rig.device, decode_fence_handle(Reader(encode_fence_handle(handle)), handle.fds))
        except DevIPCError:
            producer.drop_consumer(handle.line)
            return  # some drivers open no event of their own process; the refusal has a type
        finally:
            close_fds(handle.fds)
        try:
            producer.signal(rig.stream, 1)
            consumer.synchronize(1, rig.deadline_s)
            with pytest.raises(UsageError):
                consumer.wait(rig.stream, 1)
        finally:
            consumer.close()


@case(
    "SYNC-075",
    "When the producer closes, what was reached stays reached and everything else fails as closed.",
    clause="completion/fence.py: Fence.close",
)
def test_producer_closes_first(rig: Rig, new_peer: NewPeer, strategy: Strategy) -> None:
    maker = new_peer()
    with followed_here(rig, maker, strategy) as (key, consumer):
        maker.call(signal, key=key, value=3)
        consumer.synchronize(3, rig.deadline_s)
        maker.call(close_fence, key=key)
        assert consumer.query(3)
        assert consumer.value == 3
        with pytest.raises(FencePoisoned) as failed:
            consumer.query(4)
        assert failed.value.code == "closed"
    maker.kill()  # a maker that closes first may keep what its consumers have open, for as long as it lives


@case("SYNC-076", "A consumer that opens after the signal sees what was reached.", clause=FENCE)
def test_late_consumer(rig: Rig, peer: Peer, strategy: Strategy) -> None:
    with fence(rig, strategy) as producer:
        for value in (1, 2, 5):
            producer.signal(rig.stream, value)
            producer.synchronize(value, rig.deadline_s)
        follower = following(peer, producer)
        assert follower.query(5)
        assert not follower.query(6)
        producer.signal(rig.stream, 6)
        follower.synchronize(6, rig.deadline_s)
        peer.call(close_fence, key=follower.key)


@case("SYNC-077", "A consumer cannot signal a fence.", clause="completion/fence.py: Fence.signal")
def test_consumer_cannot_signal(rig: Rig, peer: Peer, strategy: Strategy) -> None:
    with followed(rig, peer, strategy) as (producer, follower):
        assert "UsageError" in peer.refusal(signal_imported, key=follower.key).types
        assert producer.issued == 0


@case(
    "SYNC-078",
    "A wait with a timeout returns in time as a timeout, and can be repeated until the work is done.",
    clause="completion/fence.py: Fence.synchronize",
)
def test_timeouts(rig: Rig, peer: Peer, strategy: Strategy) -> None:
    with followed(rig, peer, strategy) as (producer, follower):
        with behind_latch(rig) as latch:
            producer.signal(rig.stream, 1)
            for _ in range(3):
                started = time.monotonic()
                try:
                    producer.synchronize(1, 0.05)
                except CompletionTimeout:
                    assert time.monotonic() - started < 2.0
                else:
                    must_hold(latch)
                    pytest.fail("a wait for pending work ended without a timeout")
            ended = peer.call(wait_briefly, key=follower.key, value=1, limit_s=0.05).body["reached"]
            must_hold(latch)
            assert not ended, "a wait for pending work ended without a timeout"
        follower.synchronize(1, rig.deadline_s)


@case(
    "SYNC-090",
    "A strategy whose primitive is missing is refused by type and never replaced by another.",
    clause="completion/factory.py: create_fence",
)
def test_no_silent_replacement(rig: Rig) -> None:
    class WithoutSync:
        """The device, as if it had no sync interface."""

        sync = None

        def __getattr__(self, name: str) -> object:
            return getattr(rig.device, name)

    bare: Device = WithoutSync()  # type: ignore[assignment]
    for strategy in (Strategy.STREAM_MEMOP, Strategy.EVENT):
        with pytest.raises(CapabilityError):
            create_fence(bare, strategy)
    for strategy in (Strategy.POLLING, Strategy.HOST_FLAG):
        with create_fence(bare, strategy) as made:
            assert made.strategy is strategy
            made.signal(rig.stream, 1)
            made.synchronize(1, rig.deadline_s)


@case(
    "SYNC-207",
    "Poison ends the wait of every side with its reason.",
    clause="completion/fence.py: Fence.poison",
)
def test_poison(rig: Rig, peer: Peer, strategy: Strategy) -> None:
    with followed(rig, peer, strategy) as (producer, follower):
        peer.start(synchronize, key=follower.key, value=1, limit_s=rig.deadline_s)
        time.sleep(0.05)
        producer.poison(PoisonReason.CANCELLED)
        with pytest.raises(AssertionError, match="cancelled"):
            peer.result(timeout_s=5.0)
        with pytest.raises(FencePoisoned) as failed:
            producer.query(1)
        assert failed.value.code == "cancelled"


@case(
    "SYNC-095",
    "Poison by another process ends a wait that is pending on a device, while the awaited work still hangs.",
    clause="completion/fence.py: Fence.poison",
)
def test_poison_ends_device_wait(rig: Rig, peer: Peer, strategy: Strategy) -> None:
    with followed(rig, peer, strategy) as (producer, follower), rig.latch(rig.stream) as latch:
        producer.signal(rig.stream, 1)
        peer.call(wait_on_device, key=follower.key, value=1)
        must_hold(latch)
        producer.poison(PoisonReason.CANCELLED)
        assert peer.call(finish_stream, key=follower.key, value=1).body["code"] == "cancelled"


@case(
    "SYNC-097",
    "A coroutine awaits a fence as a thread waits for it: with the same values, limits and failures.",
    clause="completion/fence.py: Fence.reached",
)
def test_awaited(rig: Rig, peer: Peer, strategy: Strategy) -> None:
    with followed_here(rig, peer, strategy) as (key, consumer):
        with pytest.raises(CompletionTimeout):
            asyncio.run(consumer.reached(1, 0.05))

        async def reached() -> None:
            waiting = asyncio.create_task(consumer.reached(2, rig.deadline_s))
            await asyncio.to_thread(peer.call, signal, key=key, value=2)
            await waiting

        asyncio.run(reached())
        assert consumer.query(2)
        consumer.poison(PoisonReason.CANCELLED)
        with pytest.raises(FencePoisoned):
            asyncio.run(consumer.reached(3, rig.deadline_s))
