"""What fails: copies, pinning, streams that stand still, races, the engine itself."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from devipc.errors import (
    CompletionTimeout,
    DriverError,
    ResourceExhausted,
    UsageError,
)
from devipc.hicache.api import UNFENCED
from devipc.hicache.builders import BuiltPool
from devipc.hicache.client.ticket import Ticket
from devipc.hicache.layout import Component, Plane, PoolChunk, PoolLayout, Rule
from devipc.hicache.operations import Event, Status
from devipc.hicache.results import Outcome, PageResult
from devipc.interfaces.backend import Device
from tests.hicache.deployment import INPROC, chosen
from tests.hicache.scenario import done, filled, refused, scenario
from tests.hicache.world import TIMEOUT_S, Gate, PoolMemory, World, until, world


@scenario
def a_page_is_a_bundle_of_all_components(device: Device) -> None:
    """KV and its side data come back together or not at all, whichever copy fails."""
    with world(device) as it:
        kv, side = it.memory.allocate(64 * 64), it.memory.allocate(64 * 16)
        parts = (
            Component("kv", Rule.FULL_ATTENTION, 2, 2, (Plane(0, 0, 0, 24, 32, 64),)),
            Component("index", Rule.FULL_ATTENTION, 2, 1, (Plane(1, 1, 0, 10, 10, 16),)),
        )
        kind = it.memory.describe(kv.ptr).exportable[0]
        layout = PoolLayout(64, (PoolChunk(64 * 64, kind), PoolChunk(64 * 16, kind)), parts)
        built = BuiltPool(layout, ((kv.ptr, 64 * 64), (side.ptr, 64 * 16)))
        memory = PoolMemory(it.staging, built, [kv, side])
        it.pools.append(memory)
        client = it.client()
        handle = it.register(client, memory)
        keys = it.keys(handle, 4)
        memory.fill([1, 2, 3, 4], keys)
        # How many copies there are is the planner's business: each is refused once, with all behind it.

        def refused_in_turn(move: Callable[[], Ticket], found: int) -> None:
            outcomes: list[Outcome] = []
            while not outcomes or outcomes[-1].status is Status.FAILED:
                assert client.match(handle, keys) == found
                it.deployment.refuse_copies(len(outcomes) + 1, 50)
                outcomes.append(move().wait(TIMEOUT_S))
                it.deployment.refuse_copies(1, 0)
            assert outcomes[-1].status is Status.COMPLETED
            assert len(outcomes) > 1
            assert all(outcome.count(PageResult.FAILED) == 4 for outcome in outcomes[:-1])

        refused_in_turn(lambda: client.backup(handle, [1, 2, 3, 4], keys, ready=UNFENCED), 0)
        memory.poison(range(64))
        refused_in_turn(lambda: client.restore(handle, keys, [10, 20, 30, 40], ready=UNFENCED), 4)
        memory.check([10, 20, 30, 40], keys)
        client.invalidate(handle, keys[2:3])
        assert client.match(handle, keys) == 2


@scenario
def one_direction_stands_still_and_the_other_goes_on(device: Device) -> None:
    with world(device) as it:
        memory, client, other = it.attention_pool(), it.client(), it.client()
        handle, foreign = it.register(client, memory), it.register(other, memory)
        keys = filled(it, client, memory, handle, 4)
        lane: Any = it.engine.backups
        it.stall(lane)
        stuck = client.backup(handle, [7], it.keys(handle, 1, seed=1), ready=UNFENCED, timeout_s=0.1)
        until(lambda: lane.flying == 1)
        for _ in range(50):
            done(other.restore(foreign, keys, [10, 11, 12, 13], ready=UNFENCED))
        memory.check([10, 11, 12, 13], keys)
        refused(lambda: stuck.wait(0.3), CompletionTimeout, "timeout")
        status: Any = client.status()
        assert status["operations"]["backup:expiring"] == 1
        given_up = client.backup(handle, [8], it.keys(handle, 1, seed=2), ready=UNFENCED)
        assert given_up.cancel()
        assert given_up.status is Status.CANCELLED
        it.resume(lane)
        outcome = stuck.wait(TIMEOUT_S)
        assert outcome.status is Status.TIMED_OUT
        assert isinstance(outcome.error, CompletionTimeout)
        assert client.match(handle, it.keys(handle, 1, seed=1)) == 0


@scenario
def leaving_with_a_copy_that_hangs_is_refused_until_it_ends(device: Device) -> None:
    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        handle = it.register(client, memory)
        lane: Any = it.engine.backups
        it.stall(lane)
        ticket = client.backup(handle, [1], it.keys(handle, 1), ready=UNFENCED)
        until(lambda: lane.flying == 1)
        refused(lambda: client.close(timeout_s=0.1), CompletionTimeout, "stalled_stream")
        if chosen() == INPROC:
            refused(lambda: it.local.close(0.1), CompletionTimeout, "stalled_stream")
        assert ticket.status is Status.CANCELLED
        it.resume(lane)
        client.close(timeout_s=TIMEOUT_S)


@scenario
def what_cannot_be_pinned_goes_through_a_small_buffer(device: Device) -> None:
    with world(device, bounce_nbytes=2**16, pin_nbytes=3 * 2**20) as it:
        status: Any = it.engine.status()
        assert status["pinned"] is False
        assert "cannot be pinned" in status["unpinned_reason"]
        assert "ulimit -l" in status["unpinned_reason"]
        memories = [it.attention_pool(pages=90), it.mla_pool()]
        client, stream = it.client(), it.stream()
        for memory in memories:
            handle = it.register(client, memory)
            pages = np.random.default_rng(3).permutation(np.arange(1, memory.layout.page_count))
            keys = it.keys(handle, len(pages) // 2)
            sources, targets = pages[: len(keys)], pages[len(keys) : 2 * len(keys)]
            memory.fill(sources, keys)
            done(client.backup(handle, sources, keys, ready=stream))
            memory.poison(range(1, memory.layout.page_count))
            restore = client.restore(handle, keys, targets, ready=stream)
            assert restore.fence is not None
            restore.fence.synchronize(layer=0, timeout_s=TIMEOUT_S)
            done(restore)
            memory.check(targets, keys)
        big = it.attention_pool(pages=3, row=2000, page_tokens=8)
        refused(lambda: it.register(client, big), UsageError, "bounce")
    refused(lambda: World(device, pin_nbytes=3 * 2**20, pin_required=True), ResourceExhausted, "host_memory")


@scenario
def cancels_and_deadlines_race_with_completion(device: Device) -> None:
    """Whatever comes first: one status a side, nothing held, nothing twice, and no wrong byte is ever found."""
    count = 10_000 if device.info.uuid.startswith("host-") else 1_500
    choose = random.Random(11)
    with world(device, max_ops=400) as it:
        memory, client = it.attention_pool(pages=65), it.client()
        handle = it.register(client, memory)
        everything = [it.keys(handle, 1, seed=number) for number in range(64)]
        memory.fill(range(1, 65), np.concatenate(everything))
        tickets: list[Any] = []
        victims: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def canceller() -> None:
            while (ticket := victims.get()) is not None:
                time.sleep(choose.choice((0, 0, 1e-4)))
                ticket.cancel()

        thread = threading.Thread(target=canceller)
        thread.start()
        for number in range(count):
            page = choose.randrange(1, 65)
            timeout_s = choose.choice((TIMEOUT_S, TIMEOUT_S, 0.0, 2e-4, 1e-3))
            if number % 2:
                ticket = client.backup(handle, [page], everything[page - 1], ready=UNFENCED, timeout_s=timeout_s)
            else:
                ticket = client.restore(handle, everything[page - 1], [page], ready=UNFENCED, timeout_s=timeout_s)
            tickets.append(ticket)
            if choose.random() < 0.4:
                ticket.cancel() if choose.random() < 0.3 else victims.put(ticket)
            if choose.random() < 0.1:
                client.invalidate(handle, everything[page - 1])
            if len(tickets) % 200 == 0:
                tickets[-1].wait(TIMEOUT_S)
        victims.put(None)
        thread.join(TIMEOUT_S)
        statuses = Counter(ticket.wait(TIMEOUT_S).status for ticket in tickets)
        assert {Status.COMPLETED, Status.CANCELLED, Status.TIMED_OUT, Status.REFUSED} <= set(statuses), statuses
        until(lambda: not it.engine.backups._work and not it.engine.restores._work)
        client.check_ends()
        it.tier.audit()
        status: Any = it.tier.status()
        assert status["holds"] == status["reservations"] == 0
        memory.check(range(1, 65), np.concatenate(everything))


@scenario(only=INPROC)  # elsewhere a defect ends the engine's process, as a kill does
def a_defect_ends_the_engine_and_leaves_nobody_waiting(device: Device) -> None:
    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        handle, stream = it.register(client, memory), it.stream()
        keys = filled(it, client, memory, handle, 1)
        gate = Gate(device)
        gate.stall(stream)
        it.transfer.copy(stream, memory.built.exports[0][0], memory.built.exports[0][0], 1)
        waiting = [
            client.backup(handle, [3], it.keys(handle, 1, seed=3), ready=stream),
            client.restore(handle, keys, [4], ready=stream),
        ]
        lane: Any = it.engine.backups
        mover: Any = lane.copies.mover
        mover.move = lambda *_arguments, **_options: 1 // 0
        broken = client.backup(handle, [2], it.keys(handle, 1, seed=2), ready=UNFENCED)
        outcomes = [ticket.wait(TIMEOUT_S) for ticket in (broken, *waiting)]
        assert [outcome.status for outcome in outcomes] == [Status.FAILED, Status.DISCARDED, Status.DISCARDED]
        late = client.lookup(handle, keys).wait(TIMEOUT_S)
        assert late.status is Status.REFUSED
        assert late.error is not None
        assert late.error.code == "defect"
        gate.resume(stream)
        assert client.match(handle, keys) == 1


@scenario
def a_cancel_word_is_read_before_anything_is_published(device: Device) -> None:
    """A client gives up and uses its page again while it is being copied; what it tells comes too late."""
    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        handle = it.register(client, memory)
        keys, lane = it.keys(handle, 1), it.engine.backups
        memory.fill([1], keys)
        it.stall(lane)
        ticket = client.backup(handle, [1], keys, ready=UNFENCED)
        until(lambda: lane.flying == 1)
        word: Any = ticket._cancel
        word.set()
        memory.poison([1])
        it.resume(lane)
        until(lambda: client.record.engine_ends[ticket.op] == 1)
        client.ping()
        assert Event.SOURCE_RELEASED in client.record.told[ticket.op]
        assert Event.VISIBLE not in client.record.told[ticket.op]
        assert client.match(handle, keys) == 0
        assert ticket.cancel()
        assert ticket.status is Status.CANCELLED


@scenario(only=INPROC)
def a_defect_leaves_pages_to_their_copies_until_these_are_over(device: Device) -> None:
    """An engine that ends while copies run gives no page back that one of them may still write to."""
    with world(device) as it:
        memory, client = it.attention_pool(), it.client()
        handle = it.register(client, memory)
        keys = filled(it, client, memory, handle, 8)
        lane: Any = it.engine.restores
        it.stall(lane)
        running = client.restore(handle, keys[:4], [10, 11, 12, 13], ready=UNFENCED)
        until(lambda: lane.flying == 1)
        move, record = lane.copies.mover.move, lane.copies.markers.record

        def unrecorded(_stream: Any) -> Any:
            raise DriverError("the driver refused a marker", remedy="none: it was asked to")

        def broken(*arguments: Any, **options: Any) -> None:
            move(*arguments, **options)
            lane.copies.markers.record = unrecorded
            raise ZeroDivisionError

        lane.copies.mover.move = broken
        half_done = client.restore(handle, keys[4:], [14, 15, 16, 17], ready=UNFENCED)
        until(lambda: it.engine.lost is not None)
        for ticket in (running, half_done):
            with pytest.raises(CompletionTimeout):
                ticket.wait(0.05)
        it.resume(lane)
        assert running.wait(TIMEOUT_S).status is Status.COMPLETED
        memory.check([10, 11, 12, 13], keys[:4])
        with pytest.raises(CompletionTimeout):
            half_done.wait(0.02)
        lane.copies.markers.record = record
        outcome = half_done.wait(TIMEOUT_S)
        assert outcome.status is Status.FAILED
        assert outcome.error is not None
        assert outcome.error.code == "defect"
