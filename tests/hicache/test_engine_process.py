"""An engine process alone: pages move both ways, ready points are watched, and what is wrong touches nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from devipc.errors import BoundsError, DriverError, FencePoisoned, HandleError, StaleError, UsageError
from devipc.hicache.daemon.remotecopies import RemoteJob
from devipc.hicache.planning.planner import Direction
from devipc.hicache.tier.records import Places
from devipc.hicache.wire import jobs as j
from devipc.hicache.wire.protocol import Point
from devipc.hicache.wire.slots import Readiness
from tests.hicache.engine_client import ClientProcess
from tests.hicache.engine_with_faults import NO_SYNC, PIN_NBYTES, Faults
from tests.hicache.engine_world import PAGES, EngineWorld, contents, engine_world
from tests.hicache.pools import until

ALL = list(range(PAGES))


def there_and_back(it: EngineWorld, client: ClientProcess) -> None:
    """Pages go to the host tier and come back to other places; fences are seen by layer group."""
    sources = list(range(1, 9))
    client.fill(pages=sources, seed=5)
    places = it.places(8)
    job = it.move(client, Direction.BACKUP, sources, places, slot=3, op=11)
    assert job.error is None
    first = client.base(slot=3)
    client.wait(direction="backup", n=first)
    assert it.host(places) == contents(client, 8, 5)
    targets = [int(page) for page in np.random.default_rng(1).permutation(np.arange(10, PAGES))[:8]]
    client.poison(pages=ALL[9:])
    job = it.move(client, Direction.RESTORE, targets, places, slot=4, op=12)
    assert job.error is None
    first = client.base(slot=4)
    client.wait(direction="restore", n=first + 4)
    client.check(pages=targets, seed=5)
    again = it.move(client, Direction.RESTORE, targets, places, slot=5, op=13)
    assert again.error is None
    assert client.base(slot=5) == first + 5  # a value for each group of layers
    client.wait(direction="restore", n=first + 9)


def alone(backend: str, *, bounced: bool = False, **options: Any) -> str:
    """In a world of its own, which then closes as it should."""
    with engine_world(backend, **options) as it:
        it.start()
        with it.client() as client:
            chosen = it.attach(client)
            assert bool(it.carrier.unpinned_reason) is bounced
            there_and_back(it, client)
            it.close_pool()
            client.unshare(number=1, generation=1, chunk=0, timeout_s=10)
        it.process.close_client(it.remote)
        status: Any = it.process.status()
        assert status["clients"] == {}
        assert status["lanes"]["restore"] == {"flying": 0, "jobs": 2}
        assert not it.ends
    return chosen


@pytest.mark.long
@pytest.mark.simulator
def test_there_and_back_on_simulated_cuda() -> None:
    assert alone("cuda") == "stream_memop"


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["stream_memop", "host_flag", "polling", "event"])
@pytest.mark.parametrize("backend", ["host", pytest.param("cuda", marks=pytest.mark.simulator)])
def test_every_strategy(backend: str, strategy: str) -> None:
    assert alone(backend, strategy=strategy) == strategy


@pytest.mark.long
@pytest.mark.simulator
def test_without_synchronisation_on_simulated_cuda() -> None:
    assert alone("cuda", memops=0, ipc_events=0) in ("host_flag", "polling")


@pytest.mark.long
def test_without_synchronisation_on_the_host() -> None:
    assert alone("host", variables={NO_SYNC: "1"}) in ("host_flag", "polling")


@pytest.mark.long
@pytest.mark.parametrize("backend", ["host", pytest.param("cuda", marks=pytest.mark.simulator)])
def test_through_a_small_buffer(backend: str) -> None:
    assert alone(backend, bounced=True, variables={PIN_NBYTES: str(3 * 2**20)})


# --- one engine and one client for all that follows ---


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[EngineWorld, ClientProcess]]:
    with engine_world("host") as it:
        it.start()
        with it.client() as client:
            it.attach(client)
            yield it, client
            it.process.close_client(it.remote)
        assert not it.ends


Pair = tuple[EngineWorld, ClientProcess]


@pytest.fixture
def faults(pair: Pair) -> Iterator[Faults]:
    """Those of the one engine: none is left to the tests that follow, however this one ends."""
    with pair[0].faults() as made:
        yield made
        made.undo()


def test_there_and_back(pair: Pair) -> None:
    there_and_back(*pair)


def test_what_is_submitted_can_be_waited_for_before_it_is_done(pair: Pair, faults: Faults) -> None:
    it, client = pair
    faults.stall("restore")
    first = it.start_job(client, Direction.RESTORE, [20], it.places(1), slot=1, op=1)
    second = it.start_job(client, Direction.RESTORE, [21], it.places(1), slot=2, op=2)
    until(lambda: client.base(slot=2) > 0)
    one, two = client.base(slot=1), client.base(slot=2)
    assert two == one + 5
    assert not client.query(direction="restore", n=one)
    assert not first.poll()
    # The other direction goes on.
    backup = it.move(client, Direction.BACKUP, [1], it.places(1, 20), slot=3, op=3)
    assert backup.error is None
    assert not second.poll()
    faults.resume("restore")
    until(lambda: bool(first.poll() and second.poll()))
    client.wait(direction="restore", n=two + 4)


def test_ready_points(pair: Pair) -> None:
    it, client = pair
    client.ready_fence(number=1, stalled=True)
    client.signal(number=1, n=7)
    point, later = it.ready(Point(fence=1, n=7)), it.ready(Point(fence=1, n=8))
    word, never = it.ready(None, 10), it.ready(None, 11)
    for slot in (10, 11):
        client.begin(slot=slot, op=1)
    everything = (point, later, word, never)
    assert not any(one.reached() for one in everything)
    until(lambda: it.process.status()["watched"] == 4)
    assert not any(one.reached() for one in everything)
    client.say_ready(slot=10, readiness=Readiness.REACHED)
    until(word.reached)
    client.say_ready(slot=11, readiness=Readiness.NEVER)
    with pytest.raises(FencePoisoned):
        until(never.reached)
    client.resume(number=1)
    until(point.reached)
    assert not later.reached()
    known = it.ready(Point(fence=1, n=3))
    until(known.reached)
    # Nobody asks any more: nothing is watched.
    del later, everything
    until(lambda: it.process.status()["watched"] == 0)
    assert it.ready(None).reached()


def test_a_ready_fence_that_fails(pair: Pair) -> None:
    it, client = pair
    client.ready_fence(number=2, stalled=False)
    point = it.ready(Point(fence=2, n=1))
    assert not point.reached()
    client.poison_ready(number=2)
    with pytest.raises(FencePoisoned):
        until(point.reached)
    unknown = it.ready(Point(fence=77, n=1))
    with pytest.raises(HandleError):
        until(unknown.reached)


def test_what_is_outside_is_refused_and_nothing_is_touched(pair: Pair) -> None:
    it, client = pair
    client.poison(pages=ALL[1:])
    before = bytes(it.arena.view)
    good, ends = it.places(2), it.arena.nbytes
    one = np.ones(2, np.int64)
    bad_places = [
        Places(good.offset - it.page_nbytes, good.span, good.index),
        Places(good.offset + ends, good.span, good.index),
        Places(one * 2**62, good.span, good.index),
        Places(one * -(2**63), good.span, good.index),
        Places(good.offset, one * 2**62, good.index),
        Places(good.offset, one * 0, good.index),
        Places(good.offset, one * -1, good.index),
        Places(good.offset, good.span, one * 5),
        Places(good.offset, good.span, one * -1),
        Places(one * 0, good.span, good.index),
        Places(good.offset - it.page_nbytes),
        Places(good.offset + ends - it.page_nbytes + 1),
        Places(one * 2**62),
        Places(one * -(2**63)),
        Places(good.offset // 2),
        Places(one * 0),
    ]
    for direction in Direction:
        for places in bad_places:
            if direction is Direction.RESTORE and (places.offset == 0).all():
                continue  # one host page may be restored twice
            job = it.move(client, direction, [1, 2], places, slot=1, op=1)
            assert isinstance(job.error, HandleError), (direction, places)
            assert client.base(slot=1) > 0, "whoever waits for its fence would wait for ever"
        for pages in ([-1, 1], [PAGES, 1], [2**62, 1], [-(2**63), 1]):
            job = it.move(client, direction, pages, good, slot=1, op=1)
            assert isinstance(job.error, BoundsError), (direction, pages)
    job = it.move(client, Direction.RESTORE, [3, 3], good, slot=1, op=1)
    assert isinstance(job.error, BoundsError)
    assert bytes(it.arena.view) == before
    assert client.is_poisoned(pages=ALL[1:])
    last = client.base(slot=1)
    client.wait(direction="restore", n=last + 4)


def test_orders_about_what_is_not_there_are_refused(pair: Pair) -> None:
    it, client = pair
    lane = it.lanes[Direction.BACKUP]
    assert lane.start(it.pool, Direction.BACKUP, np.empty(0, np.int64), it.places(0), it.remote.fence(0, 1)).poll()

    def order(**changes: Any) -> Any:
        job = RemoteJob(it.carrier, lambda: None)
        move = j.Move(it.carrier.number(job), it.client_id, 1, 1, b"", b"", b"", b"", 0, 1)
        lane._outlet.send(j.encode(replace(move, **changes)))
        until(job.poll)
        return job.error

    assert order() is None
    assert isinstance(order(client=bytes(16)), StaleError)
    assert isinstance(order(pool=2), StaleError)
    assert isinstance(order(generation=2), StaleError)
    assert isinstance(order(slot=64), BoundsError)
    assert isinstance(order(pages=bytes(16), offsets=bytes(8)), BoundsError)
    assert isinstance(order(pages=bytes(8), offsets=bytes(8), spans=bytes(8)), BoundsError)
    assert isinstance(order(pages=bytes(8), offsets=bytes(8), indexes=bytes(8)), BoundsError)
    assert isinstance(order(pages=bytes(7), offsets=bytes(7), spans=bytes(7), indexes=bytes(7)), BoundsError)
    assert isinstance(it.open_pool(1, 1), UsageError)
    assert isinstance(it.open_pool(5, 1), HandleError)
    there_and_back(it, client)


def test_copies_that_the_driver_refuses(pair: Pair, faults: Faults) -> None:
    """A job that breaks in the middle says so, and all of its values are reached: nobody waits for ever."""
    it, client = pair
    pages = ALL[:0:-1]  # so many runs of pages are more than one copy, whatever copies cost here
    with faults.refusing(1, after=1):
        job = it.move(client, Direction.RESTORE, pages, it.places(len(pages)), slot=1, op=1)
    assert isinstance(job.error, DriverError)
    client.wait(direction="restore", n=client.base(slot=1) + 4)
    with faults.refusing(1):
        job = it.move(client, Direction.RESTORE, [1, 2], it.places(2), slot=2, op=2)
    assert isinstance(job.error, DriverError)
    client.wait(direction="restore", n=client.base(slot=2) + 4)
    there_and_back(it, client)


def test_a_stuck_driver_call_is_told_from_an_idle_engine(pair: Pair, faults: Faults) -> None:
    it, client = pair
    assert set(it.process.stuck()) == {"process"}
    faults.hang(0.8)
    job = it.start_job(client, Direction.BACKUP, [1], it.places(1), slot=1, op=1)
    until(lambda: it.process.stuck().get("backup", 0) > 0.5)
    assert it.process.stuck()["process"] < 0.5
    assert "restore" not in it.process.stuck()
    until(job.poll)
    until(lambda: set(it.process.stuck()) == {"process"})
    faults.hold_interpreter(1.0)
    job = it.start_job(client, Direction.BACKUP, [1], it.places(1), slot=1, op=1)
    until(lambda: it.process.stuck()["process"] > 0.6)
    until(job.poll)
    until(lambda: it.process.stuck()["process"] < 0.3)


@pytest.mark.long
def test_a_supervisor_that_takes_no_reports_finds_a_healthy_engine_later(pair: Pair) -> None:
    it, client = pair
    client.begin(slot=20, op=1)
    goes_on = threading.Event()
    lane = it.lanes[Direction.BACKUP]
    lane.wake = lambda: until(goes_on.is_set)
    try:
        points = [it.ready(None, 20) for _ in range(1500)]
        assert not any(point.reached() for point in points)
        until(lambda: it.process.status()["watched"] == len(points))
        client.say_ready(slot=20, readiness=Readiness.REACHED)
        until(lambda: it.process.stuck().get("watch", 0) > 0.1)
        time.sleep(1.0)
        assert it.process.stuck()["watch"] < 0.6
    finally:
        goes_on.set()
        lane.wake = lambda: None
    until(lambda: all(point.reached() for point in points))
    there_and_back(it, client)


def test_two_first_uses_of_a_ready_fence(pair: Pair) -> None:
    it, client = pair
    client.ready_fence(number=3, stalled=False)
    points = [it.ready(Point(fence=3, n=1)) for _ in range(20)]
    assert not any(point.reached() for point in points)
    client.signal(number=3, n=1)
    until(lambda: all(point.reached() for point in points))
