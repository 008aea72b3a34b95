"""An engine process with several submitting threads: orders are taken ahead, and what fails in any thread is said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from devipc.errors import BoundsError, DeviceLostError, DriverError, StaleError
from devipc.hicache.engine.pools import Pool
from devipc.hicache.planning.planner import Direction
from devipc.hicache.wire import jobs as j
from tests.hicache.engine_client import ClientProcess
from tests.hicache.engine_with_faults import SUBMITTERS
from tests.hicache.engine_world import PAGES, EngineWorld, contents, engine_world
from tests.hicache.pools import until

SPREAD = {SUBMITTERS: "3"}
_BUSY_S = 0.5
"""How long the first job is being submitted: the others have come meanwhile."""
Pair = tuple[EngineWorld, ClientProcess]


@pytest.fixture(scope="module", params=["host", pytest.param("cuda", marks=pytest.mark.simulator)])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with engine_world(request.param, variables=SPREAD) as it:
        it.start()
        with it.client() as client:
            it.attach(client)
            yield it, client
            it.process.close_client(it.remote)


def test_many_jobs_of_both_directions_move_all_bytes(pair: Pair) -> None:
    it, client = pair
    with it.faults() as faults:
        sources = list(range(1, 13))
        client.fill(pages=sources, seed=3)
        faults.hang(_BUSY_S)  # so that orders wait
        jobs = [
            it.start_job(client, Direction.BACKUP, [page], it.places(1, at), slot=at, op=at + 1)
            for at, page in enumerate(sources)
        ]
        until(lambda: all(job.poll() for job in list(jobs)))
        assert [job.error for job in jobs] == [None] * len(jobs)
        assert it.host(it.places(12)) == contents(client, 12, 3)
        assert set(faults.ahead()) == {"PlannedOrder"}
        assert faults.plans() == len(jobs)  # what was planned ahead is not planned again
        targets = [int(page) for page in np.random.default_rng(4).permutation(np.arange(14, PAGES))[:24]]
        client.poison(pages=targets)
        jobs = []
        for at in range(0, 12, 2):  # a restore and a backup at a time
            pages, places = targets[2 * at : 2 * at + 4], it.places(2, at)
            jobs.append(it.start_job(client, Direction.RESTORE, pages[:2], places, slot=at, op=50 + at))
            jobs.append(
                it.start_job(client, Direction.BACKUP, [sources[at]], it.places(1, 20 + at), slot=at + 1, op=51 + at)
            )
        until(lambda: all(job.poll() for job in list(jobs)))
        assert [job.error for job in jobs] == [None] * len(jobs)
        client.wait(direction="restore", n=client.base(slot=10) + 4)
        restored = [page for at in range(0, 12, 2) for page in targets[2 * at : 2 * at + 2]]
        client.check(pages=restored, seed=3)
        until(lambda: all(forms["fanned"] for forms in it.carrier.plans().values()))  # else one thread did all


def test_an_engine_says_what_entries_take_each_way(pair: Pair) -> None:
    it, _ = pair
    assert it.process.facts["submitting_threads"] == 3
    assert it.process.facts["submitting_s"] == {
        "to_device": {"long_s": 0.0, "short_s": 0.0},
        "to_host": {"long_s": 0.0, "short_s": 1e-12},
    }


def test_a_refusal_in_any_thread_fails_its_job_and_no_other(pair: Pair) -> None:
    it, client = pair
    with it.faults() as faults:
        for after in range(3):
            with faults.refusing(1, after=after):
                job = it.move(client, Direction.BACKUP, [1, 5, 9], it.places(3), slot=1, op=100 + after)
            assert isinstance(job.error, DriverError)
    job = it.move(client, Direction.BACKUP, [1, 2, 3], it.places(3), slot=1, op=110)
    assert job.error is None


def order(it: EngineWorld, pages: list[int], *, slot: int, op: int, **changes: Any) -> Any:
    """Start a backup by an order of which something is changed."""
    lane: Any = it.lanes[Direction.BACKUP]
    send = lane._outlet.send

    def changed(body: bytes) -> None:
        send(j.encode(replace(j.decode_move(body), **changes)))

    lane._outlet.send = changed
    try:
        ids = np.array(pages, np.int64)
        return lane.start(it.pool, Direction.BACKUP, ids, it.places(len(pages), 11), it.remote.fence(slot, op))
    finally:
        lane._outlet.send = send


@pytest.mark.parametrize(
    ("changes", "pages", "kind", "error"),
    [({"generation": 7}, [1], "RefusedOrder", StaleError), ({}, [PAGES + 3], "CopyOrder", BoundsError)],
)
def test_wrong_orders_that_are_taken_ahead_are_refused_where_they_would_have_begun(
    pair: Pair, changes: dict[str, Any], pages: list[int], kind: str, error: type[Exception]
) -> None:
    it, client = pair
    with it.faults() as faults:
        faults.ahead()
        faults.hang(_BUSY_S)
        jobs = [
            it.start_job(client, Direction.BACKUP, [1, 5, 9], it.places(3, at), slot=at, op=200 + at) for at in (0, 3)
        ]  # what is behind the second is taken ahead when that begins
        client.begin(slot=4, op=210)
        jobs.append(order(it, pages, slot=4, op=210, **changes))
        jobs.append(it.start_job(client, Direction.BACKUP, [4], it.places(1, 7), slot=6, op=220))
        until(lambda: all(job.poll() for job in list(jobs)))
        assert [type(job.error) for job in jobs] == [type(None), type(None), error, type(None)]
        assert kind in faults.ahead()


def test_a_pool_that_closes_waits_for_orders_that_were_taken_ahead(pair: Pair) -> None:
    it, client = pair
    with it.faults() as faults:
        faults.ahead()
        faults.hang(_BUSY_S)
        jobs = [
            it.start_job(client, Direction.BACKUP, [1, 5, 9], it.places(3, 3 * at), slot=at, op=300 + at)
            for at in range(3)
        ]
        until(lambda: "PlannedOrder" in faults.ahead())
        over: list[bool] = []
        it.carrier.close_pool(it.pool.opened, lambda: over.append(jobs[0].poll()))
        until(lambda: bool(over) and all(job.poll() for job in jobs))
    assert over == [True]
    assert [job.error for job in jobs[:2]] == [None, None]
    assert jobs[2].error is None or isinstance(jobs[2].error, StaleError)  # by when it was taken
    it.pool = Pool(1, 1, it.layout, it.open_pool(1, 1), bytes(16))
    assert it.move(client, Direction.BACKUP, [1], it.places(1), slot=1, op=310).error is None


def test_a_defect_in_reading_an_order_ends_the_engine() -> None:
    with engine_world("host") as it:
        it.start()
        with it.client() as client:
            it.attach(client)
            with it.faults() as faults:
                faults.misread()
                it.start_job(client, Direction.BACKUP, [1], it.places(1), slot=1, op=1)
                until(lambda: len(it.ends) == 2)
            assert "reading an order" in str(it.ends[1])
            it.process.close_client(it.remote)


@pytest.mark.chaos
@pytest.mark.parametrize("call", [2, 5, 9])
def test_killed_while_several_submit(call: int) -> None:
    with engine_world("host", variables=SPREAD) as it:
        it.start()
        with it.client() as client:
            it.attach(client)
            with it.faults() as faults:
                faults.kill_at(call)
            jobs = [
                it.start_job(client, direction, [2 * at + 1, 2 * at + 2], it.places(2, 2 * at), slot=at, op=at + 1)
                for at, direction in enumerate([Direction.BACKUP, Direction.RESTORE] * 4)
            ]
            until(lambda: len(it.ends) == 2)  # that it dies, and that it is gone
            finished = 0
            for job in jobs:
                try:
                    finished += job.poll()
                except DeviceLostError:
                    continue
            assert finished < len(jobs)
            it.process.close_client(it.remote)
