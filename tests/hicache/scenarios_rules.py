"""What is refused, and by which code: pages, pools, generations, too many operations."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from devipc.errors import (
    BoundsError,
    CapabilityError,
    CompletionTimeout,
    FencePoisoned,
    ResourceExhausted,
    UsageError,
)
from devipc.hicache.api import UNFENCED
from devipc.hicache.layout import PoolLayout
from devipc.hicache.operations import Event, Status
from devipc.hicache.results import PageResult
from devipc.interfaces.backend import Device
from tests.hicache.scenario import done, filled, refused, scenario
from tests.hicache.world import TIMEOUT_S, until, world


@scenario
def a_lookup_is_a_hint_and_a_prefetch_without_storage_reports_nothing(device: Device) -> None:
    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        handle = it.register(client, memory)
        keys = it.keys(handle, 2)
        prefetch = client.prefetch(handle, keys)
        outcome = prefetch.wait(TIMEOUT_S)
        assert outcome.status is Status.REFUSED
        assert isinstance(outcome.error, CapabilityError)
        assert outcome.error.code == "no_storage"
        assert not outcome.results.any()
        assert not prefetch.hit.any()
        nothing = client.lookup(handle, keys)
        assert nothing.wait(TIMEOUT_S).status is Status.COMPLETED
        assert not nothing.hit.any()


@scenario
def stale_generations_are_refused(device: Device) -> None:
    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        old = it.register(client, memory)
        keys = it.keys(old, 1)
        memory.fill([1], keys)
        done(client.backup(old, [1], keys, ready=UNFENCED))
        client.unregister(old)
        new = it.register(client, memory)
        for ticket in (
            client.backup(old, [1], keys, ready=UNFENCED),
            client.restore(old, keys, [2], ready=UNFENCED),
            client.lookup(old, keys),
            client.prefetch(old, keys),
        ):
            outcome = ticket.wait(TIMEOUT_S)
            assert outcome.status is Status.REFUSED
            assert outcome.error is not None
            assert outcome.error.code == "stale"
            # The number of the new pool with the generation of the old one: a request on its way through a change.
            mixed = dataclasses.replace(new, generation=old.generation)
        assert client.restore(mixed, keys, [2], ready=UNFENCED).wait(TIMEOUT_S).status is Status.REFUSED
        assert set(done(client.restore(new, keys, [2], ready=UNFENCED))) == {PageResult.RESTORED}


@scenario
def pages_outside_the_pool_never_reach_a_copy(device: Device) -> None:
    with world(device) as it:
        memory, client = it.attention_pool(pages=9), it.client()
        handle = it.register(client, memory)
        keys = it.keys(handle, 2)
        before = memory.load()
        for pages in ([0, 1], [8, 9], [-1, 3], [2**40, 1], [1, 2**62]):
            for ticket in (
                client.backup(handle, pages, keys, ready=UNFENCED),
                client.restore(handle, keys, pages, ready=UNFENCED),
            ):
                outcome = ticket.wait(TIMEOUT_S)
                assert outcome.status is Status.REFUSED
                assert isinstance(outcome.error, BoundsError)
        done(client.backup(handle, [1, 2], keys, ready=UNFENCED))
        twice = client.restore(handle, keys, [4, 4], ready=UNFENCED).wait(TIMEOUT_S)
        assert twice.error is not None
        assert twice.error.code == "duplicate"
        assert np.array_equal(memory.load(), before)


@scenario
def a_page_of_another_size_is_nobodys_hit(device: Device) -> None:
    """Whoever names what another client stored, by whatever keys, through a pool of larger pages, gets none of it."""
    with world(device, tier_nbytes=2**16, slab_nbytes=2**13) as it:
        memory, large = it.attention_pool(layers=4, row=32), it.attention_pool(layers=8, row=32)
        client, liar = it.client(), it.client()
        handle, lying = it.register(client, memory), it.register(liar, large)
        keys = filled(it, client, memory, handle, 4)
        spaces = [np.frombuffer(one.namespace, np.uint8) for one in (handle, lying)]
        named = keys ^ spaces[0] ^ spaces[1]
        own = filled(it, liar, large, lying, 1)
        large.poison([10, 11, 12])
        assert (client.match(handle, keys), liar.match(lying, named), liar.match(lying, own)) == (4, 0, 1)
        lookup = liar.lookup(lying, named)
        assert lookup.wait(TIMEOUT_S).status is Status.COMPLETED
        assert not lookup.hit.any()
        missed = liar.restore(lying, named[:2], [10, 11], ready=UNFENCED).wait(TIMEOUT_S)
        assert missed.status is Status.REFUSED
        assert missed.error is not None
        assert missed.error.code == "missing"
        both = np.concatenate((named[:1], own))
        some = done(liar.restore(lying, both, [11, 12], ready=UNFENCED, partial=True))
        assert some == [PageResult.MISSING, PageResult.RESTORED]
        assert large.is_poisoned([10, 11])
        large.check([12], own)
        late = liar.backup(lying, [1, 2], both[[1, 0]], ready=UNFENCED)
        assert done(late) == [PageResult.PRESENT, PageResult.DROPPED]
        done(client.restore(handle, keys, [10, 11, 12, 13], ready=UNFENCED))
        memory.check([10, 11, 12, 13], keys)


@scenario
def a_page_belongs_to_its_restore_until_that_ends(device: Device) -> None:
    with world(device) as it:
        memory, client, other = it.attention_pool(), it.client(), it.client()
        handle = it.register(client, memory)
        keys = it.keys(handle, 3)
        memory.fill([1, 2, 3], keys)
        done(client.backup(handle, [1, 2, 3], keys, ready=UNFENCED))
        lane: Any = it.engine.restores
        it.stall(lane)
        ticket = client.restore(handle, keys, [5, 6, 7], ready=UNFENCED)
        until(lambda: lane.flying == 1)
        assert ticket.reached(Event.ADMITTED, TIMEOUT_S)
        assert ticket.cancel()
        assert ticket.state == "abandoned"
        assert ticket.status is None
        again = client.restore(handle, keys[:1], [6], ready=UNFENCED).wait(TIMEOUT_S)
        assert again.error is not None
        assert again.error.code == "page_busy"
        it.resume(lane)
        assert ticket.wait(TIMEOUT_S).status is Status.CANCELLED
        assert set(done(client.restore(handle, keys[:1], [6], ready=UNFENCED))) == {PageResult.RESTORED}
        memory.check([6], keys[:1])
        del other


@scenario
def more_than_agreed_is_busy(device: Device) -> None:
    with world(device, max_ops=3) as it:
        memory, client, other = it.attention_pool(), it.client(), it.client()
        handle, stream = it.register(client, memory), it.stream()
        foreign = it.register(other, memory)
        it.gate.stall(stream)
        it.transfer.copy(stream, memory.built.exports[0][0], memory.built.exports[0][0], 1)
        tickets = [client.backup(handle, [page], it.keys(handle, 1, seed=page), ready=stream) for page in range(1, 6)]
        client.ping()
        assert [ticket.status for ticket in tickets] == [None] * 3 + [Status.REFUSED] * 2
        error = tickets[4].wait(0).error
        assert error is not None
        assert error.code == "busy"
        fence = tickets[4].fence
        assert fence is not None
        refused(lambda: fence.wait(it.staging.stream), FencePoisoned, "cancelled")
        assert error.retryable
        # Whoever is behind another client's limit is not.
        done(other.backup(foreign, [9], it.keys(foreign, 1, seed=50), ready=UNFENCED))
        it.gate.resume(stream)
        for ticket in tickets[:3]:
            done(ticket)
        done(client.backup(handle, [1], it.keys(handle, 1, seed=99), ready=UNFENCED))


@scenario
def a_pool_is_let_go_when_nothing_uses_it(device: Device) -> None:
    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        handle = it.register(client, memory)
        lane: Any = it.engine.backups
        it.stall(lane)
        ticket = client.backup(handle, [1], it.keys(handle, 1), ready=UNFENCED)
        until(lambda: lane.flying == 1)
        refused(lambda: client.unregister(handle, timeout_s=0.05), CompletionTimeout, "timeout")
        late = client.backup(handle, [2], it.keys(handle, 1, seed=2), ready=UNFENCED)
        assert late.wait(TIMEOUT_S).status is Status.REFUSED
        it.resume(lane)
        client.unregister(handle, timeout_s=TIMEOUT_S)
        assert set(done(ticket)) == {PageResult.STORED}


@scenario
def pools_that_do_not_fit_are_refused_at_registration(device: Device) -> None:
    with world(device, slab_nbytes=4096) as it:
        memory, client = it.attention_pool(row=200), it.client()
        assert memory.layout.page_nbytes > 4096
        refused(lambda: it.register(client, memory), ResourceExhausted, "too_large")
        small = it.attention_pool()
        namespace = dataclasses.replace(it.namespace(small), layout=memory.layout.content_bytes())
        refused(lambda: client.register_pool(small.built, namespace=namespace), UsageError, "namespace")
        short = dataclasses.replace(small.built, exports=small.built.exports[:-1])
        refused(lambda: client.register_pool(short, namespace=it.namespace(small)), UsageError, "chunks")
        layout = small.layout
        grown = tuple(dataclasses.replace(chunk, nbytes=chunk.nbytes * 1000) for chunk in layout.chunks)
        big = PoolLayout(layout.page_count, grown, layout.components, layout.first_page)
        exports = tuple((ptr, nbytes * 1000) for ptr, nbytes in small.built.exports)
        lying = dataclasses.replace(small.built, layout=big, exports=exports)
        refused(lambda: client.register_pool(lying, namespace=it.namespace(small)), BoundsError, "bounds")
