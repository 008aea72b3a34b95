"""What comes back is what was stored: pools of several shapes, clients, fences and ready points."""

from __future__ import annotations

import os
import random
import resource
import threading
import time
from typing import Any, cast

import numpy as np

from devipc.errors import (
    FencePoisoned,
)
from devipc.hicache.api import UNFENCED
from devipc.hicache.operations import Event, Status
from devipc.hicache.results import PageResult
from devipc.interfaces.backend import Device
from tests.hicache.scenario import done, refused, scenario
from tests.hicache.world import TIMEOUT_S, until, world


@scenario
def two_clients_and_two_pools_get_back_what_they_stored(device: Device) -> None:
    """Random pages in random order; every restore goes to other, poisoned pages, also another client's."""
    choose = np.random.default_rng(5)
    with world(device) as it:
        memories = [it.attention_pool(), it.mla_pool()]
        others = [it.attention_pool(), it.mla_pool()]
        first, second = it.client(), it.client()
        handles = [it.register(first, memory) for memory in memories]
        borrowed = [it.register(second, memory) for memory in others]
        stream = it.stream()
        for round_ in range(6):
            for memory, other, handle, borrow in zip(memories, others, handles, borrowed, strict=True):
                count = int(choose.integers(1, 16))
                keys = it.keys(handle, count, seed=round_)
                pages = choose.permutation(np.arange(1, memory.layout.page_count))[:count]
                if round_ % 2:
                    pages = np.sort(pages)
                memory.fill(pages, keys)
                backup = first.backup(handle, pages, keys, ready=stream)
                assert backup.reached(Event.SOURCE_RELEASED, TIMEOUT_S)
                memory.poison(pages)
                assert set(done(backup)) == {PageResult.STORED}
                for client, target, known in ((first, memory, handle), (second, other, borrow)):
                    assert client.match(known, keys) == count
                    places = choose.permutation(np.arange(1, target.layout.page_count))[:count]
                    target.poison(places)
                    restore = client.restore(known, keys, places, ready=stream)
                    assert set(done(restore)) == {PageResult.RESTORED}
                    target.check(places, keys)


@scenario
def rows_with_gaps_and_woven_planes(device: Device) -> None:
    with world(device) as it:
        memory, client = it.padded_pool(), it.client()
        handle = it.register(client, memory)
        assert [one.code for one in handle.advice] == ["padded_rows"]
        keys, pages = it.keys(handle, 7), [3, 4, 5, 11, 9, 8, 19]
        memory.fill(pages, keys)
        done(client.backup(handle, pages, keys, ready=UNFENCED))
        memory.poison(range(20))
        done(client.restore(handle, keys, [0, 1, 7, 8, 13, 12, 11], ready=UNFENCED))
        memory.check([0, 1, 7, 8, 13, 12, 11], keys)
        assert memory.is_poisoned([2, 3, 4, 5, 6, 9, 10, 14])


@scenario
def no_copy_crosses_a_chunk_of_the_arena(device: Device) -> None:
    """Registrations of 16 KiB, stored runs of all lengths over all of them; a device refuses a copy over two."""
    with world(device, tier_nbytes=2**17, chunk_nbytes=2**14, slab_nbytes=2**13) as it:
        memory, client = it.attention_pool(pages=60), it.client()
        handle = it.register(client, memory)
        capacity = it.tier.capacity(memory.layout.page_nbytes)
        assert capacity > 50
        for number in range(12):
            keys = it.keys(handle, 29, seed=number)
            memory.fill(range(1, 30), keys)
            done(client.backup(handle, range(1, 30), keys, ready=UNFENCED))
            memory.poison(range(30, 60))
            done(client.restore(handle, keys, range(30, 59), ready=UNFENCED))
            memory.check(range(30, 59), keys)


@scenario
def namespaces_do_not_mix(device: Device) -> None:
    """Keys are bound to model, revision and layout, also when a client makes the same keys for two models."""
    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        mine, foreign = it.register(client, memory), it.register(client, memory, name="another model")
        keys = it.keys(mine, 3)
        memory.fill([1, 2, 3], keys)
        done(client.backup(mine, [1, 2, 3], keys, ready=UNFENCED))
        assert client.match(mine, keys) == 3
        assert client.match(foreign, keys) == 0
        missed = client.restore(foreign, keys, [5, 6, 7], ready=UNFENCED).wait(TIMEOUT_S)
        assert missed.status is Status.REFUSED
        assert missed.error is not None
        assert missed.error.code == "missing"


@scenario
def layers_arrive_group_by_group(device: Device) -> None:
    """A stream that waits for the first layer may run before the last one is there."""
    with world(device) as it:
        memory, client = it.mla_pool(), it.client()
        handle, stream = it.register(client, memory), it.stream()
        assert [len(group) for group in handle.groups] == [1, 2, 4, 8, 2]
        keys, pages = it.keys(handle, 8), list(range(1, 9))
        memory.fill(pages, keys)
        done(client.backup(handle, pages, keys, ready=stream))
        memory.poison(pages)
        lane: Any = it.engine.restores
        # A marker of ours in front of everything, which the restore's copies then run behind.
        it.stall(lane)
        ticket = client.restore(handle, keys, pages, ready=stream)
        assert ticket.reached(Event.ADMITTED, TIMEOUT_S)
        assert ticket.hit.all()
        fence = ticket.fence
        assert fence is not None
        out = it.staging
        ptr, nbytes = memory.built.exports[0]

        def follow() -> None:
            for layer in (0, 3, 16):
                fence.wait(stream, layer=layer)
            it.transfer.copy(stream, out._registration.device_ptr, ptr, nbytes)

        follower = threading.Thread(target=follow)  # which is kept where no device waits by itself
        follower.start()
        time.sleep(0.05)
        assert not fence.query(layer=0)
        assert ticket.status is None
        it.resume(lane)
        fence.synchronize(layer=0, timeout_s=TIMEOUT_S)
        fence.synchronize(timeout_s=TIMEOUT_S)
        follower.join(TIMEOUT_S)
        it.transfer.synchronize_stream(stream)
        image = out.bytes[:nbytes].copy()
        for page, key in zip(pages, keys, strict=True):
            assert np.array_equal(image[memory.where[page]], memory.content(key))
        assert set(done(ticket)) == {PageResult.RESTORED}
        fence.wait(stream, layer=5)  # after the end: nothing to wait for
        assert fence.query()


@scenario
def a_backup_waits_for_the_writer_and_a_restore_for_the_reader(device: Device) -> None:
    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        handle, writer = it.register(client, memory), it.stream()
        keys = it.keys(handle, 4)
        memory.fill([1, 2, 3, 4], keys)
        done(client.backup(handle, [1, 2, 3, 4], keys, ready=UNFENCED))
        for round_ in range(20):
            # The writer's work is queued and held back: a copy that did not wait would see the old bytes.
            fresh = it.keys(handle, 1, seed=100 + round_)
            memory.poison([9])
            old = memory.load()
            ptr, _ = memory.built.exports[0]
            target = int(memory.where[9][0])
            wanted = memory.content(fresh[0])[0]
            it.gate.stall(writer)
            it.staging.bytes[-1] = wanted
            last = it.staging._registration.device_ptr + len(it.staging.bytes) - 1
            it.transfer.copy(writer, ptr + target, last, 1)
            ticket = client.backup(handle, [9], fresh, ready=writer)
            later = client.restore(handle, keys, [10, 11, 12, 13], ready=writer)
            client.ping()
            assert ticket.status is None
            assert later.state == "admitted"
            assert np.array_equal(memory.load(), old)
            it.gate.resume(writer)
            done(ticket)
            done(later)
            memory.check([10, 11, 12, 13], keys)
            done(client.restore(handle, fresh, [20], ready=UNFENCED))
            image = memory.load()[memory.where[20]]
            assert image[0] == wanted
            assert (image[1:] == old[memory.where[9]][1:]).all()


@scenario
def more_points_of_a_stream_than_a_fence_holds(device: Device) -> None:
    """Behind a stream that stands still, and as many that are refused, at which no engine looks."""
    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        handle, stream = it.register(client, memory), it.stream()
        keys, missing = it.keys(handle, 20), it.keys(handle, 1, seed=1)
        memory.fill(range(1, 21), keys)
        done(client.backup(handle, [25], it.keys(handle, 1, seed=2), ready=stream))
        for _ in range(20):
            refusal = client.restore(handle, missing, [26], ready=stream).wait(TIMEOUT_S)
            assert refusal.status is Status.REFUSED
        it.gate.stall(stream)
        it.transfer.copy(stream, memory.built.exports[0][0], memory.built.exports[0][0], 1)
        tickets = [client.backup(handle, [page], keys[page - 1 : page], ready=stream) for page in range(1, 21)]
        client.ping()
        assert [ticket.status for ticket in tickets] == [None] * 20
        it.gate.resume(stream)
        for ticket in tickets:
            assert done(ticket) == [PageResult.STORED]
        memory.poison(range(1, 21))
        done(client.restore(handle, keys, range(1, 21), ready=stream))
        memory.check(range(1, 21), keys)


@scenario
def a_ready_point_that_fails_discards(device: Device) -> None:
    class Poisoned:
        def reached(self) -> bool:
            raise FencePoisoned("the writer died", code="peer_died")

    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        handle = it.register(client, memory)
        keys = it.keys(handle, 2)
        memory.fill([1, 2], keys)
        backup = client.backup(handle, [1, 2], keys, ready=Poisoned()).wait(TIMEOUT_S)
        assert backup.status is Status.DISCARDED
        assert backup.error is not None
        assert backup.error.code == "peer_died"
        assert client.match(handle, keys) == 0
        done(client.backup(handle, [1, 2], keys, ready=UNFENCED))
        memory.poison([5, 6])
        strange: Any = type("Strange", (), {"reached": lambda _self: 1 // 0})()
        trouble = client.restore(handle, keys, [5, 6], ready=strange).wait(TIMEOUT_S)
        assert trouble.status is Status.DISCARDED
        assert trouble.error is not None
        assert "ZeroDivisionError" in trouble.error.message
        restore = client.restore(handle, keys, [5, 6], ready=Poisoned())
        assert restore.wait(TIMEOUT_S).status is Status.DISCARDED
        assert memory.is_poisoned([5, 6])
        assert restore.fence is not None
        refused(restore.fence.query, FencePoisoned, "cancelled")


@scenario
def nothing_is_published_before_its_restores_are_confirmed(device: Device) -> None:
    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        handle, stream = it.register(client, memory), it.stream()
        keys, later = it.keys(handle, 2), it.keys(handle, 4, seed=1)
        memory.fill([1, 2, 3, 4, 5, 6], np.concatenate((keys, later)))
        done(client.backup(handle, [1, 2], keys, ready=UNFENCED))
        lane: Any = it.engine.restores
        for good in (True, False):
            it.stall(lane)
            restore = client.restore(handle, keys, [10, 11], ready=stream)
            until(lambda: lane.flying == 1)
            chosen = later[:2] if good else later[2:]
            backup = client.backup(handle, [3, 4] if good else [5, 6], chosen, ready=stream, after=[restore])
            assert backup.reached(Event.SOURCE_RELEASED, TIMEOUT_S)
            assert backup.status is None
            assert client.match(handle, chosen) == 0
            if not good:
                restore.cancel()
                until(lambda: "restore:cancelling" in cast(Any, client.status())["operations"])
            it.resume(lane)
            outcome = backup.wait(TIMEOUT_S)
            assert restore.wait(TIMEOUT_S).status is (Status.COMPLETED if good else Status.CANCELLED)
            assert outcome.status is (Status.COMPLETED if good else Status.DISCARDED)
            assert client.match(handle, chosen) == (2 if good else 0)
        manual = client.backup(handle, [5, 6], later[2:], ready=stream, confirm=False)
        assert manual.reached(Event.SOURCE_RELEASED, TIMEOUT_S)
        assert manual.confirm()
        assert set(done(manual)) == {PageResult.STORED}
        assert not manual.confirm()
        assert not manual.cancel()


@scenario
def partial_hits_are_said_and_not_hidden(device: Device) -> None:
    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        handle = it.register(client, memory)
        keys = it.keys(handle, 6)
        memory.fill([1, 2, 3, 4], keys[[0, 1, 3, 5]])
        done(client.backup(handle, [1, 2, 3, 4], keys[[0, 1, 3, 5]], ready=UNFENCED))
        assert client.match(handle, keys) == 2
        memory.poison(range(10, 16))
        whole = client.restore(handle, keys, range(10, 16), ready=UNFENCED).wait(TIMEOUT_S)
        assert whole.status is Status.REFUSED
        assert whole.count(PageResult.HIT) == 4
        assert whole.count(PageResult.MISSING) == 2
        assert memory.is_poisoned(range(10, 16))
        some = client.restore(handle, keys, range(10, 16), ready=UNFENCED, partial=True)
        hit, miss = PageResult.RESTORED, PageResult.MISSING
        assert done(some) == [hit, hit, miss, hit, miss, hit]
        memory.check([10, 11, 13, 15], keys[[0, 1, 3, 5]])
        assert memory.is_poisoned([12, 14])
        none = client.restore(handle, it.keys(handle, 2, seed=9), [20, 21], ready=UNFENCED, partial=True)
        assert none.wait(TIMEOUT_S).status is Status.REFUSED


@scenario
def what_a_backup_finds_there_is_not_copied_again(device: Device) -> None:
    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        handle = it.register(client, memory)
        keys = it.keys(handle, 3)
        memory.fill([1, 2, 3], keys)
        done(client.backup(handle, [2], keys[1:2], ready=UNFENCED))
        moved = it.engine.backups.moved_nbytes
        assert done(client.backup(handle, [1, 2, 3], keys, ready=UNFENCED)) == [
            PageResult.STORED,
            PageResult.PRESENT,
            PageResult.STORED,
        ]
        assert it.engine.backups.moved_nbytes - moved == 2 * memory.layout.page_nbytes
        assert set(done(client.backup(handle, [1, 2, 3], keys, ready=UNFENCED))) == {PageResult.PRESENT}


@scenario
def flat_under_many_operations(device: Device) -> None:
    """Memory, descriptors and driver objects stay where they are over thousands of operations."""
    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        handle, stream = it.register(client, memory), it.stream()

        def some(rounds: int) -> None:
            for number in range(rounds):
                keys = it.keys(handle, 4, seed=number)
                done(client.backup(handle, [1, 2, 3, 4], keys, ready=stream))
                lease = client.lookup(handle, keys)
                done(client.restore(handle, keys, [5, 6, 7, 8], ready=stream, lease=lease))
                client.invalidate(handle, keys)
                client.tickets.clear()
                client.record.told.clear()
                client.record.engine_ends.clear()
                client.record.client_ends.clear()

        some(200)
        markers = it.deployment.markers_made()
        fds, peak = len(os.listdir("/proc/self/fd")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        some(600)
        assert len(os.listdir("/proc/self/fd")) == fds
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 4096
        assert it.deployment.markers_made() == markers
        assert client.status()["open_tickets"] == 0
        until(lambda: len(it.engine.restores._work) == len(it.engine.backups._work) == 0)


@scenario
def two_page_sizes_share_the_tier(device: Device) -> None:
    with world(device, tier_nbytes=2**16, slab_nbytes=2**13) as it:
        memories = [it.attention_pool(), it.mla_pool(), it.padded_pool()]
        client = it.client()
        handles = [it.register(client, memory) for memory in memories]
        choose = random.Random(2)
        for number in range(150):
            which = choose.randrange(3)
            memory, handle = memories[which], handles[which]
            keys = it.keys(handle, choose.randint(1, 4), seed=number)
            pages = [1, 2, 3, 4][: len(keys)]
            memory.fill(pages, keys)
            assert set(done(client.backup(handle, pages, keys, ready=UNFENCED))) == {PageResult.STORED}
            targets = [10, 11, 12, 13][: len(keys)]
            memory.poison(targets)
            done(client.restore(handle, keys, targets, ready=UNFENCED))
            memory.check(targets, keys)
        it.tier.audit()
        status: Any = it.tier.status()
        assert status["evicted"] > 100
