"""Room in the host tier: eviction, holds, leases, reservations, flushes."""

from __future__ import annotations

import time
from typing import Any

from devipc.errors import (
    ResourceExhausted,
)
from devipc.hicache.api import UNFENCED
from devipc.hicache.operations import Event, Status
from devipc.hicache.results import PageResult
from devipc.interfaces.backend import Device
from tests.hicache.scenario import done, filled, scenario
from tests.hicache.world import TIMEOUT_S, until, world

PAGE = 1024  # bytes of a page of a pool of SHAPE; its blocks have as many
SHAPE = {"layers": 4, "row": 32}


def tier_of(pages: int, kept_percent: int = 0) -> dict[str, int]:
    """Settings of a tier that holds so many pages of an attention pool, one by one, all of them for one client."""
    assert pages * PAGE % 4096 == 0
    sizes = {"tier_nbytes": pages * PAGE, "slab_nbytes": pages * PAGE, "extent_pages": 1}
    return {**sizes, "kept_percent": kept_percent}


@scenario
def a_paused_restore_keeps_its_pages_while_others_are_evicted(device: Device) -> None:
    with world(device, **tier_of(8)) as it:
        memory, client, other = it.attention_pool(**SHAPE), it.client(), it.client()
        assert memory.layout.page_nbytes == PAGE
        handle, foreign = it.register(client, memory), it.register(other, memory)
        assert it.tier.capacity(PAGE) == 8
        keys = filled(it, client, memory, handle, 4)
        lane: Any = it.engine.restores
        it.stall(lane)
        restore = client.restore(handle, keys, [10, 11, 12, 13], ready=UNFENCED)
        until(lambda: lane.flying == 1)
        for number in range(1000):
            chosen = it.keys(foreign, 1, seed=1000 + number)
            assert done(other.backup(foreign, [20], chosen, ready=UNFENCED)) == [PageResult.STORED]
        assert client.match(handle, keys) == 4
        status: Any = it.tier.status()
        assert status["evicted"] == 1000 - 4
        assert status["pages"] == 8
        it.resume(lane)
        done(restore)
        memory.check([10, 11, 12, 13], keys)


@scenario
def reservations_are_all_or_nothing(device: Device) -> None:
    """Sixteen backups of three pages through a tier of four all end; one of five can never fit."""
    with world(device, **tier_of(4)) as it:
        memory, client = it.attention_pool(**SHAPE, pages=60), it.client()
        handle = it.register(client, memory)
        lane: Any = it.engine.backups
        it.stall(lane)
        tickets = [
            client.backup(handle, range(3 * n + 1, 3 * n + 4), it.keys(handle, 3, seed=n), ready=UNFENCED)
            for n in range(16)
        ]
        until(lambda: lane.flying == 1)
        time.sleep(0.05)
        assert lane.flying == 1  # the second has not taken the one page that is left
        it.resume(lane)
        assert {result for ticket in tickets for result in done(ticket)} == {PageResult.STORED}
        never = client.backup(handle, range(1, 6), it.keys(handle, 5, seed=99), ready=UNFENCED)
        client.ping()
        error = never.wait(0).error
        assert isinstance(error, ResourceExhausted)
        assert error.code == "too_large"
        some = client.backup(handle, range(1, 6), it.keys(handle, 5, seed=98), ready=UNFENCED, partial=True)
        assert done(some) == [PageResult.STORED] * 4 + [PageResult.NO_ROOM]


@scenario
def no_room_is_explained(device: Device) -> None:
    with world(device, **tier_of(4)) as it:
        memory, client = it.attention_pool(**SHAPE), it.client()
        handle = it.register(client, memory)
        keys = filled(it, client, memory, handle, 4)
        lease = client.lookup(handle, keys)
        assert lease.reached(Event.LEASED, TIMEOUT_S)
        ticket = client.backup(handle, [9], it.keys(handle, 1, seed=1), ready=UNFENCED, timeout_s=0.1)
        outcome = ticket.wait(TIMEOUT_S)
        assert outcome.status is Status.TIMED_OUT
        assert outcome.error is not None
        assert outcome.error.code == "no_room"
        assert f"held by operation {lease.op}" in outcome.error.message
        later = client.backup(handle, [9], it.keys(handle, 1, seed=1), ready=UNFENCED)
        time.sleep(0.02)
        assert later.status is None
        client.release(lease)
        assert done(later) == [PageResult.STORED]


@scenario
def leases_end_with_their_owner(device: Device) -> None:
    with world(device) as it:
        memory, client, other = it.attention_pool(), it.client(), it.client()
        handle, foreign = it.register(client, memory), it.register(other, memory)
        keys = filled(it, client, memory, handle, 4)
        leases = [client.lookup(handle, keys) for _ in range(3)]
        mine = other.lookup(foreign, keys[:2])
        for one in (client, other):
            one.ping()
        status: Any = it.tier.status()
        assert status["holds"] == 4
        assert client.release(leases[0])
        assert not client.release(leases[0])
        assert leases[0].status is Status.COMPLETED
        client.ping()
        client.session.dying()  # what whoever watches processes calls
        status = it.tier.status()
        assert status["holds"] == 1
        assert mine.state == "leased"
        assert set(done(other.restore(foreign, keys[:2], [9, 10], ready=UNFENCED, lease=mine))) == {PageResult.RESTORED}
        assert mine.status is Status.COMPLETED
        status = it.tier.status()
        assert status["holds"] == 0
        late = client.lookup(handle, keys).wait(TIMEOUT_S)
        assert late.status is Status.REFUSED


@scenario
def an_expired_lease_is_no_miss(device: Device) -> None:
    with world(device, **tier_of(8)) as it:
        memory, client = it.attention_pool(**SHAPE), it.client()
        handle = it.register(client, memory)
        keys = filled(it, client, memory, handle, 4)
        lease = client.lookup(handle, keys, lease_s=0.05)
        assert lease.reached(Event.LEASED, TIMEOUT_S)
        assert lease.hit.all()
        assert lease.wait(TIMEOUT_S).status is Status.EXPIRED
        assert lease.hit.all()
        done(client.restore(handle, keys, [10, 11, 12, 13], ready=UNFENCED, lease=lease))
        memory.check([10, 11, 12, 13], keys)
        again = client.lookup(handle, keys, lease_s=0.05)
        assert again.wait(TIMEOUT_S).status is Status.EXPIRED
        for number in range(8):
            done(client.backup(handle, [20], it.keys(handle, 1, seed=50 + number), ready=UNFENCED))
        late = client.restore(handle, keys, [10, 11, 12, 13], ready=UNFENCED, lease=again).wait(TIMEOUT_S)
        assert late.status is Status.REFUSED
        assert late.count(PageResult.MISSING) == 4


@scenario
def a_flush_drops_what_is_on_its_way(device: Device) -> None:
    """A hundred backups and restores in flight, a flush, then they complete: nothing of before is found."""
    with world(device, max_flying=200) as it:
        memory, client, other = it.attention_pool(pages=120), it.client(), it.client()
        handle = it.register(client, memory)
        stranger = it.register(other, memory, name="another model")
        keys = filled(it, client, memory, handle, 4)
        done(other.backup(stranger, [1], it.keys(stranger, 1), ready=UNFENCED))
        lanes: Any = (it.engine.backups, it.engine.restores)
        for lane in lanes:
            it.stall(lane)
        chosen = [it.keys(handle, 1, seed=number) for number in range(1, 91)]
        backups = [client.backup(handle, [n], key, ready=UNFENCED) for n, key in enumerate(chosen, 1)]
        restores = [client.restore(handle, keys, range(91 + n, 120, 7)[:4], ready=UNFENCED) for n in range(7)]
        leases = [client.lookup(handle, keys) for _ in range(3)]
        until(lambda: lanes[0].flying == 90 and lanes[1].flying == 7)
        assert client.flush(handle) == 4
        fresh = it.keys(handle, 1, seed=500)
        after = client.backup(handle, [100], fresh, ready=UNFENCED)
        for lane in lanes:
            it.resume(lane)
        assert {result for ticket in backups for result in done(ticket)} == {PageResult.DROPPED}
        assert {result for ticket in restores for result in done(ticket)} == {PageResult.RESTORED}
        assert done(after) == [PageResult.STORED]
        assert client.match(handle, keys) == 0
        assert not any(client.match(handle, key) for key in chosen)
        assert client.match(handle, fresh) == 1
        assert other.match(stranger, it.keys(stranger, 1)) == 1
        late = client.restore(handle, keys, [1, 2, 3, 4], ready=UNFENCED, lease=leases[0]).wait(TIMEOUT_S)
        assert late.status is Status.REFUSED


@scenario
def small_operations_do_not_overtake_one_that_waits_for_room(device: Device) -> None:
    with world(device, **tier_of(4)) as it:
        memory, client = it.attention_pool(**SHAPE), it.client()
        handle = it.register(client, memory)
        keys = filled(it, client, memory, handle, 2)
        lease = client.lookup(handle, keys)
        large = client.backup(handle, [5, 6, 7], it.keys(handle, 3, seed=1), ready=UNFENCED)
        small = client.backup(handle, [8], it.keys(handle, 1, seed=2), ready=UNFENCED)
        time.sleep(0.05)
        assert large.status is None
        assert small.status is None
        client.release(lease)
        assert set(done(large) + done(small)) == {PageResult.STORED}


@scenario
def what_is_not_on_the_stream_yet_can_be_taken_back(device: Device) -> None:
    """Few operations are on a stream at a time; the others end at once when they are cancelled."""
    with world(device, max_flying=2) as it:
        memory, client = it.attention_pool(), it.client()
        handle = it.register(client, memory)
        keys = filled(it, client, memory, handle, 1)
        lane: Any = it.engine.restores
        it.stall(lane)
        tickets = [client.restore(handle, keys, [page], ready=UNFENCED) for page in range(2, 12)]
        until(lambda: lane.flying == 2)
        time.sleep(0.02)
        assert lane.flying == 2
        for ticket in tickets[2:]:
            ticket.cancel()
            assert ticket.wait(TIMEOUT_S).status is Status.CANCELLED
        assert tickets[0].status is tickets[1].status is None
        it.resume(lane)
        done(tickets[0])
        done(tickets[1])
        assert memory.load()[memory.where[5]].tolist() != memory.content(keys[0]).tolist()
